//! How an engine that manages its own KV memory uses the prefix cache, for two requests that share
//! a prefix: `cargo run -p stolon-kvcache --example own_blocks`.

#![allow(clippy::print_stdout, reason = "an example prints what it does")]

use stolon_kvcache::{BlockPool, Namespace, prefix_tree};

const BLOCK_SIZE: usize = 4;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut writer, reader) = prefix_tree(BLOCK_SIZE)?;
    let (mut pool, fence) = BlockPool::new(64);
    let tenant = Namespace::builder().salt("tenant 1").build();

    for prompt in [&[7, 7, 1, 2, 3, 4, 5, 6, 9][..], &[7, 7, 1, 2, 3, 4, 5, 6, 8, 8, 8, 8]] {
        let cached = reader.query_match_len(&tenant, prompt);
        println!("query: {cached} of {} positions are cached", prompt.len());

        // The query was a hint. `acquire` locks what is cached now, so that it stays cached.
        let mut prefix = writer.acquire(&tenant, prompt);
        let mut private = pool.reserve((prompt.len() - prefix.len()).div_ceil(BLOCK_SIZE))?;

        // Prefill the rest of the prompt: read from `prefix`, write to `private`.
        let step = fence.begin();
        println!("step: reads {:?}, writes {:?}", prefix.blocks(), private.blocks());
        drop(step);

        // Publish the full blocks. The partial one stays private.
        let committed = writer.commit_from(&mut prefix, prompt, &mut private)?;
        println!("committed {committed} blocks, {} stay private", private.len());
    } // Both leases end here: the prefix may be evicted again, the private block is free.

    let evicted = writer.evict(1);
    println!("evicted {evicted:?}; the tree now holds {:?}", writer.counts());
    pool.release(evicted);
    Ok(())
}
