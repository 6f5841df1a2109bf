//! An engine that indexes its own KV blocks: `cargo run -p stolon-kvcache --example own_blocks`.

#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use stolon_kvcache::{BlockPool, Namespace, prefix_tree};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut writer, reader) = prefix_tree(4)?; // 4 positions a block
    let (mut pool, fence) = BlockPool::new(64);
    let tenant = Namespace::builder().salt("tenant 1").build();

    for prompt in [&[7, 7, 1, 2, 3, 4, 5, 6, 9][..], &[7, 7, 1, 2, 3, 4, 5, 6, 8, 8, 8, 8]] {
        println!("hint: {} of {} cached", reader.query_match_len(&tenant, prompt), prompt.len());

        let mut prefix = writer.acquire(&tenant, prompt); // the truth, and it stays true
        let mut private = pool.reserve((prompt.len() - prefix.len()).div_ceil(4))?;

        let step = fence.begin(); // compute the rest: read prefix.blocks(), write private.blocks()
        println!("reads {:?}, writes {:?}", prefix.blocks(), private.blocks());
        drop(step);

        let full = (prompt.len() - prefix.len()) / 4; // publish what is full
        let done = private.commit_front(full);
        let commit = writer.commit(&mut prefix, prompt, &done);
        pool.release(commit.duplicates);
    } // the leases end here: the prefixes may be evicted, the private rest is free again

    let evicted = writer.evict(1);
    println!("made room: {evicted:?}, then {:?}", writer.counts());
    pool.release(evicted);
    Ok(())
}
