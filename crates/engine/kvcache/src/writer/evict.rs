//! Removal of blocks from the index: to make room, of one namespace, or of everything.

use super::{BlockSource, OrderKey, Record, TreeWriter};
use crate::core::Core;
use crate::eviction;
use crate::node::NodeId;
use crate::node::edge::Edge;
#[cfg(loom)]
use crate::sync::planted;
use crate::{BlockId, CacheEvent, EvictedBlock, EvictedBlocks, EvictedPrefix, Namespace};

/// Number of victims whose memory is loaded before the first of them is evicted.
const PREFETCHED: usize = 16;

/// The blocks of an edge, with their content.
fn content(edge: &Edge, namespace: Namespace) -> impl Iterator<Item = EvictedBlock> + '_ {
    let blocks = edge.blocks().zip(edge.hashes());
    blocks.map(move |(id, &hash)| EvictedBlock { id, namespace, hash })
}

impl TreeWriter {
    /// Removes up to `block_count` blocks from the index and returns them, which the caller
    /// frees with [`BlockPool::release`](crate::BlockPool::release).
    ///
    /// Unlocked leaves are evicted in the order of the eviction policy, those of demotable pins after
    /// all others. A leaf that is longer than needed loses only its last blocks, but a checkpoint is
    /// evicted as a whole. The rest of an atomic token span whose end was evicted earlier is evicted
    /// before anything else. Fewer than `block_count` blocks are returned only if everything that
    /// remains is locked.
    pub fn evict(&mut self, block_count: usize) -> EvictedBlocks {
        self.evict_noting(block_count, None)
    }

    /// As [`evict`](TreeWriter::evict), and appends the evicted part of each leaf to `prefixes`,
    /// with everything before it. The content of the blocks is in the pool until they are reused,
    /// so an engine with a second tier of memory can copy it there. Blocks that a flush had removed
    /// are not among them. Takes time and memory in proportion to the length of the prefixes.
    pub fn evict_prefixes(
        &mut self,
        block_count: usize,
        prefixes: &mut Vec<EvictedPrefix>,
    ) -> EvictedBlocks {
        self.evict_noting(block_count, Some(prefixes))
    }

    fn evict_noting(
        &mut self,
        block_count: usize,
        mut prefixes: Option<&mut Vec<EvictedPrefix>>,
    ) -> EvictedBlocks {
        self.begin_operation();
        let at_hand = self.freed.len().min(block_count);
        let mut out = self.freed.split_off(self.freed.len() - at_hand);
        // In a large tree each victim costs a few cache misses. Those of a batch overlap if the
        // loads are issued together.
        let next = self.order.iter().take(block_count.saturating_sub(out.len()).min(PREFETCHED));
        let loaded = next.fold(0, |sum, &OrderKey { leaf, .. }| {
            sum ^ self.arena.prefetch(leaf) ^ self.records[leaf.index()].created
        });
        std::hint::black_box(loaded);
        while out.len() < block_count {
            let Some(&OrderKey { rank, leaf: id, .. }) = self.order.first() else { break };
            if self.rest_of_span(id) == 0 {
                let panics = &mut self.stats.eviction_order_panics;
                eviction::contain(panics, || self.eviction.evicted(rank));
            }
            let taken = self.victims(id, block_count - out.len());
            if let Some(prefixes) = &mut prefixes
                && self.checkpoint_blocks_of(id) == 0
            {
                prefixes.push(self.evicted_prefix(id, taken));
            }
            self.stats.evicted_for_room += taken as u64;
            self.trim_leaf(id, taken, &mut out);
        }
        // A checkpoint is evicted as a whole. The next eviction returns the remaining blocks.
        self.freed.extend(out.drain(block_count.min(out.len())..));
        self.hand_over(out)
    }

    /// Number of blocks of the checkpoint at the end of a leaf, or 0.
    fn checkpoint_blocks_of(&self, leaf: NodeId) -> usize {
        let edge = self.arena.edge(leaf);
        edge.block_count() - edge.kv_hashes().len()
    }

    /// Number of blocks to evict from the end of an unlocked leaf if `wanted` are needed: all of a
    /// checkpoint, at most the rest of an atomic token span that has lost its end, and else as many
    /// as the leaf has.
    pub(super) fn victims(&self, leaf: NodeId, wanted: usize) -> usize {
        match (self.checkpoint_blocks_of(leaf), self.rest_of_span(leaf)) {
            (0, 0) => self.arena.edge(leaf).block_count().min(wanted),
            (0, rest) => rest.min(wanted),
            (checkpoint, _) => checkpoint,
        }
    }

    /// If a leaf ends inside an atomic token span, returns the number of its blocks from the start
    /// of that span, which are useless without the span's end. Otherwise returns 0.
    pub(super) fn rest_of_span(&self, leaf: NodeId) -> usize {
        self.arena.edge(leaf).block_count() - self.whole_blocks(leaf)
    }

    /// Evicts the last `taken` blocks of an unlocked leaf, at least one and at most all of them,
    /// and appends them to `out`.
    pub(super) fn trim_leaf(&mut self, id: NodeId, taken: usize, out: &mut Vec<EvictedBlock>) {
        let is_pinned = self.records[id.index()].pins > 0;
        if is_pinned {
            self.demote_pins(id);
        }
        let edge = self.arena.edge(id);
        let length = edge.block_count();
        let root = self.records[id.index()].root;
        let namespace = self.arena.namespace_of(root);
        out.extend(content(edge, namespace).skip(length - taken));
        let removed = edge.kv_hashes().get(length - taken..).unwrap_or_default();
        if !removed.is_empty() {
            let hashes = || removed.iter().rev().copied().collect();
            self.events.report(|| CacheEvent::Removed { hashes: hashes() });
        }
        self.cached -= taken;
        self.quotas.remove_blocks(root, taken);
        self.stats.record_lifetime(self.tick - self.records[id.index()].created);
        if taken == length {
            self.remove_leaf(id);
        } else {
            let kept = edge.part(0, length - taken, self.arena.core.block_size);
            self.arena.replace_run(&[id], kept);
            self.show(id);
            self.refresh(id);
            if is_pinned {
                self.merge_around(id);
            }
        }
    }

    /// The blocks no longer belong to the tree.
    fn hand_over(&mut self, blocks: Vec<EvictedBlock>) -> EvictedBlocks {
        self.owned.remove(blocks.iter().map(|block| block.id));
        let pool = match &self.source {
            BlockSource::Pool(pool) => Some(pool.clone()),
            BlockSource::Unknown | BlockSource::Caller => None,
        };
        EvictedBlocks { blocks, pool }
    }

    /// The prefix up to the end of a leaf whose last `taken` blocks are evicted.
    pub(super) fn evicted_prefix(&self, leaf: NodeId, taken: usize) -> EvictedPrefix {
        let mut path = vec![leaf];
        let mut parent = self.arena.parent(leaf);
        while !self.arena.is_root(parent) {
            path.push(parent);
            parent = self.arena.parent(parent);
        }
        let edges = || path.iter().rev().map(|&id| self.arena.edge(id));
        let blocks: Vec<BlockId> = edges().flat_map(Edge::blocks).collect();
        EvictedPrefix {
            namespace: self.arena.namespace_of(self.records[leaf.index()].root),
            positions: edges().flat_map(|edge| edge.positions().iter().copied()).collect(),
            priority: self.records[leaf.index()].priority,
            evicted: blocks.len() - taken,
            blocks,
        }
    }

    /// Removes everything from the index and ends all pins. Returns all blocks that no lease
    /// holds. Blocks that leases hold leave the index as well; a later `evict`, `flush` or
    /// `evict_namespace` returns them, after the last lease on them was dropped.
    pub fn flush(&mut self) -> EvictedBlocks {
        self.begin_operation();
        for pin in self.pins.infos().map(|pin| pin.id).collect::<Vec<_>>() {
            self.end_pin(pin);
        }
        self.release_returned();
        let mut out = std::mem::take(&mut self.freed);
        self.stats.evicted_by_flush += self.cached as u64;
        self.events.report(|| CacheEvent::Cleared);
        let mut roots = self.arena.children(Core::DIRECTORY);
        roots.push(Core::BASE);
        for root in roots {
            self.take_out_below(root, &mut out);
            if root != Core::BASE {
                self.quotas.remove_root(root);
            }
        }
        let detached = &self.detached;
        let keep = |id: NodeId| detached.contains_key(&id);
        self.arena.clear_below(Core::BASE, keep);
        self.arena.clear_below(Core::DIRECTORY, keep);
        self.hand_over(out)
    }

    /// Removes everything in one namespace from the index, as [`flush`](TreeWriter::flush) does for
    /// all namespaces. Useful after an adapter was unloaded or a tenant was deleted. May also
    /// return blocks of other namespaces that were removed earlier and are no longer held.
    pub fn evict_namespace(&mut self, namespace: &Namespace) -> EvictedBlocks {
        self.begin_operation();
        let pins = self.pins.infos().filter(|pin| pin.namespace == *namespace);
        for pin in pins.map(|pin| pin.id).collect::<Vec<_>>() {
            self.end_pin(pin);
        }
        self.release_returned();
        let mut out = std::mem::take(&mut self.freed);
        let Some(root) = self.arena.root(namespace) else {
            return self.hand_over(out);
        };
        let before = self.cached;
        let hashes = self.take_out_below(root, &mut out);
        self.stats.evicted_by_namespace += (before - self.cached) as u64;
        self.events.report(|| CacheEvent::Removed { hashes });
        let detached = &self.detached;
        self.arena.clear_below(root, |id| detached.contains_key(&id));
        if root != Core::BASE {
            self.quotas.remove_root(root);
            self.arena.remove_leaf(root);
        }
        self.hand_over(out)
    }

    /// Removes the cached sequences that start with `positions`, rounded down to whole blocks, and
    /// those blocks of `positions` that no other cached sequence shares. Blocks that leases and
    /// pins hold stay cached. Does nothing if `positions` is not cached up to its last whole block.
    /// May also return blocks that were removed earlier and are no longer held.
    pub fn evict_prefix(&mut self, namespace: &Namespace, positions: &[u32]) -> EvictedBlocks {
        self.begin_operation();
        let mut out = std::mem::take(&mut self.freed);
        let whole = positions.len() / self.block_size() * self.block_size();
        let before = self.cached;
        if self.find(namespace, &positions[..whole]) == whole
            && let Some(&(end, _)) = self.path.last()
        {
            // Find all of them before removing the first, because a removal merges the locked nodes
            // around it. It never merges an unlocked node into a locked one, so the others remain
            // valid.
            for top in self.unlocked_below(end) {
                self.remove_subtree(top, &mut out);
            }
        }
        self.stats.evicted_by_prefix += (before - self.cached) as u64;
        self.hand_over(out)
    }

    /// The nodes at or below `top` that no lease and no pin holds and whose parents are held, or
    /// `top`. Everything below such a node is not held either.
    fn unlocked_below(&self, top: NodeId) -> Vec<NodeId> {
        let (mut found, mut pending) = (Vec::new(), vec![top]);
        while let Some(id) = pending.pop() {
            let held = self.records[id.index()].is_held();
            #[cfg(loom)]
            let held = held && !planted::is(planted::Bug::EvictLockedPrefix);
            if held {
                pending.extend(self.arena.children(id));
            } else {
                found.push(id);
            }
        }
        found
    }

    /// Removes an unlocked node with everything below it, and then the unlocked nodes above it that
    /// have become leaves. Appends their blocks to `out`.
    fn remove_subtree(&mut self, top: NodeId, out: &mut Vec<EvictedBlock>) {
        let root = self.records[top.index()].root;
        let namespace = self.arena.namespace_of(root);
        let mut hashes = self.take_out_below(top, out);
        self.arena.clear_below(top, |_| false);
        let mut id = top;
        loop {
            let parent = self.arena.parent(id);
            let edge = self.arena.edge(id);
            hashes.extend(edge.kv_hashes().iter().rev());
            out.extend(content(edge, namespace));
            self.cached -= edge.block_count();
            self.quotas.remove_blocks(root, edge.block_count());
            self.stats.record_lifetime(self.tick - self.records[id.index()].created);
            let ends = self.arena.is_root(parent)
                || self.arena.child_count(parent) > 1
                || self.records[parent.index()].is_held();
            self.remove_leaf(id);
            if ends {
                break;
            }
            id = parent;
        }
        self.events.report(|| CacheEvent::Removed { hashes });
    }

    /// Removes the records of everything below `top`, before the nodes are removed. Appends blocks
    /// without a lock to `out`; the others become detached. Returns the hashes of all blocks,
    /// descendants first.
    fn take_out_below(&mut self, top: NodeId, out: &mut Vec<EvictedBlock>) -> Vec<u64> {
        let root = if self.arena.is_root(top) { top } else { self.records[top.index()].root };
        let namespace = self.arena.namespace_of(root);
        let mut hashes = Vec::new();
        let mut pending = self.arena.children(top);
        while let Some(id) = pending.pop() {
            pending.extend(self.arena.children(id));
            self.leave_order(id);
            let edge = self.arena.edge(id);
            let record = &self.records[id.index()];
            hashes.extend_from_slice(edge.kv_hashes());
            self.stats.record_lifetime(self.tick - record.created);
            self.cached -= edge.block_count();
            self.quotas.remove_blocks(root, edge.block_count());
            if record.locks > 0 {
                self.locked -= edge.block_count();
                self.detached_blocks += edge.block_count();
                self.detached.insert(id, content(edge, namespace).collect());
            } else {
                out.extend(content(edge, namespace));
            }
        }
        hashes.reverse();
        hashes
    }

    /// Removes a leaf. If its namespace is empty afterward, prunes the namespace; if its parent
    /// has one child left, merges the two if possible.
    fn remove_leaf(&mut self, id: NodeId) {
        let parent = self.arena.parent(id);
        let is_checkpoint = self.arena.edge(id).kv_hashes().is_empty();
        self.leave_order(id);
        self.arena.remove_leaf(id);
        self.set_record(id, Record::default());
        match is_checkpoint {
            true => self.refresh_checkpoints_below(parent),
            false => self.refresh_checkpoint_of(parent),
        }
        match (self.arena.is_root(parent), self.arena.child_count(parent)) {
            (true, 0) if parent != Core::BASE => {
                self.quotas.remove_root(parent);
                self.arena.remove_leaf(parent);
            }
            (true, _) => {}
            (false, 0) => self.refresh(parent),
            (false, _) => self.merge_around(parent),
        }
    }
}
