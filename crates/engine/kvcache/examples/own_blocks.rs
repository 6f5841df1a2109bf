//! How an engine that manages its own KV memory uses the prefix cache, for two requests that share
//! a prefix: `cargo run -p stolon-kvcache --example own_blocks`.

#![allow(clippy::print_stdout, reason = "an example prints what it does")]

use stolon_kvcache::{Namespace, PrefixCache};

const BLOCK_SIZE: usize = 4;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut cache = PrefixCache::new(BLOCK_SIZE, 64)?;
    let tenant = Namespace::builder().salt("tenant 1").build();

    for prompt in [&[7, 7, 1, 2, 3, 4, 5, 6, 9][..], &[7, 7, 1, 2, 3, 4, 5, 6, 8, 8, 8, 8]] {
        // The last position is always computed, because its logits give the first token.
        let mut sequence = cache.begin(&tenant, &prompt[..prompt.len() - 1])?;
        let cached = sequence.cached_len();
        println!("{cached} of {} positions are cached", prompt.len());

        // Prefill: compute the positions from `cached` on, and write their KV to the table's
        // blocks.
        cache.grow(&mut sequence, &prompt[prompt.len() - 1..])?;
        let step = cache.begin_step();
        println!("step: table {:?}", sequence.table().collect::<Vec<_>>());
        drop(step);
        cache.commit(&mut sequence, prompt.len())?;

        // Generate three tokens. Each is computed in a separate step.
        for token in [100, 101, 102] {
            cache.grow(&mut sequence, &[token])?;
            drop(cache.begin_step());
            let written = sequence.positions().len();
            cache.commit(&mut sequence, written)?;
        }
        let private = sequence.private().len();
        println!("{} positions are cached, {private} blocks stay private", sequence.cached_len());
    } // The sequence ends here: its prefix may be evicted again, its private blocks are free.

    let evicted = cache.make_room(61);
    println!("evicted {evicted:?}; the tree now holds {:?}", cache.tree_counts());
    cache.audit()?;
    Ok(())
}
