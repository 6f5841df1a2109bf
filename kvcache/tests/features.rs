//! What the tree offers beyond match, commit and eviction, one behaviour a test.

use std::collections::HashMap;
use stolon_kvcache::{
    BlockId, CacheEvent, ConfigError, EvictionCandidate, EvictionOrder, EvictionPolicy,
    EvictionRank, Namespace, PinError, TreeBuilder, TreeWriter, prefix_tree,
};

fn base() -> Namespace {
    Namespace::default()
}

/// Commits `positions` in blocks numbered from `first`, leaving nothing locked.
fn put(writer: &mut TreeWriter, namespace: &Namespace, positions: &[u32], first: u32) {
    let mut lease = writer.acquire(namespace, positions);
    let missing = positions.len() / writer.block_size() - lease.blocks().len();
    let blocks: Vec<BlockId> = (first..).take(missing).map(BlockId).collect();
    let _ = writer.commit(&mut lease, positions, &blocks);
}

fn tree(policy: EvictionPolicy) -> TreeWriter {
    TreeBuilder::new(1).eviction_policy(policy).build().expect("a block size").0
}

/// Goal: who may move where: readers everywhere, the writer and leases to another thread.
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

/// Goal: bad configurations are refused with what was expected and what came.
#[test]
fn bad_configurations_are_refused() {
    for got in [0, 3, 12, 257, 512] {
        assert_eq!(prefix_tree(got).err(), Some(ConfigError::BlockSize { got }));
    }
    let refused = tree(EvictionPolicy::Lru).subscribe(0).err();
    assert_eq!(refused, Some(ConfigError::EventCapacity { got: 0 }));
}

/// Three leaves 10, 20, 30, made in this order; then 10 is used twice and 20 once, in this order.
/// Returns the order in which a policy gives them up.
fn order_of(mut writer: TreeWriter) -> Vec<u32> {
    for leaf in [10, 20, 30] {
        put(&mut writer, &base(), &[leaf], leaf);
    }
    for leaf in [10, 10, 20] {
        drop(writer.acquire(&base(), &[leaf]));
    }
    writer.set_priority(&base(), &[10], 5);
    writer.set_priority(&base(), &[20], -5);
    let mut order = Vec::new();
    while let [block] = writer.evict(1)[..] {
        order.push(block.0);
        writer.audit().expect("consistent");
    }
    order
}

/// Goal: each policy gives leaves up in its own order.
#[test]
fn policies_order_their_victims() {
    let expected = [
        (EvictionPolicy::Lru, [30, 10, 20]),
        (EvictionPolicy::Lfu, [30, 20, 10]),
        (EvictionPolicy::Fifo, [10, 20, 30]),
        (EvictionPolicy::Mru, [20, 10, 30]),
        (EvictionPolicy::Filo, [30, 20, 10]),
        (EvictionPolicy::Priority, [20, 30, 10]),
        (EvictionPolicy::Slru, [30, 20, 10]),
        (EvictionPolicy::CostAware, [30, 20, 10]),
    ];
    for (policy, order) in expected {
        assert_eq!(order_of(tree(policy)), order, "{policy:?}");
    }
}

/// Goal: a policy of the caller's own is asked.
#[test]
fn a_policy_can_be_supplied() {
    #[derive(Debug)]
    struct Middle;
    impl EvictionOrder for Middle {
        fn rank(&mut self, leaf: &EvictionCandidate) -> EvictionRank {
            EvictionRank(u64::from(leaf.hits != 1), leaf.created)
        }
    }
    let builder = TreeBuilder::new(1).eviction_order(Box::new(Middle));
    assert_eq!(order_of(builder.build().expect("a block size").0), [20, 10, 30]);
}

/// Goal: the cost-aware policy keeps a deep run before a shallow one of equal use, and lets go of
/// what was dear but is never used again.
#[test]
fn the_cost_aware_policy_weighs_depth_and_ages() {
    let (mut writer, reader) = TreeBuilder::new(1)
        .eviction_policy(EvictionPolicy::CostAware)
        .build()
        .expect("a block size");
    let deep: Vec<u32> = (0..2000).collect();
    let mut lease = writer.acquire(&base(), &deep[..1900]);
    let blocks: Vec<BlockId> = (0..1900).map(BlockId).collect();
    let _ = writer.commit(&mut lease, &deep[..1900], &blocks);
    put(&mut writer, &base(), &deep, 1900);
    put(&mut writer, &base(), &[7000], 5000);
    assert_eq!(writer.evict(1), [BlockId(5000)], "the shallow one is cheaper to compute again");
    for round in 0..200 {
        put(&mut writer, &base(), &[8000 + round], 6000);
        let _ = writer.evict(1);
    }
    assert!(reader.query_match_len(&base(), &deep) < 2000, "its worth was overtaken");
}

/// Goal: a leaf longer than needed is trimmed from its tail, by exactly what is needed.
#[test]
fn a_long_leaf_is_trimmed() {
    let (mut writer, reader) = prefix_tree(2).expect("a block size");
    put(&mut writer, &base(), &[1, 2, 3, 4, 5, 6, 7, 8], 0);
    assert_eq!(writer.evict(1), [BlockId(3)]);
    assert_eq!(writer.evict(2), [BlockId(1), BlockId(2)]);
    assert_eq!(reader.query_match_len(&base(), &[1, 2, 3, 4]), 2);
    writer.audit().expect("consistent");
}

/// Goal: a sequence that grows by one block a commit stays a handful of nodes, and one at rest.
#[test]
fn growing_sequences_leave_no_chain() {
    let (mut writer, _) = prefix_tree(1).expect("a block size");
    let positions: Vec<u32> = (0..500).collect();
    let mut lease = writer.acquire(&base(), &positions);
    for end in 1..=positions.len() {
        let _ = writer.commit(&mut lease, &positions[..end], &[BlockId(end as u32)]);
        assert!(writer.counts().nodes <= 10, "{} nodes at {end}", writer.counts().nodes);
        writer.audit().expect("consistent");
    }
    drop(lease);
    assert_eq!(writer.counts().nodes, 1);
}

/// Goal: memory comes back after churn: what branches leave behind is merged again.
#[test]
fn branches_that_are_gone_leave_no_borders() {
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

/// Goal: wide tables, with children coming and going in place, answer exactly; memory returns.
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
    // What stays is the writer's records, at most two capacities of the most nodes there were.
    let records = 2 * 5002 * 80;
    assert!(writer.index_bytes() < empty + records, "{} bytes", writer.index_bytes());
}

/// Goal: the index itself stays small: a node of one block within 300 bytes, a block of a long
/// run within 90.
#[test]
fn the_index_is_small() {
    let (mut writer, _) = prefix_tree(16).expect("a block size");
    for key in 0..1000 {
        put(&mut writer, &base(), &[key; 16], key);
    }
    assert!(writer.index_bytes() <= 300_000, "{} bytes", writer.index_bytes());
    let (mut writer, _) = prefix_tree(16).expect("a block size");
    let long: Vec<u32> = (0..16 * 10_000).collect();
    put(&mut writer, &base(), &long, 0);
    assert!(writer.index_bytes() <= 90 * 10_000, "{} bytes", writer.index_bytes());
}

/// Goal: a flush takes nodes in use out of the index at once; their blocks come back after the
/// last lease, and the leases stay good until then.
#[test]
fn flush_while_in_use() {
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    put(&mut writer, &base(), &[1, 2, 3], 0);
    let mut lease = writer.acquire(&base(), &[1, 2]);
    let second = writer.acquire(&base(), &[1]);
    assert_eq!(writer.flush(), [BlockId(2)]);
    assert_eq!(reader.query_match_len(&base(), &[1, 2, 3]), 0);
    let commit = writer.commit(&mut lease, &[1, 2, 8], &[BlockId(8)]);
    assert_eq!(commit.blocks, [BlockId(8)], "the lease grows outside the index");
    assert_eq!(reader.query_match_len(&base(), &[1, 2, 8]), 0);
    put(&mut writer, &base(), &[1, 5], 20);
    assert_eq!(reader.query_match_len(&base(), &[1, 5]), 2, "the index starts anew");
    assert_eq!(writer.counts().detached, 3);
    drop(lease);
    let mut back = writer.evict(2);
    back.sort_unstable();
    assert_eq!(back, [BlockId(1), BlockId(8)]);
    drop(second);
    assert_eq!(writer.evict(1), [BlockId(0)]);
    assert_eq!(writer.counts().detached, 0);
    writer.audit().expect("consistent");
}

/// Goal: a namespace can be taken out alone.
#[test]
fn evict_by_namespace() {
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

/// Goal: pins hold without a lease, within a budget, and end by name or by a flush.
#[test]
fn pins() {
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

/// Goal: operations that find nothing to do, or that are asked for the wrong thing, change nothing.
#[test]
fn failed_operations_change_nothing() {
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    put(&mut writer, &base(), &[1, 2], 0);
    let (mut other, _) = prefix_tree(1).expect("a block size");
    let mut foreign = other.acquire(&base(), &[]);
    let mut lease = writer.acquire(&base(), &[1, 2]);
    let counts = writer.counts();
    let version = reader.tree_version();
    assert!(writer.commit(&mut foreign, &[5], &[BlockId(5)]).blocks.is_empty());
    assert!(writer.commit(&mut lease, &[1, 3, 4], &[BlockId(5)]).blocks.is_empty());
    assert!(writer.commit(&mut lease, &[1, 2, 3], &[]).blocks.is_empty());
    assert!(writer.evict(5).is_empty());
    assert!(writer.evict(0).is_empty());
    let unknown = Namespace::builder().salt("x").build();
    assert!(writer.evict_namespace(&unknown).is_empty());
    assert_eq!(writer.counts(), counts);
    assert_eq!(reader.tree_version(), version);
    assert_eq!((foreign.len(), lease.len()), (0, 2));
}

/// A copy of the index, kept from events alone: each block's hash and its parent's.
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

/// Goal: replaying the events gives the index, with numbers that have no gap.
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

/// Goal: a subscriber that is too slow is told how much it lost, and the writer never waits.
#[test]
fn a_full_event_queue_reports_a_reset() {
    let (mut writer, _) = prefix_tree(1).expect("a block size");
    let events = writer.subscribe(2).expect("a capacity");
    for key in 0..5 {
        put(&mut writer, &base(), &[key], key);
    }
    let got = events.drain();
    // Two fit, the third resets; the fourth fits beside the reset, the fifth resets again.
    assert_eq!(got.len(), 1);
    assert_eq!((got[0].number, &got[0].event), (5, &CacheEvent::Reset { missed: 5 }));
    drop(events);
    put(&mut writer, &base(), &[9], 9);
}

/// Goal: the forms with hashes and with many prompts give the same answers as the plain one.
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

/// Goal: what is counted is what happened.
#[test]
fn statistics() {
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

/// Goal: a dump shows every node with what the writer knows of it.
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
    let leaf = dump.nodes.iter().find(|node| node.first_positions == [4]).expect("it is there");
    assert_eq!((leaf.locks, leaf.hits), (1, 1));
    let last_use = dump.nodes.iter().map(|node| node.last_use).max();
    assert_eq!(Some(leaf.last_use), last_use, "the acquire is the latest use");
    let elsewhere = dump.nodes.iter().filter(|node| node.locks == 0);
    assert!(elsewhere.map(|node| node.last_use).all(|other| other < leaf.last_use));
    let graph = dump.to_graphviz();
    assert_eq!(graph.matches(" -> ").count(), dump.nodes.len());
    drop(lease);
}

/// Goal: a task that waits for events is woken by one, and by the end of the writer.
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
    assert_eq!(wakes.0.load(Ordering::Relaxed), 1, "nobody waits");
    for number in [1, 2] {
        let Poll::Ready(Some(event)) = events.poll_next(&mut context) else { panic!("an event") };
        assert_eq!(event.number, number);
    }
    assert!(events.poll_next(&mut context).is_pending());
    drop(writer);
    assert_eq!(wakes.0.load(Ordering::Relaxed), 2);
    assert_eq!(events.poll_next(&mut context), Poll::Ready(None));
}
