//! The tree and the pool joined in [`PrefixCache`]: no sequence of calls loses a block or hands one
//! out twice.

use proptest::prelude::*;
use std::collections::HashSet;
use stolon_kvcache::{
    BlockId, BlockPool, CommitError, ConfigError, GrowError, Namespace, PoolCounts, PrefixCache,
    SequenceBlocks, Shortage, TokenSpan, TokenSpanInterner,
};

fn base() -> Namespace {
    Namespace::default()
}

/// Evicts everything that is not locked and expects that all blocks are free afterward.
fn assert_all_blocks_come_back(cache: &mut PrefixCache, block_count: usize) {
    cache.make_room(block_count);
    let all = PoolCounts { free: block_count, ..PoolCounts::default() };
    assert_eq!(cache.pool_counts(), all);
    cache.audit().expect("consistent");
}

/// Goal: when prefill chunks end inside an image, the tree takes none of the blocks, and all of
/// them come back.
#[test]
fn chunks_that_end_inside_an_image_lose_no_block() {
    let mut cache = PrefixCache::new(16, 100).expect("a valid block size");
    let interner = TokenSpanInterner::new(8);
    for content_hash in 0..3 {
        let mut prompt = vec![1; 10];
        let image = TokenSpan::Image { content_hash, kv_len: 60, columns: 0 };
        interner.append(image, &mut prompt).expect("in range");
        prompt.extend([2, 3]);
        let mut sequence = cache.begin(&base(), &prompt).expect("free blocks");
        assert_eq!(cache.commit(&mut sequence, 64), Ok(0));
        assert_eq!((sequence.cached_len(), sequence.private().len()), (0, 5));
    }
    assert_all_blocks_come_back(&mut cache, 100);
}

/// Goal: a second request for the same prompt gets the cached blocks, also if it began before they
/// were cached, and its table always covers its positions.
#[test]
fn sequences_share_their_prefix() {
    let mut cache = PrefixCache::new(2, 10).expect("a valid block size");
    let prompt = [1, 2, 3, 4, 5];
    let mut first = cache.begin(&base(), &prompt).expect("free blocks");
    let mut early = cache.begin(&base(), &prompt).expect("free blocks");
    assert_eq!(cache.commit(&mut first, 5), Ok(2));
    assert_eq!(cache.commit(&mut early, 5), Ok(2));
    let tables = [&first, &early].map(|sequence| sequence.table().collect::<Vec<_>>());
    assert_eq!((tables[0].len(), tables[1].len()), (3, 3));
    assert_eq!((&tables[0][..2], tables[0][2] != tables[1][2]), (&tables[1][..2], true));
    let late = cache.begin(&base(), &prompt).expect("free blocks");
    assert_eq!((late.cached_len(), late.private().len()), (4, 1));
    assert_eq!(cache.reader().query_match_len(&base(), &prompt), 4);
    drop((first, early, late));
    assert_all_blocks_come_back(&mut cache, 10);
}

/// Goal: a sequence grows by the blocks that it lacks, evicts others only if that helps, and keeps
/// its blocks if there are too few.
#[test]
fn growing_evicts_only_if_that_makes_enough_room() {
    let mut cache = PrefixCache::new(1, 6).expect("a valid block size");
    let mut old = cache.begin(&base(), &[7, 8, 9]).expect("free blocks");
    assert_eq!(cache.commit(&mut old, 3), Ok(3));
    let mut sequence = cache.begin(&base(), &[1, 2]).expect("free blocks");
    assert_eq!(cache.grow(&mut sequence, &[3]), Ok(()));
    let shortage = Shortage { requested: 1, free: 0, fenced: 0 };
    assert_eq!(cache.grow(&mut sequence, &[4]), Err(GrowError::Shortage(shortage)));
    drop(old);
    let too_many = Shortage { requested: 4, free: 0, fenced: 0 };
    assert_eq!(cache.grow(&mut sequence, &[4, 5, 6, 7]), Err(GrowError::Shortage(too_many)));
    assert_eq!(cache.tree_counts().cached, 3, "nothing was evicted in vain");
    assert_eq!(cache.grow(&mut sequence, &[4]), Ok(()));
    assert_eq!(sequence.positions(), [1, 2, 3, 4]);
    assert_eq!((sequence.table().len(), cache.tree_counts().cached), (4, 2));
    drop(sequence);
    assert_all_blocks_come_back(&mut cache, 6);
}

/// Goal: a sequence of another cache is refused by name, and keeps its blocks.
#[test]
fn a_sequence_belongs_to_one_cache() {
    let mut one = PrefixCache::new(1, 4).expect("a valid block size");
    let mut two = PrefixCache::new(1, 4).expect("a valid block size");
    let mut sequence = one.begin(&base(), &[1, 2]).expect("free blocks");
    assert_eq!(two.commit(&mut sequence, 2), Err(CommitError::OtherTree));
    assert_eq!(two.grow(&mut sequence, &[3, 4]), Err(GrowError::OtherCache));
    assert_eq!(sequence.table().len(), 2);
    drop(sequence);
    assert_all_blocks_come_back(&mut one, 4);
    assert_all_blocks_come_back(&mut two, 4);
}

/// Goal: a commit publishes positions of the sequence only, and not more than it has.
#[test]
fn a_commit_cannot_exceed_its_sequence() {
    let mut cache = PrefixCache::new(1, 4).expect("a valid block size");
    let mut sequence = cache.begin(&base(), &[1, 2]).expect("free blocks");
    let refused = CommitError::TooMany { len: 2, got: 3 };
    assert_eq!(cache.commit(&mut sequence, 3), Err(refused));
    assert_eq!(cache.commit(&mut sequence, 1), Ok(1));
    assert_eq!(cache.reader().query_match_len(&base(), sequence.positions()), 1);
    drop(sequence);
    assert_all_blocks_come_back(&mut cache, 4);
}

/// Goal: a cache or a pool of more blocks than are supported is refused, and allocates nothing.
#[test]
fn too_many_blocks_are_refused() {
    for got in [(1 << 28) + 1, usize::MAX] {
        let refused = ConfigError::BlockCount { got, max: 1 << 28 };
        assert_eq!(PrefixCache::new(16, got).err(), Some(refused.clone()));
        assert_eq!(BlockPool::new(got).err(), Some(refused));
    }
}

/// Goal: evicted blocks are reported with their content, and its blocks are free at once, or after
/// the running step.
#[test]
fn evicted_blocks_are_reported_and_free() {
    let mut cache = PrefixCache::new(1, 4).expect("a valid block size");
    let tenant = Namespace::builder().salt("tenant").build();
    for namespace in [base(), tenant] {
        let mut sequence = cache.begin(&namespace, &[1, 2]).expect("free blocks");
        assert_eq!(cache.commit(&mut sequence, 2), Ok(2));
    }
    let hashes = cache.reader().block_hashes(&base(), &[1, 2]);
    let evicted = cache.make_room(1);
    assert_eq!(evicted, [BlockId(1)]);
    assert_eq!((evicted[0].namespace, evicted[0].hash), (base(), hashes[1]));
    assert_eq!(cache.pool_counts().free, 1);
    let step = cache.begin_step();
    let evicted = cache.evict_namespace(&tenant);
    assert!(evicted.len() == 2 && evicted.iter().all(|block| block.namespace == tenant));
    assert_eq!((cache.pool_counts().free, cache.pool_counts().fenced), (1, 2));
    drop(step);
    assert_eq!(cache.flush(), [BlockId(0)]);
    assert_all_blocks_come_back(&mut cache, 4);
}

/// What a caller does. Sequences are chosen by their index and positions by bytes; both wrap
/// around.
#[derive(Clone, Debug)]
enum Op {
    Begin(Vec<u8>),
    Commit(u8, u8),
    Grow(u8, Vec<u8>),
    End(u8),
    MakeRoom(u8),
    Flush,
}

fn op() -> impl Strategy<Value = Op> {
    let bytes = || proptest::collection::vec(any::<u8>(), 0..12);
    prop_oneof![
        3 => bytes().prop_map(Op::Begin),
        3 => any::<(u8, u8)>().prop_map(|(which, written)| Op::Commit(which, written % 20)),
        1 => (any::<u8>(), bytes()).prop_map(|(which, bytes)| Op::Grow(which, bytes)),
        2 => any::<u8>().prop_map(Op::End),
        1 => any::<u8>().prop_map(|count| Op::MakeRoom(count % 24)),
        1 => Just(Op::Flush),
    ]
}

/// Few different positions, so that prompts share prefixes. Some are invalid.
fn positions(bytes: &[u8]) -> Vec<u32> {
    let position = |&byte: &u8| if byte == 255 { u32::MAX } else { u32::from(byte % 3) };
    bytes.iter().map(position).collect()
}

fn run(cache: &mut PrefixCache, running: &mut Vec<SequenceBlocks>, op: Op) {
    let pick = |which: u8, count: usize| usize::from(which).checked_rem(count);
    match op {
        Op::Begin(bytes) => running.extend(cache.begin(&base(), &positions(&bytes))),
        Op::Commit(which, written) => {
            let Some(which) = pick(which, running.len()) else { return };
            let _ = cache.commit(&mut running[which], written.into());
        }
        Op::Grow(which, bytes) => {
            let Some(which) = pick(which, running.len()) else { return };
            let _ = cache.grow(&mut running[which], &positions(&bytes));
        }
        Op::End(which) => {
            let Some(which) = pick(which, running.len()) else { return };
            running.swap_remove(which);
        }
        Op::MakeRoom(count) => drop(cache.make_room(count.into())),
        Op::Flush => drop(cache.flush()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// Goal: after any calls, also wrong ones, the accounting is consistent, no private block is in
    /// two tables, and all blocks come back.
    #[test]
    fn no_order_of_calls_loses_a_block(
        log_block_size in 0u32..3,
        ops in proptest::collection::vec(op(), 1..60),
    ) {
        let mut cache = PrefixCache::new(1 << log_block_size, 24).expect("a valid block size");
        let mut running = Vec::new();
        for op in ops {
            run(&mut cache, &mut running, op);
            cache.audit().expect("consistent");
            let mut seen = HashSet::new();
            for sequence in &running {
                assert!(sequence.private().iter().all(|block| seen.insert(*block)));
            }
            for sequence in &running {
                let mut cached = sequence.table().take(sequence.table().len() - sequence.private().len());
                assert!(cached.all(|block| !seen.contains(&block)));
            }
        }
        running.clear();
        assert_all_blocks_come_back(&mut cache, 24);
    }
}
