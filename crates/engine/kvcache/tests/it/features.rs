//! The features of the tree beyond match, commit and eviction, one behavior per test.

use std::collections::HashMap;
use stolon_kvcache::{
    BlockId, CacheEvent, Commit, CommitError, ConfigError, EvictionCandidate, EvictionOrder,
    EvictionPolicy, EvictionRank, Namespace, PinError, PositionRun, TokenSpan, TokenSpanInterner,
    TreeBuilder, TreeWriter, prefix_tree,
};

fn base() -> Namespace {
    Namespace::default()
}

/// Commits `positions` with block ids counted up from `first`, and leaves nothing locked.
fn put(writer: &mut TreeWriter, namespace: &Namespace, positions: &[u32], first: u32) {
    let mut lease = writer.acquire(namespace, positions);
    let missing = positions.len() / writer.block_size() - lease.blocks().len();
    let blocks: Vec<BlockId> = (first..).take(missing).map(BlockId).collect();
    let _ = writer.commit(&mut lease, positions, &blocks).expect("a valid commit");
}

fn tree(policy: EvictionPolicy) -> TreeWriter {
    TreeBuilder::new(1).eviction_policy(policy).build().expect("a block size").0
}

/// Goal: readers can be shared between threads; the writer and leases can be sent to another one.
#[test]
fn handles_move_between_threads() {
    fn sent<T: Send>() {}
    fn shared<T: Send + Sync + Clone>() {}
    sent::<TreeWriter>();
    sent::<stolon_kvcache::PrefixLease>();
    sent::<stolon_kvcache::BlockLease>();
    sent::<stolon_kvcache::BlockPool>();
    sent::<stolon_kvcache::EventReceiver>();
    sent::<stolon_kvcache::StepTicket>();
    shared::<stolon_kvcache::TreeReader>();
    shared::<stolon_kvcache::StepFence>();
    shared::<Namespace>();
}

/// Goal: unsupported settings are refused with an error that contains the value.
#[test]
fn unsupported_settings_are_refused() {
    for got in [0, 3, 12, 257, 512] {
        assert_eq!(prefix_tree(got).err(), Some(ConfigError::BlockSize { got }));
    }
    let refused = tree(EvictionPolicy::Lru).subscribe(0).err();
    assert_eq!(refused, Some(ConfigError::EventCapacity { got: 0 }));
}

/// The order in which the leaves of a tree are evicted, named by the first of their blocks.
fn evict_all(writer: &mut TreeWriter) -> Vec<u32> {
    let mut order = Vec::new();
    while let [block] = writer.evict(1)[..] {
        order.push(block.id.0);
        writer.audit().expect("consistent");
    }
    order
}

/// Commits five leaves below different parents, uses them in different ways and evicts them all.
///
/// | leaf | committed | hits | last use | priority | depth |
/// |---|---|---|---|---|---|
/// | 10 | first | 2 | second | 5 | 0 |
/// | 20 | second | 1 | third | 0 | 0 |
/// | 30 | third | 0 | first | 7 | 0 |
/// | 40 | fourth | 3 | last | -1 | 0 |
/// | 50 | last | 0 | fourth | 1 | 600 blocks |
fn eviction_sequence(mut writer: TreeWriter) -> Vec<u32> {
    let deep: Vec<u32> = (10_000..10_600).chain([50]).collect();
    put(&mut writer, &base(), &deep[..600], 1_000);
    let trunk = writer.acquire(&base(), &deep[..600]);
    for leaf in [10, 20, 30, 40] {
        put(&mut writer, &base(), &[leaf], leaf);
    }
    for leaf in [10, 10, 20] {
        drop(writer.acquire(&base(), &[leaf]));
    }
    let mut lease = writer.acquire(&base(), &deep[..600]);
    let _ = writer.commit(&mut lease, &deep, &[BlockId(50)]).expect("a valid commit");
    drop(lease);
    for leaf in [40, 40, 40] {
        drop(writer.acquire(&base(), &[leaf]));
    }
    for (leaf, priority) in [(10, 5), (20, 0), (30, 7), (40, -1)] {
        writer.set_priority(&base(), &[leaf], priority);
    }
    writer.set_priority(&base(), &deep, 1);
    let order = evict_all(&mut writer);
    drop(trunk);
    order
}

/// Goal: each policy evicts the leaves in its own order, and no two policies in the same.
#[test]
fn policies_order_their_victims() {
    let expected = [
        (EvictionPolicy::Lru, [30, 10, 20, 50, 40]),
        (EvictionPolicy::Lfu, [30, 50, 20, 10, 40]),
        (EvictionPolicy::Fifo, [10, 20, 30, 40, 50]),
        (EvictionPolicy::Mru, [40, 50, 20, 10, 30]),
        (EvictionPolicy::Filo, [50, 40, 30, 20, 10]),
        (EvictionPolicy::Priority, [40, 20, 50, 10, 30]),
        (EvictionPolicy::Slru, [30, 20, 50, 10, 40]),
        (EvictionPolicy::CostAware, [30, 20, 10, 50, 40]),
    ];
    for (policy, order) in expected {
        assert_eq!(eviction_sequence(tree(policy)), order, "{policy:?}");
    }
    for (index, (policy, order)) in expected.iter().enumerate() {
        for (other, same) in &expected[index + 1..] {
            assert_ne!(order, same, "{policy:?} and {other:?}");
        }
    }
}

/// Goal: a lease says which prefix it holds.
#[test]
fn a_lease_describes_its_prefix() {
    let (mut writer, _reader) = prefix_tree(4).expect("a block size");
    let tenant = Namespace::builder().salt("tenant").build();
    put(&mut writer, &tenant, &[1, 2, 3, 4, 5, 6, 7, 8], 1);
    let lease = writer.acquire(&tenant, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert_eq!((lease.block_size(), lease.len(), lease.blocks().len()), (4, 8, 2));
    assert_eq!(*lease.namespace(), tenant);
    let expected = format!("PrefixLease {{ namespace: {tenant:?}, positions: 8 }}");
    assert_eq!(format!("{lease:?}"), expected);
    assert_eq!(format!("{:?}", base()), "Namespace(base)");
}

/// Goal: the order of eviction can be replaced while the tree holds leaves, which are then evicted
/// in the new order.
#[test]
fn the_eviction_order_can_be_replaced() {
    let mut writer = tree(EvictionPolicy::Lru);
    for leaf in [10, 20, 30] {
        put(&mut writer, &base(), &[leaf], leaf);
    }
    let lease = writer.acquire(&base(), &[20]);
    writer.set_eviction_order(EvictionPolicy::Mru.order());
    drop(lease);
    assert_eq!(evict_all(&mut writer), [20, 30, 10]);
}

/// Goal: a prefix has the largest priority of the requests that used or committed it, and blocks
/// that only other requests committed do not.
#[test]
fn priorities_of_requests_reach_their_prefixes() {
    let mut writer = tree(EvictionPolicy::Priority);
    let mut request = |positions: &[u32], first: u32, priority: i32| {
        let mut lease = writer.acquire_prioritized(&base(), positions, priority);
        let missing = positions.len() - lease.blocks().len();
        let blocks: Vec<BlockId> = (first..).take(missing).map(BlockId).collect();
        let _ = writer.commit(&mut lease, positions, &blocks).expect("a valid commit");
        drop(lease);
        writer.audit().expect("consistent");
    };
    request(&[1, 2, 3], 10, 3); // The end of it is split off by the next one and keeps 3.
    request(&[1, 2, 4], 20, 8);
    request(&[5], 30, -2);
    request(&[6], 40, 0);
    request(&[7], 50, 5);
    request(&[7], 60, 1); // It does not lower the priority.
    request(&[6], 70, 6); // A request that finds everything cached raises it.
    let mut prefixes = Vec::new();
    while !writer.evict_prefixes(1, &mut prefixes).is_empty() {}
    let evicted: Vec<(u32, i32)> =
        prefixes.iter().map(|prefix| (prefix.blocks[prefix.evicted].0, prefix.priority)).collect();
    assert_eq!(evicted, [(30, -2), (12, 3), (50, 5), (40, 6), (20, 8), (11, 8), (10, 8)]);
}

/// Goal: the eviction of a prefix removes everything that starts with it and the blocks that only
/// it uses, and keeps blocks that others share or that leases and pins hold.
#[test]
fn a_prefix_can_be_evicted() {
    let (mut writer, reader) = prefix_tree(2).expect("a block size");
    let evicted = |writer: &mut TreeWriter, positions: &[u32]| {
        let mut ids: Vec<u32> =
            writer.evict_prefix(&base(), positions).iter().map(|block| block.id.0).collect();
        writer.audit().expect("consistent");
        ids.sort_unstable();
        ids
    };
    put(&mut writer, &base(), &[1, 2, 3, 4, 5, 6], 10);
    put(&mut writer, &base(), &[1, 2, 3, 4, 7, 8], 20);
    put(&mut writer, &base(), &[1, 2, 9, 9], 30);
    assert!(evicted(&mut writer, &[1]).is_empty(), "not a whole block");
    assert!(evicted(&mut writer, &[1, 2, 3, 4, 5, 5]).is_empty(), "not cached");
    let pin = writer.pin(&base(), &[1, 2, 3, 4, 7, 8]).expect("cached");
    assert_eq!(evicted(&mut writer, &[1, 2, 3, 4]), [12], "the pin holds the others");
    assert_eq!(reader.query_match_len(&base(), &[1, 2, 3, 4, 7, 8]), 6);
    assert!(writer.unpin(pin));
    assert_eq!(evicted(&mut writer, &[1, 2, 3, 4, 7]), [11, 20], "the first block is shared");
    assert_eq!(reader.query_match_len(&base(), &[1, 2, 9, 9]), 4);
    assert_eq!(evicted(&mut writer, &[1, 2, 9, 9]), [10, 30], "nothing shares it any more");
    assert_eq!((writer.counts().cached, writer.stats().evicted_by_prefix), (0, 5));
}

/// Goal: the eviction of a prefix removes every branch that nothing holds from a held sequence,
/// although the held nodes merge when a branch goes.
#[test]
fn branches_of_a_held_sequence_can_be_evicted() {
    let held = [1, 2, 3, 4];
    let branches: [&[u32]; 3] = [&[1, 9], &[1, 2, 9], &[1, 2, 3, 9]];
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        for before in 0..=3 {
            let mut writer = tree(EvictionPolicy::Lru);
            for (index, branch) in order.map(|branch| branches[branch]).into_iter().enumerate() {
                if index == before {
                    put(&mut writer, &base(), &held, 10);
                }
                put(&mut writer, &base(), branch, 20 + 10 * index as u32);
            }
            put(&mut writer, &base(), &held, 50);
            let lease = writer.acquire(&base(), &held);
            assert_eq!(writer.evict_prefix(&base(), &[1]).len(), 3, "{order:?} {before}");
            writer.audit().expect("consistent");
            assert_eq!((lease.blocks().len(), writer.counts().cached), (4, 4));
        }
    }
}

/// Goal: the tree evicts in the order that the caller supplies.
#[test]
fn a_custom_eviction_order_is_used() {
    #[derive(Debug)]
    struct Middle;
    impl EvictionOrder for Middle {
        fn rank(&mut self, leaf: &EvictionCandidate) -> EvictionRank {
            EvictionRank(u64::from(leaf.hits != 1), leaf.created)
        }
    }
    let builder = TreeBuilder::new(1).eviction_order(Box::new(Middle));
    let mut writer = builder.build().expect("a block size").0;
    for leaf in [10, 20, 30] {
        put(&mut writer, &base(), &[leaf], leaf);
    }
    drop(writer.acquire(&base(), &[20]));
    assert_eq!(evict_all(&mut writer), [20, 10, 30]);
}

/// Goal: an eviction order that panics leaves the tree consistent. Every block can still be
/// evicted, those without a rank first.
#[test]
fn a_panicking_eviction_order_is_contained() {
    #[derive(Debug)]
    struct Faulty;
    impl EvictionOrder for Faulty {
        fn rank(&mut self, leaf: &EvictionCandidate) -> EvictionRank {
            assert!(leaf.hits > 0, "this order expects leaves that were used");
            EvictionRank(1, leaf.last_use)
        }
        fn evicted(&mut self, _: EvictionRank) {
            panic!("this order expects no eviction");
        }
    }
    let builder = TreeBuilder::new(1).eviction_order(Box::new(Faulty));
    let mut writer = builder.build().expect("a block size").0;
    for leaf in [10, 20, 30] {
        put(&mut writer, &base(), &[leaf], leaf);
        writer.audit().expect("consistent");
    }
    drop(writer.acquire(&base(), &[10]));
    for expected in [20, 30, 10] {
        assert_eq!(writer.evict(1), [BlockId(expected)]);
        writer.audit().expect("consistent");
    }
    assert!(writer.stats().eviction_order_panics >= 6, "one for each leaf and each eviction");
}

/// Goal: of two equally used leaves, the cost-aware policy keeps the deep one longer, because it
/// costs more to recompute. It evicts an expensive leaf that is never used again.
#[test]
fn the_cost_aware_policy_weighs_depth_and_ages() {
    let (mut writer, reader) = TreeBuilder::new(1)
        .eviction_policy(EvictionPolicy::CostAware)
        .build()
        .expect("a block size");
    let deep: Vec<u32> = (0..2000).collect();
    let mut lease = writer.acquire(&base(), &deep[..1900]);
    let blocks: Vec<BlockId> = (0..1900).map(BlockId).collect();
    let _ = writer.commit(&mut lease, &deep[..1900], &blocks).expect("a valid commit");
    put(&mut writer, &base(), &deep, 1900);
    put(&mut writer, &base(), &[7000], 5000);
    assert_eq!(writer.evict(1), [BlockId(5000)], "the shallow leaf is cheaper to recompute");
    for round in 0..200 {
        put(&mut writer, &base(), &[8000 + round], 6000);
        let _ = writer.evict(1);
    }
    assert!(reader.query_match_len(&base(), &deep) < 2000, "newer leaves are worth more");
}

/// Goal: a leaf that is longer than needed loses exactly as many blocks as needed, from its end.
#[test]
fn a_long_leaf_is_trimmed() {
    let (mut writer, reader) = prefix_tree(2).expect("a block size");
    put(&mut writer, &base(), &[1, 2, 3, 4, 5, 6, 7, 8], 0);
    assert_eq!(writer.evict(1), [BlockId(3)]);
    assert_eq!(writer.evict(2), [BlockId(1), BlockId(2)]);
    assert_eq!(reader.query_match_len(&base(), &[1, 2, 3, 4]), 2);
    writer.audit().expect("consistent");
}

/// Goal: a sequence that grows by one block per commit consists of few nodes while it is locked,
/// and of one node afterward.
#[test]
fn a_growing_sequence_is_merged_into_one_node() {
    let (mut writer, _) = prefix_tree(1).expect("a block size");
    let positions: Vec<u32> = (0..500).collect();
    let mut lease = writer.acquire(&base(), &positions);
    for end in 1..=positions.len() {
        let _ = writer
            .commit(&mut lease, &positions[..end], &[BlockId(end as u32)])
            .expect("a valid commit");
        assert!(writer.counts().nodes <= 10, "{} nodes at {end}", writer.counts().nodes);
        writer.audit().expect("consistent");
    }
    drop(lease);
    assert_eq!(writer.counts().nodes, 1);
}

/// Goal: when a branch was evicted, the nodes that it separated are merged again.
#[test]
fn nodes_are_merged_after_a_branch_was_evicted() {
    let mut writer = tree(EvictionPolicy::Mru);
    let trunk: Vec<u32> = (0..64).collect();
    put(&mut writer, &base(), &trunk, 0);
    for end in 1..64 {
        let mut branch = trunk[..end].to_vec();
        branch.push(9999);
        put(&mut writer, &base(), &branch, 1000);
        assert_eq!(writer.counts().nodes, 3);
        assert_eq!(writer.evict(1), [BlockId(1000)]);
        assert_eq!(writer.counts().nodes, 1);
    }
    writer.audit().expect("consistent");
}

/// Goal: queries are exact while children are inserted into and removed from wide tables in place,
/// and memory is freed afterward.
#[test]
fn a_wide_root_under_churn() {
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    let empty = writer.index_bytes();
    for round in 0..3u32 {
        for key in 0..5000 {
            put(&mut writer, &base(), &[key * 3 + round], key);
        }
        writer.audit().expect("consistent");
        for key in 0..15_000 {
            let expected = usize::from(key % 3 == round);
            assert_eq!(reader.query_match_len(&base(), &[key]), expected, "{key}");
        }
        for left in (0..5000usize).rev().step_by(100) {
            let _ = writer.evict(100);
            assert_eq!(writer.counts().cached, left + 1 - 100);
        }
    }
    writer.audit().expect("consistent");
    // Only the writer's records and the unused numbers of nodes remain, in vectors whose capacity
    // is at most twice the largest number of nodes.
    let left = writer.index_bytes() - empty;
    assert!((650_000..2 * 5002 * 80).contains(&left), "{left} bytes");
}

/// Goal: the index is small: at most 300 bytes for a node of one block, and at most 90 bytes per
/// block of a long run.
#[test]
fn the_index_is_small() {
    let (mut writer, _) = prefix_tree(16).expect("a block size");
    for key in 0..1000 {
        put(&mut writer, &base(), &[key; 16], key);
    }
    // No less than its vectors take, which are most of it.
    assert!((250_000..=300_000).contains(&writer.index_bytes()), "{} bytes", writer.index_bytes());
    let (mut writer, _) = prefix_tree(16).expect("a block size");
    let long: Vec<u32> = (0..16 * 10_000).collect();
    put(&mut writer, &base(), &long, 0);
    assert!(writer.index_bytes() <= 90 * 10_000, "{} bytes", writer.index_bytes());
}

/// Goal: a flush removes locked nodes from the index at once. Their blocks return after the last
/// lease, and until its end each lease remains usable.
#[test]
fn flush_while_leases_exist() {
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    put(&mut writer, &base(), &[1, 2, 3], 0);
    let mut lease = writer.acquire(&base(), &[1, 2]);
    let second = writer.acquire(&base(), &[1]);
    assert_eq!(writer.flush(), [BlockId(2)]);
    assert_eq!(reader.query_match_len(&base(), &[1, 2, 3]), 0);
    let commit = writer.commit(&mut lease, &[1, 2, 8], &[BlockId(8)]).expect("a valid commit");
    assert_eq!(commit.blocks, [BlockId(8)], "the lease grows outside the index");
    assert_eq!(reader.query_match_len(&base(), &[1, 2, 8]), 0);
    put(&mut writer, &base(), &[1, 5], 20);
    assert_eq!(reader.query_match_len(&base(), &[1, 5]), 2, "the index can be filled again");
    assert_eq!(writer.counts().detached, 3);
    drop(lease);
    let mut back: Vec<BlockId> = writer.evict(2).iter().map(|block| block.id).collect();
    back.sort_unstable();
    assert_eq!(back, [BlockId(1), BlockId(8)]);
    drop(second);
    assert_eq!(writer.evict(1), [BlockId(0)]);
    assert_eq!(writer.counts().detached, 0);
    writer.audit().expect("consistent");
}

/// Goal: one namespace can be removed without affecting the others.
#[test]
fn one_namespace_can_be_evicted() {
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    let adapter = Namespace::builder().adapter("a", 1).build();
    put(&mut writer, &base(), &[1, 2], 0);
    put(&mut writer, &adapter, &[1, 2], 10);
    let lease = writer.acquire(&adapter, &[1]);
    writer.pin(&adapter, &[1, 2]).expect("cached");
    assert_eq!(writer.evict_namespace(&adapter), [BlockId(11)], "the pin ends, the lease does not");
    assert_eq!(reader.query_match_len(&adapter, &[1, 2]), 0);
    assert_eq!(reader.query_match_len(&base(), &[1, 2]), 2);
    drop(lease);
    assert_eq!(writer.evict_namespace(&adapter), [BlockId(10)]);
    assert_eq!(writer.counts().namespaces, 0);
    writer.audit().expect("consistent");
}

/// Goal: pins keep blocks cached without a lease and within a budget, until they are removed or the
/// tree is flushed.
#[test]
fn pinned_blocks_stay_cached_within_a_budget() {
    let mut writer = TreeBuilder::new(1).pin_budget(4).build().expect("a block size").0;
    put(&mut writer, &base(), &[1, 2, 3], 0);
    put(&mut writer, &base(), &[7, 8], 10);
    assert_eq!(writer.pin(&base(), &[9]), Err(PinError::NotCached));
    let pin = writer.pin(&base(), &[1, 2]).expect("within the budget");
    let refused = PinError::OverBudget { budget: 4, pinned: 2, requested: 3 };
    assert_eq!(writer.pin(&base(), &[1, 2, 3]), Err(refused));
    let other = writer.pin(&base(), &[7, 8]).expect("within the budget");
    let names: Vec<_> = writer.pins().iter().map(|info| (info.id, info.block_count)).collect();
    assert_eq!(names, [(pin, 2), (other, 2)]);
    assert_eq!(writer.evict(100), [BlockId(2)], "all but the pinned blocks");
    assert!(writer.unpin(other));
    assert_eq!(writer.evict(100).len(), 2, "no longer pinned");
    assert!(!writer.unpin(other));
    assert!(writer.unpin(pin));
    assert_eq!(writer.evict(100).len(), 2);
    put(&mut writer, &base(), &[1], 0);
    writer.pin(&base(), &[1]).expect("cached");
    assert_eq!(writer.flush(), [BlockId(0)]);
    assert!(writer.pins().is_empty());
    writer.audit().expect("consistent");
}

/// Goal: operations with nothing to do or with wrong arguments change nothing.
#[test]
fn failed_operations_change_nothing() {
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    put(&mut writer, &base(), &[1, 2], 0);
    let (mut other, _) = prefix_tree(1).expect("a block size");
    let mut foreign = other.acquire(&base(), &[]);
    let mut lease = writer.acquire(&base(), &[1, 2]);
    let counts = writer.counts();
    let version = reader.tree_version();
    let refused = writer.commit(&mut foreign, &[5], &[BlockId(5)]);
    assert_eq!(refused, Err(CommitError::OtherTree));
    let refused = writer.commit(&mut lease, &[1, 3, 4], &[BlockId(5)]);
    assert_eq!(refused, Err(CommitError::OtherPrefix { locked: 2 }));
    assert_eq!(writer.commit(&mut lease, &[1, 2, 3], &[]), Ok(Commit::default()));
    assert!(writer.evict(5).is_empty());
    assert!(writer.evict(0).is_empty());
    let unknown = Namespace::builder().salt("x").build();
    assert!(writer.evict_namespace(&unknown).is_empty());
    assert_eq!(writer.counts(), counts);
    assert_eq!(reader.tree_version(), version);
    assert_eq!((foreign.len(), lease.len()), (0, 2));
}

/// A copy of the index that is built from events: the hash of each block and of its parent.
#[derive(Default)]
struct Copy(HashMap<u64, Option<u64>>);

impl Copy {
    fn apply(&mut self, event: &CacheEvent) {
        match event {
            CacheEvent::Stored { parent, hashes, .. } => {
                let mut parent = *parent;
                for &hash in hashes {
                    assert!(parent.is_none_or(|p| self.0.contains_key(&p)), "parents come first");
                    assert!(self.0.insert(hash, parent).is_none(), "stored once");
                    parent = Some(hash);
                }
            }
            CacheEvent::Removed { hashes } => {
                for hash in hashes {
                    assert!(self.0.remove(hash).is_some(), "removed once");
                }
            }
            CacheEvent::Cleared => self.0.clear(),
            CacheEvent::Reset { .. } => panic!("a reset needs a new snapshot"),
        }
    }

    fn of(writer: &TreeWriter) -> Copy {
        let mut copy = Copy::default();
        writer.snapshot().events.iter().for_each(|event| copy.apply(event));
        copy
    }
}

/// Goal: the events rebuild the index, and their numbers have no gap.
#[test]
fn events_rebuild_the_index() {
    let (mut writer, _) = prefix_tree(2).expect("a block size");
    let events = writer.subscribe(100_000).expect("a capacity");
    let salted = Namespace::builder().salt("s").build();
    let mut copy = Copy::default();
    let mut last = 0;
    for round in 0u32..300 {
        let namespace = if round % 3 == 0 { &salted } else { &base() };
        let positions: Vec<u32> = (0..round % 17 * 2).map(|i| i * (round % 5)).collect();
        put(&mut writer, namespace, &positions, round * 100);
        if round % 4 == 0 {
            let _ = writer.evict(round as usize % 7);
        }
        if round % 101 == 100 {
            let _ = writer.flush();
        }
        if round % 77 == 76 {
            let _ = writer.evict_namespace(&salted);
        }
        for numbered in events.drain() {
            assert_eq!(numbered.number, last + 1);
            last = numbered.number;
            copy.apply(&numbered.event);
        }
        assert_eq!(copy.0, Copy::of(&writer).0);
        assert_eq!(writer.snapshot().number, last);
        assert_eq!(copy.0.len(), writer.counts().cached);
    }
}

/// Goal: a subscriber that is too slow learns how many events it lost, and the writer never waits.
#[test]
fn a_full_event_queue_reports_a_reset() {
    let (mut writer, _) = prefix_tree(1).expect("a block size");
    let events = writer.subscribe(2).expect("a capacity");
    for key in 0..5 {
        put(&mut writer, &base(), &[key], key);
    }
    let got = events.drain();
    // Two events fit, and the third is replaced by a reset together with them. The fourth fits
    // after the reset, and the fifth causes another reset.
    assert_eq!(got.len(), 1);
    assert_eq!((got[0].number, &got[0].event), (5, &CacheEvent::Reset { missed: 5 }));
    drop(events);
    put(&mut writer, &base(), &[9], 9);
}

/// Goal: queries by hash and of many prompts give the same answers as single queries.
#[test]
fn all_forms_of_a_query_agree() {
    let (mut writer, reader) = prefix_tree(4).expect("a block size");
    let salted = Namespace::builder().salt("s").build();
    let long: Vec<u32> = (0..1000).collect();
    put(&mut writer, &base(), &long, 0);
    put(&mut writer, &salted, &long[..500], 1000);
    let mut parted = long.clone();
    parted[300] = 5;
    put(&mut writer, &base(), &parted, 2000);
    let mut lost = parted.clone();
    lost[900] = 6;
    let prompts: [&[u32]; 7] =
        [&long, &parted, &lost, &long[..99], &long[1..], &[], &parted[..301]];
    for namespace in [&base(), &salted, &Namespace::builder().salt("t").build()] {
        let mut lens = Vec::new();
        reader.query_match_lens(namespace, &prompts, &mut lens);
        for (prompt, len) in prompts.iter().zip(lens) {
            assert_eq!(reader.query_match_len(namespace, prompt), len);
            let hashes = reader.block_hashes(namespace, prompt);
            assert_eq!(reader.query_match_hashes(namespace, &hashes) * 4, len);
        }
    }
}

/// Goal: the hashes of blocks can be computed without a tree, with its settings.
#[test]
fn block_hashes_without_a_tree() {
    let settings = || TreeBuilder::new(4).hash_seed(7);
    let hasher = settings().block_hasher().expect("a block size");
    let (_writer, reader) = settings().build().expect("a block size");
    let positions: Vec<u32> = (0..10).collect();
    for namespace in [base(), Namespace::builder().salt("s").build()] {
        let hashes = hasher.block_hashes(&namespace, &positions);
        assert_eq!(hashes.len(), 2);
        assert_eq!(hashes, reader.block_hashes(&namespace, &positions));
    }
    let refused = TreeBuilder::new(3).block_hasher();
    assert_eq!(refused, Err(ConfigError::BlockSize { got: 3 }));
}

/// Goal: the statistics count what happened.
#[test]
fn statistics_count_operations() {
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    put(&mut writer, &base(), &[1, 2, 3, 4], 0);
    drop(writer.acquire(&base(), &[1, 2, 9, 9]));
    reader.query_match_len(&base(), &[1, 2]);
    let _ = writer.evict(1);
    let _ = writer.flush();
    let stats = writer.stats().clone();
    assert_eq!((stats.acquires, stats.acquires_hit), (2, 1));
    assert_eq!((stats.positions_asked, stats.positions_hit), (8, 2));
    assert_eq!((stats.hit_rate(), stats.token_hit_rate(), stats.average_match()), (0.5, 0.25, 1.0));
    assert_eq!((stats.blocks_committed, stats.evicted_for_room, stats.evicted_by_flush), (4, 1, 3));
    assert!(stats.lifetime_ticks.iter().sum::<u64>() > 0);
}

/// Goal: however blocks leave the tree, their age is counted, in operations of the writer.
#[test]
fn ages_of_removed_blocks_are_counted() {
    type Leave = fn(&mut TreeWriter);
    let ways: [Leave; 4] = [
        |writer| assert_eq!(writer.evict(4).len(), 4),
        |writer| assert_eq!(writer.evict_prefix(&base(), &[1, 2, 3, 4]).len(), 4),
        |writer| assert_eq!(writer.evict_namespace(&base()).len(), 4),
        |writer| assert_eq!(writer.flush().len(), 4),
    ];
    for leave in ways {
        let (mut writer, _) = prefix_tree(1).expect("a block size");
        let operations = |writer: &mut TreeWriter, count: usize| {
            (0..count).for_each(|_| drop(writer.acquire(&base(), &[9])));
        };
        operations(&mut writer, 100);
        put(&mut writer, &base(), &[1, 2, 3, 4], 0);
        operations(&mut writer, 20);
        leave(&mut writer);
        let mut expected = [0; 32];
        expected[4] = 1; // 16 to 31 operations
        assert_eq!(writer.stats().lifetime_ticks, expected);
    }
}

/// Goal: a dump describes every node with its locks and uses.
#[test]
fn a_dump_shows_the_tree() {
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    put(&mut writer, &base(), &[1, 2, 3], 0);
    put(&mut writer, &base(), &[1, 2, 4], 10);
    put(&mut writer, &Namespace::builder().salt("s").build(), &[5], 20);
    let lease = writer.acquire(&base(), &[1, 2, 4]);
    let dump = reader.dump();
    assert_eq!(dump.nodes.len(), writer.counts().nodes);
    let blocks: usize = dump.nodes.iter().map(|node| node.block_count).sum();
    assert_eq!(blocks, writer.counts().cached);
    let locked: usize =
        dump.nodes.iter().filter(|node| node.locks > 0).map(|node| node.block_count).sum();
    assert_eq!(locked, 3);
    for (index, node) in dump.nodes.iter().enumerate() {
        assert!(node.parent.is_none_or(|parent| parent < index), "parents come first");
    }
    let leaf = dump
        .nodes
        .iter()
        .find(|node| node.first_positions == [4])
        .expect("the leaf is in the dump");
    assert_eq!((leaf.locks, leaf.hits), (1, 1));
    let last_use = dump.nodes.iter().map(|node| node.last_use).max();
    assert_eq!(Some(leaf.last_use), last_use, "the acquire is the latest use");
    let elsewhere = dump.nodes.iter().filter(|node| node.locks == 0);
    assert!(elsewhere.map(|node| node.last_use).all(|other| other < leaf.last_use));
    let graph = dump.to_graphviz();
    assert_eq!(graph.matches(" -> ").count(), dump.nodes.len());
    drop(lease);
}

/// Goal: a dump has the whole image that a node begins with, and shows it as one span. Runs of
/// positions are tokens, images next to each other, parts of an image, and values.
#[test]
fn images_are_shown_as_spans() {
    let interner = TokenSpanInterner::new(4);
    let image = |content_hash, kv_len| TokenSpan::Image { content_hash, kv_len, columns: 0 };
    let mut positions = vec![1, 2];
    for span in [image(7, 20), image(8, 1), TokenSpan::Value { kind: 1, value: 5 }] {
        interner.append(span, &mut positions).expect("a span");
    }
    positions.extend([3, 4]);
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    put(&mut writer, &base(), &positions, 0);
    let dump = reader.dump();
    assert_eq!(dump.nodes[0].first_positions, positions[..22]);
    assert!(dump.to_graphviz().contains("1 2 [image, 20 positions] ..\\n"));
    let labels: Vec<_> = TokenSpan::runs(&positions[10..]).map(|run| run.label()).collect();
    let shown = |label: &str| Some(label.to_owned());
    let expected = ["[image, 12 positions]", "[image, 1 position]", "[value 0x90000005]"];
    assert_eq!(labels[..3], expected.map(shown));
    assert_eq!(TokenSpan::runs(&positions).next(), Some(PositionRun::Tokens(&[1, 2])));
    assert_eq!(TokenSpan::runs(&positions).last(), Some(PositionRun::Tokens(&[3, 4])));
    assert_eq!(TokenSpan::runs(&positions).count(), 5);
}

/// Goal: every block leads to its whole prefix, in its namespace, and no other hash leads to one.
#[test]
fn a_block_hash_leads_to_its_prefix() {
    let (mut writer, reader) = prefix_tree(2).expect("a block size");
    let other = Namespace::builder().salt("s").build();
    let sequences =
        [(base(), vec![1, 2, 3, 4, 5, 6]), (base(), vec![1, 2, 3, 9]), (other, vec![1, 2, 3, 4])];
    let mut block = 0;
    for (namespace, positions) in &sequences {
        put(&mut writer, namespace, positions, block);
        block += 10;
    }
    for (namespace, positions) in &sequences {
        for (index, hash) in reader.block_hashes(namespace, positions).into_iter().enumerate() {
            let found = reader.cached_prefix(hash).expect("cached");
            assert_eq!(found.namespace, *namespace);
            assert_eq!(found.positions, positions[..(index + 1) * 2]);
        }
    }
    for node in reader.dump().nodes {
        let prefix = reader.cached_prefix(node.last_hash).expect("cached");
        assert!(prefix.positions.len() >= node.position_count);
    }
    let absent = reader.block_hashes(&base(), &[7, 8])[0];
    assert_eq!(reader.cached_prefix(absent), None);
}

/// Goal: a task that waits for events is woken by an event, and when the writer is dropped.
#[test]
fn waiting_subscribers_are_woken() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Poll, Wake};
    struct Wakes(AtomicUsize);
    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let wakes = Arc::new(Wakes(AtomicUsize::new(0)));
    let waker = wakes.clone().into();
    let mut context = Context::from_waker(&waker);
    let mut writer = tree(EvictionPolicy::Lru);
    let mut events = writer.subscribe(10).expect("a capacity");
    assert!(events.poll_next(&mut context).is_pending());
    put(&mut writer, &base(), &[1], 0);
    assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
    put(&mut writer, &base(), &[2], 1);
    assert_eq!(wakes.0.load(Ordering::Relaxed), 1, "no task is waiting");
    for number in [1, 2] {
        let Poll::Ready(Some(event)) = events.poll_next(&mut context) else { panic!("an event") };
        assert_eq!(event.number, number);
    }
    assert!(events.poll_next(&mut context).is_pending());
    drop(writer);
    assert_eq!(wakes.0.load(Ordering::Relaxed), 2);
    assert_eq!(events.poll_next(&mut context), Poll::Ready(None));
}

/// Goal: a thread that waits for events gets them in order, wakes up for an event and when the
/// writer is dropped, and gives up after its timeout.
#[test]
fn threads_can_wait_for_events() {
    use std::sync::mpsc::RecvTimeoutError;
    use std::time::Duration;
    let mut writer = tree(EvictionPolicy::Lru);
    let mut events = writer.subscribe(10).expect("a capacity");
    assert_eq!(events.recv_timeout(Duration::ZERO), Err(RecvTimeoutError::Timeout));
    assert_eq!(events.recv_timeout(Duration::from_millis(1)), Err(RecvTimeoutError::Timeout));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let first = events.recv().map(|event| event.number);
            let second = events.recv_timeout(Duration::MAX).map(|event| event.number);
            (first, second, events.recv(), events.recv_timeout(Duration::MAX))
        });
        put(&mut writer, &base(), &[1], 0);
        put(&mut writer, &base(), &[2], 1);
        drop(writer);
        let got = waiting.join().expect("the thread ends");
        assert_eq!(got, (Some(1), Ok(2), None, Err(RecvTimeoutError::Disconnected)));
    });
}
