//! The invariants that this crate keeps, each by name. Those that need an engine (one position is
//! always computed, warm equals cold, progress, failure) are tested with the engine.

use stolon_kvcache::{
    BlockId, BlockPool, Commit, Namespace, PinError, TokenSpan, TokenSpanInterner, TreeBuilder,
    TreeWriter, prefix_tree,
};

fn base() -> Namespace {
    Namespace::default()
}

/// Commits `positions` in blocks of one position numbered from `first`, leaving nothing locked.
fn put(writer: &mut TreeWriter, positions: &[u32], first: u32) {
    let mut lease = writer.acquire(&base(), positions);
    let missing = positions.len() - lease.len();
    let blocks: Vec<BlockId> = (first..).take(missing).map(BlockId).collect();
    let _ = writer.commit(&mut lease, positions, &blocks);
}

/// 1: free + reserved + committed = all blocks, at every quiescent point.
#[test]
fn blocks_are_conserved() {
    let (mut writer, _reader) = prefix_tree(1).expect("a block size");
    let (mut pool, fence) = BlockPool::new(10);
    let all = |pool: &BlockPool| {
        let counts = pool.counts();
        counts.free + counts.fenced + counts.reserved + counts.committed
    };
    let mut private = pool.reserve(4).expect("free");
    assert_eq!((pool.counts().reserved, all(&pool)), (4, 10));
    let step = fence.begin();
    let mut lease = writer.acquire(&base(), &[1, 2]);
    let _ = writer.commit(&mut lease, &[1, 2], &private.commit_front(2));
    assert_eq!((pool.counts().committed, pool.counts().reserved, all(&pool)), (2, 2, 10));
    drop((private, lease));
    assert_eq!((pool.counts().fenced, all(&pool)), (2, 10));
    pool.release(writer.evict(1));
    assert_eq!((pool.counts().fenced, pool.counts().committed, all(&pool)), (3, 1, 10));
    drop(step);
    assert_eq!((pool.counts().free, all(&pool)), (9, 10));
    pool.release(writer.flush());
    assert_eq!(pool.counts().free, 10);
    pool.audit().expect("consistent");
}

/// 2: one owner a block; no block is twice in the free list. A block that is not the pool's to
/// take back is refused and reported, and so is one that two nodes own.
#[test]
fn a_block_has_one_owner() {
    let (mut pool, _fence) = BlockPool::new(2);
    let lease = pool.reserve(1).expect("free");
    pool.release(lease.blocks().to_vec());
    pool.release(vec![BlockId(1), BlockId(9)]);
    assert_eq!(pool.counts().free, 1, "reserved, free and unknown blocks cannot be released");
    assert!(pool.audit().is_err());
    let (mut writer, _reader) = prefix_tree(1).expect("a block size");
    put(&mut writer, &[1], 7);
    writer.audit().expect("consistent");
    put(&mut writer, &[2], 7);
    assert!(writer.audit().is_err());
}

/// 3: a node with a lock, or with a locked descendant, is never evicted; leaves go first.
#[test]
fn locked_paths_stay_and_leaves_go_first() {
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    put(&mut writer, &[1, 2, 3], 0);
    put(&mut writer, &[1, 2, 4], 10);
    put(&mut writer, &[1, 5], 20);
    let lease = writer.acquire(&base(), &[1, 2, 3]);
    let mut gone = writer.evict(usize::MAX);
    gone.sort_unstable_by_key(|block| block.0);
    assert_eq!(gone, [10, 20].map(BlockId), "all but the locked path");
    assert_eq!(reader.query_match_len(&base(), &[1, 2, 3]), 3);
    drop(lease);
    let one_by_one: Vec<BlockId> = (0..3).flat_map(|_| writer.evict(1)).collect();
    assert_eq!(one_by_one, [2, 1, 0].map(BlockId), "the deepest first");
}

/// 4: nothing writes to a committed block: a lease on blocks loses the ones it commits, and a
/// prefix lease only shows them.
#[test]
fn committed_blocks_leave_the_private_lease() {
    let (mut pool, _fence) = BlockPool::new(3);
    let mut private = pool.reserve(3).expect("free");
    let committed = private.commit_front(2);
    assert_eq!((committed, private.blocks()), ([0, 1].map(BlockId).to_vec(), &[BlockId(2)][..]));
    drop(private);
    let again = pool.reserve(1).expect("free");
    assert_eq!(again.blocks(), [BlockId(2)]);
    assert!(pool.reserve(1).is_err(), "committed blocks are not handed out");
}

/// 5: a block is matched only after its KV is written (that is, committed), and reused only after
/// the steps that were running when it came back.
#[test]
fn blocks_are_matched_after_commit_and_reused_after_the_fence() {
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    let (mut pool, fence) = BlockPool::new(1);
    let mut private = pool.reserve(1).expect("free");
    let mut lease = writer.acquire(&base(), &[1]);
    assert_eq!(reader.query_match_len(&base(), &[1]), 0, "reserved is not cached");
    let _ = writer.commit(&mut lease, &[1], &private.commit_front(1));
    assert_eq!(reader.query_match_len(&base(), &[1]), 1);
    drop((lease, private));
    let (early, running) = (fence.begin(), fence.begin());
    pool.release(writer.evict(1));
    let late = fence.begin();
    assert_eq!(reader.query_match_len(&base(), &[1]), 0, "out of the index before it is free");
    assert_eq!(pool.reserve(1).map_err(|shortage| shortage.fenced).err(), Some(1));
    drop(running);
    assert!(pool.reserve(1).is_err(), "an earlier step still runs");
    drop(early);
    assert!(pool.reserve(1).is_ok(), "a later one never saw the block");
    drop(late);
}

/// 7: a query is pure: no counter, no recency, no allocation, no namespace.
#[test]
fn queries_are_pure() {
    let order = |queries: usize| {
        let (mut writer, reader) = prefix_tree(1).expect("a block size");
        for leaf in 0..20 {
            put(&mut writer, &[leaf, leaf], leaf * 2);
        }
        let hashes = reader.block_hashes(&base(), &[3, 3]);
        let unknown = Namespace::builder().salt("nobody's").build();
        let before = (writer.counts(), writer.stats().clone(), reader.tree_version());
        let mut lens = Vec::with_capacity(2);
        let mut ask = || {
            lens.clear();
            reader.query_match_lens(&base(), &[&[3, 3], &[5]], &mut lens);
            let one = reader.query_match_len(&base(), &[3, 3, 3]);
            let none = reader.query_match_len(&unknown, &[3]);
            (one, reader.query_match_hashes(&base(), &hashes), none)
        };
        ask();
        let allocations = allocation_counter::measure(|| {
            for _ in 0..queries {
                assert_eq!(ask(), (2, 2, 0));
            }
        });
        assert_eq!(allocations.count_total, 0, "queries allocate nothing");
        assert_eq!(before, (writer.counts(), writer.stats().clone(), reader.tree_version()));
        writer.evict(40)
    };
    assert_eq!(order(0), order(10_000), "the order of eviction does not know of queries");
}

/// 8: a match is a hint until `acquire`; an allocation never evicts what its own request has just
/// acquired.
#[test]
fn a_match_is_a_hint_until_it_is_acquired() {
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    put(&mut writer, &[1, 2, 3, 4], 0);
    assert_eq!(reader.query_match_len(&base(), &[1, 2, 3, 4]), 4);
    let _ = writer.evict(2);
    let lease = writer.acquire(&base(), &[1, 2, 3, 4]);
    assert_eq!(lease.len(), 2, "shorter than hoped, and no error");
    assert!(writer.evict(4).is_empty(), "to make room for the rest of this very prompt");
    assert_eq!(reader.query_match_len(&base(), &[1, 2, 3, 4]), 2);
}

/// 9: `evictable` equals what a recount of the tree says, and what eviction then gives.
#[test]
fn evictable_equals_a_recount() {
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    for tail in 0..10 {
        put(&mut writer, &[1, 2, 100 + tail, 200, 201], 100 * tail);
    }
    let leases: Vec<_> =
        (0..3).map(|tail| writer.acquire(&base(), &[1, 2, 100 + tail, 200])).collect();
    let pin = writer.pin(&base(), &[1, 2, 104]).expect("cached");
    let recount = || {
        let dump = reader.dump();
        let unlocked = dump.nodes.iter().filter(|node| node.locks == 0);
        unlocked.map(|node| node.block_count).sum::<usize>()
    };
    assert_eq!((writer.counts().evictable, recount()), (23, 23));
    drop(leases);
    assert_eq!((writer.counts().evictable, recount()), (29, 29));
    assert_eq!(writer.evict(usize::MAX).len(), 29);
    assert_eq!((writer.counts().evictable, writer.counts().cached), (0, 3));
    assert!(writer.unpin(pin));
    assert_eq!(writer.evict(usize::MAX).len(), 3);
    writer.audit().expect("consistent");
}

/// 10: a failed operation changes nothing: no lock, no block, no namespace is left behind.
#[test]
fn failures_leave_nothing_behind() {
    let (mut writer, reader) = TreeBuilder::new(1).pin_budget(1).build().expect("a block size");
    let (mut pool, _fence) = BlockPool::new(3);
    put(&mut writer, &[1, 2], 0);
    let unknown = Namespace::builder().salt("nobody's").build();
    let before = (writer.counts(), reader.tree_version(), reader.dump().nodes.len());
    assert!(pool.reserve(4).is_err());
    assert!(writer.acquire(&unknown, &[1]).is_empty());
    assert_eq!(writer.pin(&unknown, &[1]), Err(PinError::NotCached));
    let over = PinError::OverBudget { budget: 1, pinned: 0, requested: 2 };
    assert_eq!(writer.pin(&base(), &[1, 2]), Err(over));
    let mut lease = writer.acquire(&unknown, &[1]);
    assert_eq!(writer.commit(&mut lease, &[1], &[]), Commit::default());
    drop(lease);
    assert_eq!(before, (writer.counts(), reader.tree_version(), reader.dump().nodes.len()));
    assert_eq!(pool.counts().free, 3);
    writer.audit().expect("consistent");
}

/// 13: namespaces never share a node: not the blocks, not the eviction of one.
#[test]
fn namespaces_share_nothing() {
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    let named = [
        base(),
        Namespace::builder().model("m").build(),
        Namespace::builder().adapter("a", 1).build(),
        Namespace::builder().adapter("a", 2).build(),
        Namespace::builder().salt("s").build(),
        Namespace::builder().image(9).build(),
    ];
    for (first, namespace) in (0..).step_by(10).zip(&named) {
        assert_eq!(reader.query_match_len(namespace, &[1, 2, 3]), 0, "as if it were alone");
        let mut lease = writer.acquire(namespace, &[1, 2, 3]);
        let blocks = [0, 1, 2].map(|n| BlockId(first + n));
        let commit = writer.commit(&mut lease, &[1, 2, 3], &blocks);
        assert_eq!((commit.blocks, commit.duplicates), (blocks.to_vec(), vec![]));
    }
    assert_eq!(writer.counts().cached, 3 * named.len());
    let _ = writer.evict_namespace(&named[3]);
    for (index, namespace) in named.iter().enumerate() {
        let expected = if index == 3 { 0 } else { 3 };
        assert_eq!(reader.query_match_len(namespace, &[1, 2, 3]), expected);
    }
    writer.audit().expect("consistent");
}

/// A match, a lease, a pin and a commit never end inside an atom, wherever an eviction has cut it.
/// What is left of it is good for nothing, and goes before everything else.
#[test]
fn what_is_left_of_an_atom_goes_first() {
    let atoms = TokenSpanInterner::new(8);
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    let mut prompt = vec![1, 2];
    atoms.append(TokenSpan::Image { content_hash: 7, kv_len: 20 }, &mut prompt).expect("in range");
    put(&mut writer, &prompt, 0);
    put(&mut writer, &[50, 51], 100);
    assert_eq!(writer.evict(1), [BlockId(21)], "the image's last block, of the older leaf");
    drop(writer.acquire(&base(), &[50, 51]));
    drop(writer.acquire(&base(), &prompt));
    assert_eq!(reader.query_match_len(&base(), &prompt), 2);
    assert_eq!(writer.set_priority(&base(), &prompt, 1), 2);
    assert_eq!(writer.acquire(&base(), &prompt).len(), 2);
    let pin = writer.pin(&base(), &prompt).expect("its text is cached");
    assert_eq!(writer.pins()[0].position_count, 2);
    assert!(writer.unpin(pin));
    let mut gone: Vec<u32> = writer.evict(19).iter().map(|block| block.0).collect();
    gone.sort_unstable();
    assert_eq!(gone, (2..21).collect::<Vec<_>>(), "not the leaf that was used less lately");
    assert_eq!(reader.query_match_len(&base(), &[50, 51]), 2);
    assert_eq!(reader.query_match_len(&base(), &prompt), 2);
    writer.audit().expect("consistent");
}
