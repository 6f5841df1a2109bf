//! Criterion benchmarks of the prefix tree: lock-free queries, the same behind an `RwLock`, and the
//! writer. Run them with `cargo bench -p stolon-benches --bench prefix_index`. The comparison with
//! other prefix indexes is in `benches/rivals-index`.

#![allow(missing_docs, reason = "criterion's macros define undocumented functions")]

use criterion::{Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use std::sync::RwLock;
use stolon_kvcache::{BlockId, Namespace, TreeReader, TreeWriter, prefix_tree};

const BLOCK: usize = 16;

/// 200 random prompts of 512 blocks that share their first 128 blocks, from a fixed seed.
fn prompts() -> Vec<Vec<u32>> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut token = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as u32 % 150_000
    };
    let system: Vec<u32> = (0..128 * BLOCK).map(|_| token()).collect();
    let mut prompt = || system.iter().copied().chain((0..384 * BLOCK).map(|_| token())).collect();
    (0..200).map(|_| prompt()).collect()
}

fn insert(writer: &mut TreeWriter, prompt: &[u32], first: u32) {
    let mut lease = writer.acquire(&Namespace::default(), prompt);
    let missing = (prompt.len() - lease.len()) / BLOCK;
    let blocks: Vec<BlockId> = (first..).take(missing).map(BlockId).collect();
    let _ = writer.commit(&mut lease, prompt, &blocks).expect("a valid commit");
}

fn filled(prompts: &[Vec<u32>]) -> (TreeWriter, TreeReader) {
    let (mut writer, reader) = prefix_tree(BLOCK).expect("a block size");
    for (index, prompt) in prompts.iter().enumerate() {
        insert(&mut writer, prompt, index as u32 * 512);
    }
    (writer, reader)
}

fn lookups(c: &mut Criterion) {
    let prompts = prompts();
    let (writer, reader) = filled(&prompts);
    let base = Namespace::default();
    let mut diverging = prompts.clone();
    diverging.iter_mut().for_each(|prompt| prompt[128 * BLOCK] ^= 1 << 20);
    let missing: Vec<u32> = prompts[0].iter().map(|token| token ^ 1 << 20).collect();
    let mut group = c.benchmark_group("prefix_index");
    let mut order = (0..prompts.len()).cycle();
    let mut next = || order.next().expect("a cycle has no end");
    group.bench_function("full", |b| {
        b.iter(|| black_box(reader.query_match_len(&base, &prompts[next()])));
    });
    group.bench_function("partial", |b| {
        b.iter(|| black_box(reader.query_match_len(&base, &diverging[next()])));
    });
    group.bench_function("miss", |b| {
        b.iter(|| black_box(reader.query_match_len(&base, &missing)));
    });
    let hashes: Vec<Vec<u64>> =
        prompts.iter().map(|prompt| reader.block_hashes(&base, prompt)).collect();
    group.bench_function("full_hashes_given", |b| {
        b.iter(|| black_box(reader.query_match_hashes(&base, &hashes[next()])));
    });
    let locked = RwLock::new((writer, reader));
    group.bench_function("full_behind_rwlock", |b| {
        b.iter(|| {
            let tree = locked.read().expect("no panic under the lock");
            black_box(tree.1.query_match_len(&base, &prompts[next()]))
        });
    });
    group.finish();
}

fn writer(c: &mut Criterion) {
    let prompts = prompts();
    let mut group = c.benchmark_group("prefix_index_writer");
    group.sample_size(10);
    group.bench_function("fill_76928_blocks", |b| b.iter(|| filled(&prompts).0));
    let (mut writer, _reader) = filled(&prompts);
    group.bench_function("evict_10_blocks_and_refill", |b| {
        b.iter(|| {
            let _ = black_box(writer.evict(10));
            insert(&mut writer, &prompts[0], 200_000);
        });
    });
    group.finish();
}

criterion_group!(benches, lookups, writer);
criterion_main!(benches);
