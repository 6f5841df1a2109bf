//! The writer: the one owner of locks, recency and the order of eviction. Plain data, plain
//! functions; all that readers see goes through [`arena`].
//!
//! Life of a block in the tree: committed by [`TreeWriter::commit`], locked by leases, given back
//! by [`TreeWriter::evict`] or [`TreeWriter::flush`] (exactly once).

pub(crate) mod arena;
mod audit;
mod commit;
mod evict;
mod locks;
mod pins;
mod subscribe;

use crate::core::Core;
use crate::events::EventLog;
use crate::eviction::{EvictionCandidate, EvictionOrder, EvictionRank};
use crate::lease::ReturnQueue;
use crate::node::NodeId;
use crate::pin::Pins;
use crate::sync::Arc;
#[cfg(loom)]
use crate::sync::planted;
use crate::{BlockId, Namespace, PrefixLease, TreeReader, TreeStats, token_span};
use arena::Arena;
use std::collections::{BTreeSet, HashMap};
pub use subscribe::CacheSnapshot;

/// Changes the tree. There is one a tree: it is neither cloned nor shared.
#[derive(Debug)]
pub struct TreeWriter {
    arena: Arena,
    /// The writer's own records, by node number.
    records: Vec<Record>,
    /// Every evictable leaf, the first to go first.
    order: BTreeSet<(EvictionRank, NodeId)>,
    eviction: Box<dyn EvictionOrder>,
    returns: Arc<ReturnQueue>,
    /// Counts operations: the only clock there is.
    tick: u64,
    /// Blocks in the index.
    cached: usize,
    /// Of these, blocks in nodes with a lock.
    locked: usize,
    /// Blocks that a flush took out of the index while they were locked, by the number that their
    /// node had: it stays taken until the last lock is gone.
    detached: HashMap<NodeId, Vec<BlockId>>,
    /// How many blocks these are.
    detached_blocks: usize,
    /// Blocks of detached nodes whose last lock is gone, to be given back.
    freed: Vec<BlockId>,
    /// The nodes of the walk at hand, kept for its memory.
    path: Vec<(NodeId, usize)>,
    pins: Pins,
    events: EventLog,
    stats: TreeStats,
}

/// What the writer knows about a node.
#[derive(Clone, Debug, Default)]
struct Record {
    /// Leases that end here or below.
    locks: u32,
    hits: u32,
    priority: i32,
    created: u64,
    last_use: u64,
    /// Blocks on the way from the root to this node.
    start_block: u32,
    /// Whether the node is evictable, and so in the order of eviction under `rank`.
    ranked: bool,
    rank: EvictionRank,
}

/// How many blocks are in which state, in the tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TreeCounts {
    /// Blocks in the index.
    pub cached: usize,
    /// Of these, blocks that an eviction could take now or after other blocks.
    pub evictable: usize,
    /// Of these, blocks that leases and pins hold.
    pub locked: usize,
    /// Blocks that pins hold; those of several pins count for each.
    pub pinned: usize,
    /// Blocks out of the index since a flush, still held by leases or about to be given back.
    pub detached: usize,
    /// Nodes with an edge, namespace roots not counted.
    pub nodes: usize,
    /// Namespaces that hold something, the base not counted.
    pub namespaces: usize,
}

impl TreeWriter {
    pub(crate) fn new(
        core: Arc<Core>,
        eviction: Box<dyn EvictionOrder>,
        pin_budget: usize,
    ) -> TreeWriter {
        TreeWriter {
            arena: Arena::new(core),
            records: vec![Record::default(); 2],
            order: BTreeSet::new(),
            eviction,
            returns: Arc::new(ReturnQueue::new()),
            tick: 0,
            cached: 0,
            locked: 0,
            detached: HashMap::new(),
            detached_blocks: 0,
            freed: Vec::new(),
            path: Vec::new(),
            pins: Pins::new(pin_budget),
            events: EventLog::default(),
            stats: TreeStats::default(),
        }
    }

    /// A reader of this tree.
    pub fn reader(&self) -> TreeReader {
        TreeReader { core: self.arena.core.clone() }
    }

    /// Positions in a block.
    pub fn block_size(&self) -> usize {
        self.arena.core.block_size
    }

    /// Finds the longest cached prefix of `positions` and locks it: none of its blocks is given
    /// back while the lease lives. A short or empty match is a fact, not an error. Counts as a
    /// use of everything on the way.
    pub fn acquire(&mut self, namespace: &Namespace, positions: &[u32]) -> PrefixLease {
        self.begin_operation();
        let block_size = self.block_size();
        let raw = self.find(namespace, positions);
        let length = token_span::whole_spans(positions, raw, block_size);
        let end = self.end_path_at(length / block_size);
        let mut blocks = Vec::with_capacity(length / block_size);
        for &(id, _) in &self.path {
            let record = &mut self.records[id.index()];
            record.hits = record.hits.saturating_add(1);
            record.last_use = self.tick;
            blocks.extend(self.arena.edge(id).blocks());
        }
        self.stats.acquires += 1;
        self.stats.acquires_hit += u64::from(length > 0);
        self.stats.positions_asked += positions.len() as u64;
        self.stats.positions_hit += length as u64;
        self.lock_up(end, NodeId::NONE);
        let queue = self.returns.clone();
        PrefixLease { namespace: namespace.clone(), blocks, block_size, end, queue }
    }

    /// The numbers of blocks by state, after taking back dropped leases.
    pub fn counts(&mut self) -> TreeCounts {
        self.drain();
        let roots = self.arena.child_count(Core::DIRECTORY);
        TreeCounts {
            cached: self.cached,
            evictable: self.cached - self.locked,
            locked: self.locked,
            pinned: self.pins.blocks,
            detached: self.detached_blocks + self.freed.len(),
            nodes: self.arena.node_count() - roots,
            namespaces: roots,
        }
    }

    /// What was counted since the tree was made.
    pub fn stats(&self) -> &TreeStats {
        &self.stats
    }

    /// Bytes on the heap that the index takes: nodes, tables and the writer's records.
    pub fn index_bytes(&self) -> usize {
        /// A B-tree keeps its leaves two thirds full or better; this is the share of one entry.
        const ORDER_ENTRY: usize = size_of::<(EvictionRank, NodeId)>() * 3 / 2;
        self.arena.heap_bytes()
            + self.records.capacity() * size_of::<Record>()
            + self.order.len() * ORDER_ENTRY
    }

    // ---- shared by the operations ----

    fn begin_operation(&mut self) {
        self.tick += 1;
        self.drain();
    }

    /// Shows a node's record to dumps.
    fn show(&self, id: NodeId) {
        let record = &self.records[id.index()];
        self.arena.show(id, record.locks, record.hits, record.last_use);
    }

    /// Walks down from the namespace's root and leaves the nodes met in `path`. Returns the
    /// positions matched, atoms not considered.
    fn find(&mut self, namespace: &Namespace, positions: &[u32]) -> usize {
        self.path.clear();
        let Some(root) = self.arena.root(namespace) else { return 0 };
        let root_hash = namespace.root_hash(self.arena.core.seed);
        let path = &mut self.path;
        self.arena.walk(root, root_hash, positions, |id, blocks| path.push((id, blocks)))
    }

    /// Shortens `path` to `block_count` blocks, splitting a node if it has to end inside one.
    /// Returns the last node of the path.
    fn end_path_at(&mut self, block_count: usize) -> NodeId {
        while let Some(&(id, _)) = self.path.last() {
            let start = self.records[id.index()].start_block as usize;
            if start < block_count {
                let blocks = block_count - start;
                if blocks == self.arena.edge(id).block_count() {
                    return id;
                }
                let (front, _) = self.split(id, blocks, None);
                self.path.pop();
                self.path.push((front, blocks));
                return front;
            }
            self.path.pop();
        }
        NodeId::NONE
    }

    /// The record of `id`, which may be new.
    fn set_record(&mut self, id: NodeId, record: Record) {
        if self.records.len() < self.arena.id_limit() {
            self.records.resize(self.arena.id_limit(), Record::default());
        }
        self.records[id.index()] = record;
    }

    fn new_record(&self, start_block: usize) -> Record {
        let start_block = start_block as u32;
        Record { created: self.tick, last_use: self.tick, start_block, ..Record::default() }
    }

    /// Brings a node's place in the order of eviction up to date.
    fn refresh(&mut self, id: NodeId) {
        let evictable = self.arena.is_live(id)
            && !self.arena.is_root(id)
            && self.arena.child_count(id) == 0
            && self.records[id.index()].locks == 0;
        #[cfg(loom)]
        let evictable = evictable
            || planted::is(planted::Bug::EvictLocked)
                && self.arena.is_live(id)
                && !self.arena.is_root(id)
                && self.arena.child_count(id) == 0;
        self.leave_order(id);
        if !evictable {
            return;
        }
        let block_count = self.arena.edge(id).block_count();
        let is_whole = self.whole_blocks(id) == block_count;
        let record = &mut self.records[id.index()];
        let rank = match is_whole {
            true => self.eviction.rank(&EvictionCandidate {
                created: record.created,
                last_use: record.last_use,
                hits: record.hits,
                priority: record.priority,
                block_count,
                start_block: record.start_block as usize,
            }),
            // The rest of an atom that an eviction has cut: no match can end in it any more.
            false => EvictionRank::default(),
        };
        (record.ranked, record.rank) = (true, rank);
        self.order.insert((rank, id));
    }

    /// How many of a node's blocks come before the atom that its end cuts; all, if it cuts none.
    fn whole_blocks(&self, id: NodeId) -> usize {
        let positions = self.arena.edge(id).positions();
        let block_size = self.block_size();
        token_span::whole_spans(positions, positions.len(), block_size) / block_size
    }

    /// Takes a node out of the order of eviction, if it is in it.
    fn leave_order(&mut self, id: NodeId) {
        let record = &mut self.records[id.index()];
        if std::mem::take(&mut record.ranked) {
            self.order.remove(&(record.rank, id));
        }
    }

    /// Cuts a node in two; see [`Arena::split`]. Locks, uses and priority hold for both parts.
    fn split(
        &mut self,
        id: NodeId,
        at: usize,
        sibling: Option<crate::node::edge::Edge>,
    ) -> (NodeId, Option<NodeId>) {
        let (front, sibling) = self.arena.split(id, at, sibling);
        let mut record = self.records[id.index()].clone();
        self.records[id.index()].start_block += at as u32;
        record.ranked = false;
        let start_block = record.start_block as usize + at;
        self.set_record(front, record);
        if let Some(sibling) = sibling {
            let record = self.new_record(start_block);
            self.set_record(sibling, record);
            self.show(sibling);
        }
        self.show(front);
        self.show(id);
        (front, sibling)
    }
}
