//! A tree with quotas next to a model that knows only how many blocks each namespace has. The
//! cached blocks are read from the events, the locked ones from the leases and pins. An operation
//! that makes no room for others must leave each namespace with exactly the blocks that it had and
//! was given, except for those above its quota that nothing locks.

use std::collections::HashSet;
use stolon_kvcache::{
    BlockId, CacheEvent, EventReceiver, EvictedBlocks, EvictionPolicy, Namespace, PinId,
    PrefixLease, TreeBuilder, TreeReader, TreeWriter,
};

/// Number of namespaces. The first is the base namespace.
const COUNT: usize = 4;

/// An operation. Namespaces, leases and pins are chosen by their index, which wraps around.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Acquire(usize, Vec<u32>),
    Commit(usize, Vec<u32>),
    Drop(usize),
    Evict(usize),
    Pin(usize, Vec<u32>),
    Unpin(usize),
    EvictNamespace(usize),
    EvictPrefix(usize, Vec<u32>),
    SetQuota(usize, Option<usize>),
    SetPolicy(EvictionPolicy),
    Flush,
}

struct Held {
    lease: PrefixLease,
    namespace: usize,
    positions: Vec<u32>,
    /// Whether its prefix was removed from the index.
    detached: bool,
}

pub(crate) struct Model {
    namespaces: [Namespace; COUNT],
    /// The quota of all namespaces but the first.
    default: Option<usize>,
    own: [Option<usize>; COUNT],
    /// The hashes of the cached blocks of each namespace, according to the events.
    cached: [HashSet<u64>; COUNT],
    leases: Vec<Held>,
    pins: Vec<(PinId, usize, Vec<u32>)>,
    /// Number of blocks that left for a quota.
    evicted: u64,
    free: Vec<BlockId>,
    next: u32,
    events: EventReceiver,
    writer: TreeWriter,
    reader: TreeReader,
}

impl Model {
    pub(crate) fn new(block_size: usize, default: Option<usize>) -> Model {
        let mut builder = TreeBuilder::new(block_size).block_count(1 << 20);
        if let Some(quota) = default {
            builder = builder.namespace_quota(quota);
        }
        let (mut writer, reader) = builder.build().expect("valid settings");
        let events = writer.subscribe(1000).expect("a capacity");
        let salted = |salt: &str| Namespace::builder().key([0; 32]).salt(salt).build();
        Model {
            namespaces: [Namespace::default(), salted("a"), salted("b"), salted("c")],
            default,
            own: [None; COUNT],
            cached: Default::default(),
            leases: Vec::new(),
            pins: Vec::new(),
            evicted: 0,
            free: Vec::new(),
            next: 0,
            events,
            writer,
            reader,
        }
    }

    fn quota(&self, namespace: usize) -> usize {
        let default = self.default.filter(|_| namespace > 0);
        self.own[namespace].or(default).unwrap_or(usize::MAX)
    }

    /// Number of blocks of a namespace that leases and pins hold.
    fn locked(&self, namespace: usize) -> usize {
        let leases = self.leases.iter().filter(|held| !held.detached);
        let leases = leases.map(|held| (held.namespace, &held.positions));
        let pins = self.pins.iter().map(|(_, namespace, positions)| (*namespace, positions));
        let here = leases.chain(pins).filter(|(n, _)| *n == namespace);
        let hashes = here.flat_map(|(n, p)| self.reader.block_hashes(&self.namespaces[n], p));
        hashes.collect::<HashSet<_>>().len()
    }

    /// Applies the new events. Returns the number of blocks that each namespace got and lost.
    fn read_events(&mut self) -> [(usize, usize); COUNT] {
        let mut changes = [(0, 0); COUNT];
        for numbered in self.events.drain() {
            match numbered.event {
                CacheEvent::Stored { namespace, hashes, .. } => {
                    let index = self.namespaces.iter().position(|n| *n == namespace);
                    let index = index.expect("a namespace of the model");
                    changes[index].0 += hashes.len();
                    self.cached[index].extend(hashes);
                }
                CacheEvent::Removed { hashes } => {
                    for (cached, change) in self.cached.iter_mut().zip(&mut changes) {
                        change.1 += hashes.iter().filter(|hash| cached.remove(hash)).count();
                    }
                }
                CacheEvent::Cleared => self.cached.iter_mut().for_each(HashSet::clear),
                CacheEvent::Reset { .. } => {
                    unreachable!("the events are read after each operation")
                }
            }
        }
        changes
    }

    /// Checks an operation that evicts for quotas only.
    fn check_quotas(&mut self) {
        self.writer.audit().expect("consistent");
        let before = self.cached.each_ref().map(HashSet::len);
        let changes = self.read_events();
        for (namespace, (got, lost)) in changes.into_iter().enumerate() {
            let permitted = self.quota(namespace).max(self.locked(namespace));
            let expected = (before[namespace] + got).min(permitted);
            assert_eq!(self.cached[namespace].len(), expected, "blocks of namespace {namespace}");
            self.evicted += lost as u64;
        }
        self.check_counts();
    }

    fn check_counts(&mut self) {
        let counts = self.writer.counts();
        assert_eq!(counts.cached, self.cached.iter().map(HashSet::len).sum::<usize>());
        assert_eq!(counts.locked, (0..COUNT).map(|n| self.locked(n)).sum::<usize>());
        let mut held: HashSet<BlockId> = HashSet::new();
        for lease in self.leases.iter().filter(|held| held.detached) {
            held.extend(lease.lease.blocks());
        }
        assert_eq!(counts.detached - counts.freed, held.len());
        let outside = self.next as usize - self.free.len();
        assert_eq!(counts.cached + counts.detached, outside, "each block is in one place");
        assert_eq!(self.writer.stats().evicted_for_quota, self.evicted);
        for (namespace, cached) in self.cached.iter().enumerate() {
            let within = cached.len() <= self.quota(namespace);
            assert!(within || self.locked(namespace) == cached.len(), "over its quota");
        }
    }

    /// Takes the blocks that an operation has returned, after an audit.
    fn take(&mut self, out: EvictedBlocks) {
        self.free.extend(out.iter().map(|block| block.id));
        self.writer.audit().expect("consistent");
        self.read_events();
        self.check_counts();
    }

    fn commit(&mut self, which: usize, tail: &[u32]) {
        let mut held = self.leases.swap_remove(which);
        let size = self.writer.block_size();
        let mut positions = held.positions.clone();
        positions.extend_from_slice(tail);
        positions.truncate(positions.len() / size * size);
        let missing = positions.len() / size - held.lease.blocks().len();
        let offered: Vec<BlockId> = (0..missing)
            .map(|_| {
                self.free.pop().unwrap_or_else(|| {
                    self.next += 1;
                    BlockId(self.next - 1)
                })
            })
            .collect();
        let commit =
            self.writer.commit(&mut held.lease, &positions, &offered).expect("a valid commit");
        self.free.extend(commit.duplicates);
        held.positions = positions;
        self.leases.push(held);
    }

    fn evict(&mut self, count: usize) {
        let counts = self.writer.counts();
        let before = self.cached.each_ref().map(HashSet::len);
        let out = self.writer.evict(count);
        assert_eq!(out.len(), count.min(counts.evictable + counts.freed));
        let for_room = out.len() - counts.freed.min(count);
        self.take(out);
        let after = self.cached.each_ref().map(HashSet::len);
        let gone = before.iter().sum::<usize>() - after.iter().sum::<usize>();
        assert_eq!(gone, for_room, "what left for a quota is returned first");
    }

    fn detach(&mut self, which: impl Fn(usize) -> bool) {
        self.pins.retain(|(_, namespace, _)| !which(*namespace));
        for held in self.leases.iter_mut().filter(|held| which(held.namespace)) {
            held.detached |= !held.lease.is_empty();
        }
    }

    pub(crate) fn run(&mut self, op: Op) {
        let (leases, pins) = (self.leases.len(), self.pins.len());
        match op {
            Op::Acquire(namespace, positions) => {
                let lease = self.writer.acquire(&self.namespaces[namespace], &positions);
                let positions = positions[..lease.len()].to_vec();
                self.leases.push(Held { lease, namespace, positions, detached: false });
            }
            Op::Commit(n, tail) if leases > 0 => self.commit(n % leases, &tail),
            Op::Drop(n) if leases > 0 => drop(self.leases.swap_remove(n % leases)),
            Op::Pin(n, positions) => {
                let length = self.reader.query_match_len(&self.namespaces[n], &positions);
                if let Ok(id) = self.writer.pin(&self.namespaces[n], &positions) {
                    self.pins.push((id, n, positions[..length].to_vec()));
                }
            }
            Op::Unpin(n) if pins > 0 => {
                assert!(self.writer.unpin(self.pins.swap_remove(n % pins).0));
            }
            Op::SetQuota(n, quota) => {
                self.own[n] = quota;
                self.writer.set_namespace_quota(&self.namespaces[n], quota).expect("a place");
                assert_eq!(
                    self.writer.namespace_quota(&self.namespaces[n]).unwrap_or(usize::MAX),
                    self.quota(n)
                );
            }
            Op::SetPolicy(policy) => self.writer.set_eviction_order(policy.order()),
            Op::Evict(count) => return self.evict(count),
            Op::EvictNamespace(n) => {
                self.detach(|namespace| namespace == n);
                let out = self.writer.evict_namespace(&self.namespaces[n]);
                return self.take(out);
            }
            Op::EvictPrefix(n, positions) => {
                let out = self.writer.evict_prefix(&self.namespaces[n], &positions);
                return self.take(out);
            }
            Op::Flush => {
                self.detach(|_| true);
                let out = self.writer.flush();
                return self.take(out);
            }
            Op::Commit(..) | Op::Drop(_) | Op::Unpin(_) => {}
        }
        self.check_quotas();
    }

    /// Drops all leases and pins and evicts everything. Every block must come back exactly once.
    pub(crate) fn finish(mut self) {
        self.leases.clear();
        while let Some((id, ..)) = self.pins.pop() {
            assert!(self.writer.unpin(id));
        }
        self.check_quotas();
        self.evict(usize::MAX);
        let free: HashSet<BlockId> = self.free.iter().copied().collect();
        let all = self.next as usize;
        assert_eq!((self.free.len(), free.len()), (all, all), "every block is back, once");
        assert_eq!(self.writer.counts().nodes, 0);
    }
}
