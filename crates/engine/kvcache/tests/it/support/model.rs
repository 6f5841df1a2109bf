//! The tree next to a simple and slow reference model: a map from every cached prefix to its block.
//! Each operation runs on both and panics if they differ afterward.

use std::collections::{HashMap, HashSet};
use stolon_kvcache::{
    BlockId, CacheEvent, EventReceiver, EvictedBlock, EvictedPrefix, EvictionPolicy, Namespace,
    PinId, PrefixLease, TreeBuilder, TreeReader, TreeWriter,
};

/// Identifies a cached block: the number of its namespace, and all positions up to its end.
type Prefix = (usize, Vec<u32>);

struct Held {
    lease: PrefixLease,
    namespace: usize,
    /// The positions that the lease covers.
    positions: Vec<u32>,
    /// Whether its prefix was removed from the index.
    detached: bool,
}

pub(crate) struct Model {
    block_size: usize,
    namespaces: [Namespace; 3],
    cached: HashMap<Prefix, BlockId>,
    /// What each block that was committed last holds.
    content: HashMap<BlockId, Prefix>,
    leases: Vec<Held>,
    /// Pins and the prefixes that they hold.
    pins: Vec<(PinId, Prefix)>,
    events: EventReceiver,
    /// The hashes of the cached blocks, according to the events.
    copy: HashSet<u64>,
    free: Vec<BlockId>,
    next: u32,
    writer: TreeWriter,
    reader: TreeReader,
}

/// An operation on the tree and the model. Namespaces, leases and pins are chosen by their index in
/// the model's lists, positions by bytes; all of them wrap around.
#[derive(Clone, Debug)]
#[cfg_attr(fuzzing, derive(arbitrary::Arbitrary))]
pub(crate) enum Op {
    Query(u8, Vec<u8>),
    Acquire(u8, Vec<u8>),
    Commit(u8, Vec<u8>),
    Drop(u8),
    Evict(u8),
    Pin(u8, Vec<u8>),
    Unpin(u8),
    EvictNamespace(u8),
    EvictPrefix(u8, Vec<u8>),
    Flush,
}

/// Returns positions with few different values, so that prompts share prefixes and diverge
/// anywhere.
fn positions(bytes: &[u8]) -> Vec<u32> {
    bytes.iter().map(|&byte| u32::from(byte % 3)).collect()
}

impl Model {
    /// Creates an empty tree and an empty model.
    pub(crate) fn new(block_size: usize, policy: EvictionPolicy) -> Model {
        let (mut writer, reader) = TreeBuilder::new(block_size)
            .eviction_policy(policy)
            .block_count(1 << 20)
            .build()
            .expect("valid block size");
        let events = writer.subscribe(100).expect("a capacity");
        // With a fixed key, so that a failure can be reproduced in another process.
        let salted = |salt: &str| Namespace::builder().key([0; 32]).salt(salt).build();
        Model {
            block_size,
            namespaces: [Namespace::default(), salted("a"), salted("b")],
            cached: HashMap::new(),
            content: HashMap::new(),
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

    fn query(&self, namespace: usize, positions: &[u32]) {
        let before = self.reader.tree_version();
        let got = self.reader.query_match_len(&self.namespaces[namespace], positions);
        assert_eq!(got, self.match_len(namespace, positions));
        assert_eq!(before, self.reader.tree_version());
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
        let commit =
            self.writer.commit(&mut held.lease, &positions, &offered).expect("a valid commit");
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
            self.content.insert(canonical, (held.namespace, positions[..end].to_vec()));
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

    /// Number of blocks that left the index while they were locked and that no lease holds any
    /// longer.
    fn freed(&mut self) -> usize {
        let mut held: HashSet<BlockId> = HashSet::new();
        for lease in self.leases.iter().filter(|held| held.detached) {
            held.extend(lease.lease.blocks());
        }
        self.writer.counts().detached - held.len()
    }

    /// Checks that each block leaves with the content that was committed, and returns the ids.
    fn ids(&self, out: &[EvictedBlock]) -> Vec<BlockId> {
        for block in out {
            let (namespace, positions) = &self.content[&block.id];
            let namespace = self.namespaces[*namespace];
            let hash = *self.reader.block_hashes(&namespace, positions).last().expect("a block");
            assert_eq!((block.namespace, block.hash), (namespace, hash));
        }
        out.iter().map(|block| block.id).collect()
    }

    fn evict(&mut self, count: usize) {
        let locked = self.locked();
        let evictable = self.cached.len() - locked.len();
        let freed = self.freed();
        let mut prefixes = Vec::new();
        let out = self.writer.evict_prefixes(count, &mut prefixes);
        assert_eq!(out.len(), count.min(evictable + freed), "exactly as many as asked, if any");
        self.check_evicted(&out[freed.min(count)..], &prefixes);
        let out: HashSet<BlockId> = self.ids(&out).into_iter().collect();
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

    /// Checks that the prefixes end with the evicted blocks, and that each of their blocks has the
    /// content that was committed.
    fn check_evicted(&self, out: &[EvictedBlock], prefixes: &[EvictedPrefix]) {
        let mut evicted: Vec<BlockId> = out.iter().map(|block| block.id).collect();
        let mut reported: Vec<BlockId> =
            prefixes.iter().flat_map(|prefix| prefix.blocks[prefix.evicted..].to_vec()).collect();
        evicted.sort();
        reported.sort();
        assert_eq!(reported, evicted, "each evicted block ends one prefix");
        for prefix in prefixes {
            assert_eq!(prefix.positions.len(), prefix.blocks.len() * self.block_size);
            for (block, end) in prefix.blocks.iter().zip(1..) {
                let (namespace, positions) = &self.content[block];
                assert_eq!(self.namespaces[*namespace], prefix.namespace);
                assert_eq!(positions[..], prefix.positions[..end * self.block_size]);
            }
        }
    }

    fn pin(&mut self, namespace: usize, positions: &[u32]) {
        let expected = self.match_len(namespace, positions);
        match self.writer.pin(&self.namespaces[namespace], positions) {
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
        self.free.extend(self.ids(&out));
        self.cached.retain(|(n, _), _| *n != namespace);
        for held in self.leases.iter_mut().filter(|held| held.namespace == namespace) {
            held.detached |= !held.lease.is_empty();
        }
    }

    fn evict_prefix(&mut self, namespace: usize, positions: &[u32]) {
        let (locked, freed) = (self.locked(), self.freed());
        let whole = positions.len() / self.block_size * self.block_size;
        let before = self.cached.len();
        let start = &positions[..whole];
        let extends =
            |prefix: &Prefix, start: &[u32]| prefix.0 == namespace && prefix.1.starts_with(start);
        if self.cached.contains_key(&(namespace, start.to_vec())) {
            self.cached.retain(|prefix, _| locked.contains(prefix) || !extends(prefix, start));
            // From the last block of the prefix to the first: those that nothing extends any
            // longer.
            for end in (self.block_size..whole).step_by(self.block_size).rev() {
                let prefix = (namespace, start[..end].to_vec());
                let users = self.cached.keys().filter(|other| extends(other, &prefix.1)).count();
                if users == 1 && !locked.contains(&prefix) {
                    self.cached.remove(&prefix);
                }
            }
        }
        let out = self.writer.evict_prefix(&self.namespaces[namespace], positions);
        assert_eq!(out.len(), before - self.cached.len() + freed);
        self.free.extend(self.ids(&out));
    }

    fn flush(&mut self) {
        self.pins.clear();
        let locked = self.locked();
        let freed = self.freed();
        let out = self.writer.flush();
        assert_eq!(out.len(), self.cached.len() - locked.len() + freed);
        self.free.extend(self.ids(&out));
        self.cached.clear();
        for held in &mut self.leases {
            held.detached |= !held.lease.is_empty();
        }
    }

    fn check(&mut self) {
        self.writer.audit().expect("consistent");
        for numbered in self.events.drain() {
            match numbered.event {
                CacheEvent::Stored { hashes, .. } => self.copy.extend(hashes),
                CacheEvent::Removed { hashes } => self.copy.retain(|hash| !hashes.contains(hash)),
                CacheEvent::Cleared => self.copy.clear(),
                CacheEvent::Reset { .. } => {
                    unreachable!("the queue is drained after each operation")
                }
            }
        }
        let hashes = self.cached.keys().map(|(namespace, positions)| {
            let hashes = self.reader.block_hashes(&self.namespaces[*namespace], positions);
            *hashes.last().expect("at least one block")
        });
        assert_eq!(hashes.collect::<HashSet<_>>(), self.copy, "the events report what is cached");
        let locked = self.locked().len();
        let counts = self.writer.counts();
        assert_eq!(counts.cached, self.cached.len());
        assert_eq!(counts.locked, locked);
        assert_eq!(counts.evictable, self.cached.len() - locked);
        let used: HashSet<usize> = self.cached.keys().map(|(n, _)| *n).filter(|n| *n > 0).collect();
        assert_eq!(counts.namespaces, used.len(), "empty namespaces are pruned, others stay");
    }

    /// Runs `op` on both. An operation on a lease or a pin does nothing if there is none.
    pub(crate) fn run(&mut self, op: Op) {
        let wrap = |n: u8, count: usize| usize::from(n).checked_rem(count);
        let (leases, pins) = (self.leases.len(), self.pins.len());
        let namespace = |n: u8| usize::from(n % 3);
        match op {
            Op::Query(n, bytes) => self.query(namespace(n), &positions(&bytes)),
            Op::Acquire(n, bytes) => self.acquire(namespace(n), &positions(&bytes)),
            Op::Commit(n, bytes) => {
                wrap(n, leases).into_iter().for_each(|n| self.commit(n, &positions(&bytes)));
            }
            Op::Drop(n) => wrap(n, leases).into_iter().for_each(|n| self.drop_lease(n)),
            Op::Evict(count) => self.evict(count.into()),
            Op::Pin(n, bytes) => self.pin(namespace(n), &positions(&bytes)),
            Op::Unpin(n) => wrap(n, pins).into_iter().for_each(|n| self.unpin(n)),
            Op::EvictNamespace(n) => self.evict_namespace(namespace(n)),
            Op::EvictPrefix(n, bytes) => self.evict_prefix(namespace(n), &positions(&bytes)),
            Op::Flush => self.flush(),
        }
        self.check();
    }

    /// Drops all leases and pins and evicts everything. Every block must come back exactly once.
    pub(crate) fn finish(mut self) {
        self.leases.clear();
        while !self.pins.is_empty() {
            self.unpin(0);
        }
        let all = self.next as usize;
        self.evict(usize::MAX);
        self.check();
        let free: HashSet<BlockId> = self.free.iter().copied().collect();
        assert_eq!((self.free.len(), free.len()), (all, all), "every block is back, once");
        assert_eq!(self.writer.counts().nodes, 0);
    }
}
