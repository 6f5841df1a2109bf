//! Random operations on the tree and on a slow, obvious model of it: a map from every cached
//! prefix to its block. After each operation both must tell the same.

use proptest::prelude::*;
use std::collections::{HashMap, HashSet};
use stolon_kvcache::{
    BlockId, Event, EventReceiver, Namespace, PinId, Policy, PrefixLease, TreeBuilder, TreeReader,
    TreeWriter,
};

/// A cached block is named by its namespace and all positions up to its end.
type Prefix = (usize, Vec<u32>);

struct Held {
    lease: PrefixLease,
    namespace: usize,
    /// The positions that the lease covers.
    positions: Vec<u32>,
    /// Whether a flush has cut it off.
    detached: bool,
}

struct Model {
    block_size: usize,
    namespaces: Vec<Namespace>,
    cached: HashMap<Prefix, BlockId>,
    leases: Vec<Held>,
    /// Pins and the prefixes that they hold.
    pins: Vec<(PinId, Prefix)>,
    events: EventReceiver,
    /// The blocks' hashes, from events alone.
    copy: HashSet<u64>,
    free: Vec<BlockId>,
    next: u32,
    writer: TreeWriter,
    reader: TreeReader,
}

impl Model {
    fn new(block_size: usize, policy: Policy) -> Model {
        let (mut writer, reader) =
            TreeBuilder::new(block_size).policy(policy).build().expect("valid block size");
        let events = writer.subscribe(100).expect("a capacity");
        let salted = |salt: &str| Namespace::builder().salt(salt).build();
        Model {
            block_size,
            namespaces: vec![Namespace::default(), salted("a"), salted("b")],
            cached: HashMap::new(),
            leases: Vec::new(),
            pins: Vec::new(),
            events,
            copy: HashSet::new(),
            free: Vec::new(),
            next: 0,
            writer,
            reader,
        }
    }

    fn match_len(&self, namespace: usize, positions: &[u32]) -> usize {
        let ends = (1..=positions.len() / self.block_size).map(|n| n * self.block_size);
        let hit = |&end: &usize| self.cached.contains_key(&(namespace, positions[..end].to_vec()));
        ends.take_while(hit).last().unwrap_or(0)
    }

    fn locked(&self) -> HashSet<Prefix> {
        let mut locked = HashSet::new();
        let leases = self.leases.iter().filter(|held| !held.detached);
        let leases = leases.map(|held| (held.namespace, &held.positions));
        let pins = self.pins.iter().map(|(_, (namespace, positions))| (*namespace, positions));
        for (namespace, positions) in leases.chain(pins) {
            for end in (self.block_size..=positions.len()).step_by(self.block_size) {
                locked.insert((namespace, positions[..end].to_vec()));
            }
        }
        locked
    }

    fn fresh_block(&mut self) -> BlockId {
        self.free.pop().unwrap_or_else(|| {
            self.next += 1;
            BlockId(self.next - 1)
        })
    }

    fn acquire(&mut self, namespace: usize, positions: &[u32]) {
        let expected = self.match_len(namespace, positions);
        let lease = self.writer.acquire(&self.namespaces[namespace], positions);
        assert_eq!(lease.len(), expected, "the longest cached prefix is locked");
        for (index, block) in lease.blocks().iter().enumerate() {
            let end = (index + 1) * self.block_size;
            assert_eq!(self.cached[&(namespace, positions[..end].to_vec())], *block);
        }
        let positions = positions[..expected].to_vec();
        self.leases.push(Held { lease, namespace, positions, detached: false });
    }

    fn commit(&mut self, which: usize, tail: &[u32]) {
        let mut held = self.leases.swap_remove(which);
        let mut positions = held.positions.clone();
        positions.extend_from_slice(tail);
        let have = held.lease.blocks().len();
        let total = positions.len() / self.block_size;
        let offered: Vec<BlockId> = (have..total).map(|_| self.fresh_block()).collect();
        let commit = self.writer.commit(&mut held.lease, &positions, &offered);
        assert_eq!(commit.blocks.len(), offered.len(), "text is committed whole");
        let mut duplicates = Vec::new();
        for (index, &block) in offered.iter().enumerate() {
            let end = (have + index + 1) * self.block_size;
            let prefix = (held.namespace, positions[..end].to_vec());
            let canonical = match self.cached.get(&prefix) {
                Some(&known) if !held.detached => {
                    duplicates.push(block);
                    known
                }
                _ if held.detached => block,
                _ => *self.cached.entry(prefix).or_insert(block),
            };
            assert_eq!(commit.blocks[index], canonical);
        }
        assert_eq!(commit.duplicates, duplicates);
        self.free.extend(duplicates);
        held.positions = positions[..total * self.block_size].to_vec();
        assert_eq!(held.lease.len(), held.positions.len());
        self.leases.push(held);
    }

    fn drop_lease(&mut self, which: usize) {
        self.leases.swap_remove(which);
    }

    /// Blocks that left the index while locked and that no lease holds any more.
    fn freed(&mut self) -> usize {
        let mut held: HashSet<BlockId> = HashSet::new();
        for lease in self.leases.iter().filter(|held| held.detached) {
            held.extend(lease.lease.blocks());
        }
        self.writer.counts().detached - held.len()
    }

    fn evict(&mut self, count: usize) {
        let locked = self.locked();
        let evictable = self.cached.len() - locked.len();
        let freed = self.freed();
        let out = self.writer.evict(count);
        assert_eq!(out.len(), count.min(evictable + freed), "exactly as many as asked, if any");
        let out: HashSet<BlockId> = out.into_iter().collect();
        let before = self.cached.len();
        self.cached.retain(|_, block| !out.contains(block));
        assert_eq!(before - self.cached.len(), out.len() - freed.min(count));
        for prefix in &locked {
            assert!(self.cached.contains_key(prefix), "a locked block was evicted");
        }
        for (namespace, positions) in self.cached.keys() {
            let parent = positions[..positions.len() - self.block_size].to_vec();
            let rooted = parent.is_empty() || self.cached.contains_key(&(*namespace, parent));
            assert!(rooted, "leaves go first");
        }
        self.free.extend(out);
    }

    fn pin(&mut self, namespace: usize, positions: &[u32]) {
        let expected = self.match_len(namespace, positions);
        match self.writer.pin(&self.namespaces[namespace], positions, None) {
            Ok(id) => self.pins.push((id, (namespace, positions[..expected].to_vec()))),
            Err(_) => assert_eq!(expected, 0, "what is cached can be pinned"),
        }
    }

    fn unpin(&mut self, which: usize) {
        let (id, _) = self.pins.swap_remove(which);
        assert!(self.writer.unpin(id));
    }

    fn evict_namespace(&mut self, namespace: usize) {
        self.pins.retain(|(_, (pinned, _))| *pinned != namespace);
        let locked = self.locked().into_iter().filter(|(n, _)| *n == namespace).count();
        let freed = self.freed();
        let out = self.writer.evict_namespace(&self.namespaces[namespace]);
        let there = self.cached.keys().filter(|(n, _)| *n == namespace).count();
        assert_eq!(out.len(), there - locked + freed);
        self.free.extend(out);
        self.cached.retain(|(n, _), _| *n != namespace);
        for held in self.leases.iter_mut().filter(|held| held.namespace == namespace) {
            held.detached |= !held.lease.is_empty();
        }
    }

    fn flush(&mut self) {
        self.pins.clear();
        let locked = self.locked();
        let freed = self.freed();
        let out = self.writer.flush();
        assert_eq!(out.len(), self.cached.len() - locked.len() + freed);
        self.free.extend(out);
        self.cached.clear();
        for held in &mut self.leases {
            held.detached |= !held.lease.is_empty();
        }
    }

    fn check(&mut self) {
        self.writer.audit().expect("the tree keeps its rules");
        for numbered in self.events.drain() {
            match numbered.event {
                Event::Stored { hashes, .. } => self.copy.extend(hashes),
                Event::Removed { hashes } => self.copy.retain(|hash| !hashes.contains(hash)),
                Event::Cleared => self.copy.clear(),
                Event::Reset { .. } => unreachable!("the queue is drained after each operation"),
            }
        }
        let hashes = self.cached.keys().map(|(namespace, positions)| {
            let hashes = self.reader.block_hashes(&self.namespaces[*namespace], positions);
            *hashes.last().expect("at least one block")
        });
        assert_eq!(hashes.collect::<HashSet<_>>(), self.copy, "the events tell what is cached");
        let locked = self.locked().len();
        let counts = self.writer.counts();
        assert_eq!(counts.cached, self.cached.len());
        assert_eq!(counts.locked, locked);
        assert_eq!(counts.evictable, self.cached.len() - locked);
        let used: HashSet<usize> = self.cached.keys().map(|(n, _)| *n).filter(|n| *n > 0).collect();
        assert_eq!(counts.namespaces, used.len(), "empty namespaces are pruned, others stay");
    }
}

#[derive(Clone, Debug)]
enum Op {
    Query(usize, Vec<u32>),
    Acquire(usize, Vec<u32>),
    Commit(usize, Vec<u32>),
    Drop(usize),
    Evict(usize),
    Pin(usize, Vec<u32>),
    Unpin(usize),
    EvictNamespace(usize),
    Flush,
}

/// Few different positions, so that prompts share prefixes and part anywhere.
fn positions() -> impl Strategy<Value = Vec<u32>> {
    prop_oneof![
        proptest::collection::vec(0u32..2, 0..24),
        (0u32..3, 0usize..80).prop_map(|(p, n)| vec![p; n]),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        2 => (0usize..3, positions()).prop_map(|(n, p)| Op::Query(n, p)),
        4 => (0usize..3, positions()).prop_map(|(n, p)| Op::Acquire(n, p)),
        6 => (0usize..6, positions()).prop_map(|(n, p)| Op::Commit(n, p)),
        3 => (0usize..6).prop_map(Op::Drop),
        3 => (0usize..12).prop_map(Op::Evict),
        1 => (0usize..3, positions()).prop_map(|(n, p)| Op::Pin(n, p)),
        1 => (0usize..3).prop_map(Op::Unpin),
        1 => (0usize..3).prop_map(Op::EvictNamespace),
        1 => Just(Op::Flush),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, ..ProptestConfig::default() })]

    /// Goal: every answer of the tree equals the model's, for all block sizes and policies.
    #[test]
    fn the_tree_equals_its_model(
        log_block_size in 0u32..6,
        policy in proptest::sample::select(&Policy::ALL[..]),
        ops in proptest::collection::vec(op(), 1..60),
    ) {
        let mut model = Model::new(1 << log_block_size, policy);
        for op in ops {
            match op {
                Op::Query(n, p) => {
                    let before = model.reader.tree_version();
                    let got = model.reader.query_match_len(&model.namespaces[n], &p);
                    prop_assert_eq!(got, model.match_len(n, &p));
                    prop_assert_eq!(before, model.reader.tree_version());
                }
                Op::Acquire(n, p) => model.acquire(n, &p),
                Op::Commit(n, p) if n < model.leases.len() => model.commit(n, &p),
                Op::Drop(n) if n < model.leases.len() => model.drop_lease(n),
                Op::Evict(n) => model.evict(n),
                Op::Pin(n, p) => model.pin(n, &p),
                Op::Unpin(n) if n < model.pins.len() => model.unpin(n),
                Op::EvictNamespace(n) => model.evict_namespace(n),
                Op::Flush => model.flush(),
                _ => {}
            }
            model.check();
        }
        model.leases.clear();
        while !model.pins.is_empty() {
            model.unpin(0);
        }
        let all = model.next as usize;
        model.evict(usize::MAX);
        model.check();
        let free: HashSet<BlockId> = model.free.iter().copied().collect();
        prop_assert_eq!((model.free.len(), free.len()), (all, all), "every block is back, once");
        prop_assert_eq!(model.writer.counts().nodes, 0);
    }
}
