//! The invariants of this crate, one test each. Invariants that need an engine (at least one
//! position is always computed, cached results equal recomputed ones, progress, failure) are tested
//! with the engine.

use stolon_kvcache::{
    BlockId, BlockPool, Commit, EvictedBlock, Namespace, PinError, TokenSpan, TokenSpanInterner,
    TreeBuilder, TreeWriter, prefix_tree,
};

fn base() -> Namespace {
    Namespace::default()
}

/// Commits `positions` in blocks of one position numbered from `first`, leaving nothing locked.
fn put(writer: &mut TreeWriter, positions: &[u32], first: u32) {
    let mut lease = writer.acquire(&base(), positions);
    let missing = positions.len() - lease.len();
    let blocks: Vec<BlockId> = (first..).take(missing).map(BlockId).collect();
    let _ = writer.commit(&mut lease, positions, &blocks).expect("a valid commit");
}

/// Goal: free, fenced, reserved and committed blocks always add up to all blocks.
#[test]
fn blocks_are_conserved() {
    let (mut writer, _reader) = prefix_tree(1).expect("a block size");
    let (mut pool, fence) = BlockPool::new(10).expect("a valid count");
    let all = |pool: &BlockPool| {
        let counts = pool.counts();
        counts.free + counts.fenced + counts.reserved + counts.committed
    };
    let mut private = pool.reserve(4).expect("free");
    assert_eq!((pool.counts().reserved, all(&pool)), (4, 10));
    let step = fence.begin();
    let mut lease = writer.acquire(&base(), &[1, 2]);
    assert_eq!(writer.commit_from(&mut lease, &[1, 2], &mut private), Ok(2));
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

/// Goal: each block has one owner: the audit of the tree reports a block that two nodes own.
#[test]
fn a_block_has_one_owner() {
    let (mut writer, _reader) = prefix_tree(1).expect("a block size");
    put(&mut writer, &[1], 7);
    writer.audit().expect("consistent");
    put(&mut writer, &[2], 7);
    assert!(writer.audit().is_err());
}

/// Goal: a node with a lock, or with a locked descendant, is never evicted; leaves are evicted
/// before their parents.
#[test]
fn locked_paths_stay_and_leaves_are_evicted_first() {
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    put(&mut writer, &[1, 2, 3], 0);
    put(&mut writer, &[1, 2, 4], 10);
    put(&mut writer, &[1, 5], 20);
    let lease = writer.acquire(&base(), &[1, 2, 3]);
    let mut gone = writer.evict(usize::MAX).to_vec();
    gone.sort_unstable_by_key(|block| block.id);
    assert_eq!(gone, [10, 20].map(BlockId), "all but the locked path");
    assert_eq!(reader.query_match_len(&base(), &[1, 2, 3]), 3);
    drop(lease);
    let one_by_one: Vec<EvictedBlock> = (0..3).flat_map(|_| writer.evict(1).to_vec()).collect();
    assert_eq!(one_by_one, [2, 1, 0].map(BlockId), "the deepest first");
}

/// Goal: no sequence writes to a committed block. A private lease no longer contains the blocks
/// that were committed from it, and the pool does not hand them out.
#[test]
fn committed_blocks_leave_the_private_lease() {
    let (mut pool, _fence) = BlockPool::new(3).expect("a valid count");
    let (mut writer, _reader) = prefix_tree(1).expect("a block size");
    let mut private = pool.reserve(3).expect("free");
    let mut lease = writer.acquire(&base(), &[1, 2]);
    assert_eq!(writer.commit_from(&mut lease, &[1, 2], &mut private), Ok(2));
    assert_eq!((lease.blocks(), private.blocks()), (&[0, 1].map(BlockId)[..], &[BlockId(2)][..]));
    drop(private);
    let again = pool.reserve(1).expect("free");
    assert_eq!(again.blocks(), [BlockId(2)]);
    assert!(pool.reserve(1).is_err(), "committed blocks are not handed out");
}

/// Goal: a block is matched only after it was committed, and reused only after the steps that were
/// running when it was returned.
#[test]
fn blocks_are_matched_after_commit_and_reused_after_the_fence() {
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    let (mut pool, fence) = BlockPool::new(1).expect("a valid count");
    let mut private = pool.reserve(1).expect("free");
    let mut lease = writer.acquire(&base(), &[1]);
    assert_eq!(reader.query_match_len(&base(), &[1]), 0, "a reserved block is not cached");
    assert_eq!(writer.commit_from(&mut lease, &[1], &mut private), Ok(1));
    assert_eq!(reader.query_match_len(&base(), &[1]), 1);
    drop((lease, private));
    let (early, running) = (fence.begin(), fence.begin());
    pool.release(writer.evict(1));
    let late = fence.begin();
    assert_eq!(
        reader.query_match_len(&base(), &[1]),
        0,
        "removed from the index before it is free"
    );
    assert_eq!(pool.reserve(1).map_err(|shortage| shortage.fenced).err(), Some(1));
    drop(running);
    assert!(pool.reserve(1).is_err(), "an earlier step is still running");
    drop(early);
    assert!(pool.reserve(1).is_ok(), "a later step never saw the block");
    drop(late);
}

/// Goal: a query has no side effect: it changes no counter and no recency, allocates nothing, and
/// creates no namespace.
#[test]
fn queries_have_no_side_effect() {
    let order = |queries: usize| {
        let (mut writer, reader) = prefix_tree(1).expect("a block size");
        for leaf in 0..20 {
            put(&mut writer, &[leaf, leaf], leaf * 2);
        }
        let hashes = reader.block_hashes(&base(), &[3, 3]);
        let unknown = Namespace::builder().salt("unknown").build();
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
        writer.evict(40).to_vec()
    };
    assert_eq!(order(0), order(10_000), "queries do not change the order of eviction");
}

/// Goal: a match is a hint until `acquire`. The eviction that makes room for a request never takes
/// what the request has acquired.
#[test]
fn a_match_is_a_hint_until_it_is_acquired() {
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    put(&mut writer, &[1, 2, 3, 4], 0);
    assert_eq!(reader.query_match_len(&base(), &[1, 2, 3, 4]), 4);
    let _ = writer.evict(2);
    let lease = writer.acquire(&base(), &[1, 2, 3, 4]);
    assert_eq!(lease.len(), 2, "shorter than the query said, and no error");
    assert!(writer.evict(4).is_empty(), "the acquired prefix is locked");
    assert_eq!(reader.query_match_len(&base(), &[1, 2, 3, 4]), 2);
}

/// Goal: `evictable` equals a recount of the tree, and the number of blocks that eviction returns.
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

/// Goal: a failed operation changes nothing: no lock, no block and no namespace remains.
#[test]
fn failed_operations_leave_nothing_behind() {
    let (mut writer, reader) = TreeBuilder::new(1).pin_budget(1).build().expect("a block size");
    let (mut pool, _fence) = BlockPool::new(3).expect("a valid count");
    put(&mut writer, &[1, 2], 0);
    let unknown = Namespace::builder().salt("unknown").build();
    let before = (writer.counts(), reader.tree_version(), reader.dump().nodes.len());
    assert!(pool.reserve(4).is_err());
    assert!(writer.acquire(&unknown, &[1]).is_empty());
    assert_eq!(writer.pin(&unknown, &[1]), Err(PinError::NotCached));
    let over = PinError::OverBudget { budget: 1, pinned: 0, requested: 2 };
    assert_eq!(writer.pin(&base(), &[1, 2]), Err(over));
    let mut lease = writer.acquire(&unknown, &[1]);
    assert_eq!(writer.commit(&mut lease, &[1], &[]), Ok(Commit::default()));
    drop(lease);
    assert_eq!(before, (writer.counts(), reader.tree_version(), reader.dump().nodes.len()));
    assert_eq!(pool.counts().free, 3);
    writer.audit().expect("consistent");
}

/// Goal: namespaces share no blocks, and the eviction of one does not affect the others.
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
        assert_eq!(
            reader.query_match_len(namespace, &[1, 2, 3]),
            0,
            "nothing of the other namespaces is found"
        );
        let mut lease = writer.acquire(namespace, &[1, 2, 3]);
        let blocks = [0, 1, 2].map(|n| BlockId(first + n));
        let commit = writer.commit(&mut lease, &[1, 2, 3], &blocks).expect("a valid commit");
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

/// Goal: after an eviction has removed the end of an atomic token span, no match, lease or pin ends
/// inside the rest, and the rest is evicted before everything else.
#[test]
fn the_rest_of_a_cut_span_is_evicted_first() {
    let interner = TokenSpanInterner::new(8);
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    let mut prompt = vec![1, 2];
    interner
        .append(TokenSpan::Image { content_hash: 7, kv_len: 20, columns: 0 }, &mut prompt)
        .expect("in range");
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
    let mut gone: Vec<u32> = writer.evict(19).iter().map(|block| block.id.0).collect();
    gone.sort_unstable();
    assert_eq!(gone, (2..21).collect::<Vec<_>>(), "not the leaf that was used less recently");
    assert_eq!(reader.query_match_len(&base(), &[50, 51]), 2);
    assert_eq!(reader.query_match_len(&base(), &prompt), 2);
    writer.audit().expect("consistent");
}
