//! The writer. It alone owns the locks, the recency and the order of eviction, in plain data. It
//! publishes everything that readers see through [`arena`].
//!
//! Life of a block in the tree: added by [`TreeWriter::commit`], locked by leases and pins, and
//! returned exactly once by [`TreeWriter::evict`], [`TreeWriter::flush`],
//! [`TreeWriter::evict_namespace`] or [`TreeWriter::evict_prefix`].

pub(crate) mod arena;
mod audit;
mod checkpoints;
mod commit;
mod counts;
mod evict;
mod locks;
mod order;
mod owned;
mod pins;
mod quota;
mod subscribe;

use crate::core::Core;
use crate::events::EventLog;
use crate::eviction::{EvictionOrder, EvictionRank};
use crate::lease::ReturnQueue;
use crate::node::NodeId;
use crate::pin::Pins;
use crate::pool::PoolQueue;
use crate::sync::Arc;
#[cfg(loom)]
use crate::sync::planted;
use crate::{EvictedBlock, Namespace, PrefixLease, TreeReader, TreeStats, token_span};
use arena::Arena;
pub use counts::TreeCounts;
use order::OrderKey;
use owned::OwnedBlocks;
pub(crate) use quota::Quotas;
use std::collections::{BTreeSet, HashMap};
pub use subscribe::CacheSnapshot;

/// Changes the tree. Each tree has exactly one writer. It can be sent to another thread, and shared
/// behind a mutex.
///
/// Dropping the writer ends all event subscriptions. Its readers continue to answer from the last
/// state.
#[derive(Debug)]
pub struct TreeWriter {
    arena: Arena,
    /// The writer's record of each node, by node number.
    records: Vec<Record>,
    /// All evictable leaves. The first is evicted first.
    order: BTreeSet<OrderKey>,
    eviction: Box<dyn EvictionOrder>,
    returns: Arc<ReturnQueue>,
    /// Number of operations so far; the tree's clock.
    tick: u64,
    /// Number of blocks in the index.
    cached: usize,
    /// Number of blocks of the index in nodes that have a lock.
    locked: usize,
    /// Blocks that were removed from the index while they were locked, by the number of their
    /// former node. The number stays in use until the last lock is released.
    detached: HashMap<NodeId, Vec<EvictedBlock>>,
    /// Number of blocks in `detached`.
    detached_blocks: usize,
    /// Blocks of detached nodes whose last lock was released, and blocks that were evicted for a
    /// quota. The next eviction returns them.
    freed: Vec<EvictedBlock>,
    /// The nodes of the current walk with the number of matched blocks in each. A field only to
    /// reuse its memory.
    path: Vec<(NodeId, usize)>,
    owned: OwnedBlocks,
    source: BlockSource,
    pins: Pins,
    quotas: Quotas,
    events: EventLog,
    stats: TreeStats,
}

/// Where the blocks of the tree come from. A tree has blocks of one source only, so evicted blocks
/// return to the pool that they were reserved from.
#[derive(Debug)]
enum BlockSource {
    /// Nothing was committed yet.
    Unknown,
    /// The caller, who has committed them by their ids.
    Caller,
    /// The pool with this queue.
    Pool(PoolQueue),
}

/// What the writer knows about a node, besides its parent and its children.
#[derive(Clone, Debug, Default)]
struct Record {
    /// Number of leases, and of pins that cannot be demoted, that end in this node or below it.
    locks: u32,
    /// Number of demotable pins that end in this node or below it.
    pins: u32,
    /// Number of acquires whose match went through the node.
    hits: u32,
    /// The priority that was set last.
    priority: i32,
    /// Tick of the commit that created the node; after a merge, of the commit that created its
    /// lowest part.
    created: u64,
    /// Tick of the last acquire or commit that went through the node.
    last_use: u64,
    /// Number of blocks between the root and this node.
    start_block: u32,
    /// The root of the namespace.
    root: NodeId,
    /// Whether the node is evictable, and therefore in the order of eviction under `rank`.
    ranked: bool,
    rank: EvictionRank,
    /// Whether it is in the order of eviction as a pinned leaf.
    ranked_as_pinned: bool,
}

impl Record {
    /// Whether a lease or a pin ends in the node or below it.
    fn is_held(&self) -> bool {
        self.locks > 0 || self.pins > 0
    }
}

impl TreeWriter {
    pub(crate) fn new(
        core: Arc<Core>,
        eviction: Box<dyn EvictionOrder>,
        pins: Pins,
        quotas: Quotas,
        block_count: Option<usize>,
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
            owned: OwnedBlocks::new(block_count),
            source: BlockSource::Unknown,
            pins,
            quotas,
            events: EventLog::default(),
            stats: TreeStats::default(),
        }
    }

    /// Returns a new reader of this tree.
    pub fn reader(&self) -> TreeReader {
        TreeReader { core: self.arena.core.clone() }
    }

    /// Number of positions in a block.
    pub fn block_size(&self) -> usize {
        self.arena.core.block_size
    }

    /// Finds the longest cached prefix of `positions` and locks it: none of its blocks is evicted
    /// while the lease lives. The prefix may be shorter than an earlier query said, or empty.
    /// Counts as a use of all its blocks for the order of eviction.
    pub fn acquire(&mut self, namespace: &Namespace, positions: &[u32]) -> PrefixLease {
        self.acquire_with(namespace, positions, None)
    }

    /// As [`acquire`](TreeWriter::acquire), for a request with a priority. The priority of the
    /// blocks of the prefix, and of those that are committed through the lease, becomes the maximum
    /// of their own and `priority`. So a prefix has the priority of its most important user.
    pub fn acquire_prioritized(
        &mut self,
        namespace: &Namespace,
        positions: &[u32],
        priority: i32,
    ) -> PrefixLease {
        self.acquire_with(namespace, positions, Some(priority))
    }

    /// Locks the longest cached prefix of `positions` only to keep it, as a session or a copy out
    /// of the pool does. Unlike [`acquire`](TreeWriter::acquire), it does not count as a hit,
    /// changes no priority and does not count in the statistics.
    pub fn lock(&mut self, namespace: &Namespace, positions: &[u32]) -> PrefixLease {
        self.begin_operation();
        self.lock_match(namespace, positions, None, 0)
    }

    fn acquire_with(
        &mut self,
        namespace: &Namespace,
        positions: &[u32],
        priority: Option<i32>,
    ) -> PrefixLease {
        self.begin_operation();
        let lease = self.lock_match(namespace, positions, priority, 1);
        self.stats.acquires += 1;
        self.stats.acquires_hit += u64::from(!lease.is_empty());
        self.stats.positions_asked += positions.len() as u64;
        self.stats.positions_hit += lease.len() as u64;
        lease
    }

    /// Locks the longest cached prefix of `positions`, notes the use of its nodes and adds `hits` to
    /// their hits.
    fn lock_match(
        &mut self,
        namespace: &Namespace,
        positions: &[u32],
        priority: Option<i32>,
        hits: u32,
    ) -> PrefixLease {
        let block_size = self.block_size();
        let raw = self.find(namespace, positions);
        let length = token_span::whole_spans(positions, raw, block_size);
        let end = self.end_path_at(length / block_size);
        let mut blocks = Vec::with_capacity(length / block_size);
        for &(id, _) in &self.path {
            let record = &mut self.records[id.index()];
            record.hits = record.hits.saturating_add(hits);
            record.last_use = self.tick;
            record.priority = record.priority.max(priority.unwrap_or(i32::MIN));
            #[cfg(loom)]
            if planted::is(planted::Bug::ReplacePriority) {
                record.priority = priority.unwrap_or(record.priority);
            }
            blocks.extend(self.arena.edge(id).blocks());
        }
        self.lock_up(end, NodeId::NONE);
        let queue = self.returns.clone();
        PrefixLease { namespace: *namespace, blocks, block_size, priority, end, queue }
    }

    /// Returns the counters since the tree was created.
    pub fn stats(&self) -> &TreeStats {
        &self.stats
    }

    /// Estimates the heap memory of the index in bytes: nodes, tables and the writer's records, but
    /// not the KV blocks themselves. Takes time in proportion to the number of nodes.
    pub fn index_bytes(&self) -> usize {
        /// Memory per entry of the B-tree, whose leaves are assumed to be two thirds full.
        const ORDER_ENTRY: usize = size_of::<OrderKey>() * 3 / 2;
        self.arena.heap_bytes()
            + bytes_of::<Record>(self.records.capacity())
            + self.order.len() * ORDER_ENTRY
            + self.quotas.heap_bytes(ORDER_ENTRY)
    }

    /// Number of nodes and tables that were unlinked from the tree and are not freed yet. The
    /// writer frees them in batches of at least 256, each in an operation after the one that filled
    /// it, when no query can reach the batch any longer. So some remain while it is idle. They are
    /// freed with the last handle of the tree at the latest.
    pub fn retired_count(&self) -> usize {
        self.arena.retired_count()
    }

    // ---- shared by the operations ----

    fn begin_operation(&mut self) {
        self.tick += 1;
        self.drain();
    }

    /// Copies a node's counters to where dumps read them.
    fn show(&self, id: NodeId) {
        let record = &self.records[id.index()];
        self.arena.show(id, record.locks, record.hits, record.last_use);
    }

    /// Walks down from the namespace's root and stores the nodes on the way in `path`. Returns the
    /// number of positions matched, which may end inside an atomic token span.
    fn find(&mut self, namespace: &Namespace, positions: &[u32]) -> usize {
        self.path.clear();
        let Some(root) = self.arena.root(namespace) else { return 0 };
        let root_hash = namespace.root_hash(self.arena.core.seed);
        let path = &mut self.path;
        self.arena.walk(root, root_hash, positions, |id, blocks| path.push((id, blocks)))
    }

    /// Shortens `path` to `block_count` blocks. If it then ends inside a node, splits that node.
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

    /// Sets the record of `id`, which may be a new number.
    fn set_record(&mut self, id: NodeId, record: Record) {
        if self.records.len() < self.arena.id_limit() {
            self.records.resize(self.arena.id_limit(), Record::default());
        }
        self.records[id.index()] = record;
    }

    fn new_record(&self, start_block: usize, root: NodeId) -> Record {
        let start_block = start_block as u32;
        Record { created: self.tick, last_use: self.tick, start_block, root, ..Record::default() }
    }

    /// Splits a node; see [`Arena::split`]. Both parts keep its locks, pins, uses and priority.
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
        let (start_block, root) = (record.start_block as usize + at, record.root);
        self.set_record(front, record);
        if let Some(sibling) = sibling {
            let record = self.new_record(start_block, root);
            self.set_record(sibling, record);
            self.show(sibling);
        }
        self.show(front);
        self.show(id);
        (front, sibling)
    }
}

/// The memory of a vector or a map with room for `count` values, in bytes.
fn bytes_of<T>(count: usize) -> usize {
    count * size_of::<T>()
}
