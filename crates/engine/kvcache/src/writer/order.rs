//! The writer's index of the leaves that can be evicted, in the order of eviction.

use super::{Record, TreeWriter};
use crate::eviction::{self, EvictionCandidate, EvictionOrder, EvictionRank};
use crate::node::NodeId;
#[cfg(loom)]
use crate::sync::planted;
use crate::token_span;

/// A leaf's place in the order of eviction. Pinned leaves come after all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct OrderKey {
    pub(super) is_pinned: bool,
    pub(super) rank: EvictionRank,
    pub(super) leaf: NodeId,
}

impl Record {
    /// The entry of the node in the order of eviction, if it has one.
    pub(super) fn order_key(&self, leaf: NodeId) -> OrderKey {
        OrderKey { is_pinned: self.ranked_as_pinned, rank: self.rank, leaf }
    }
}

impl TreeWriter {
    /// Replaces the order of eviction. The leaves that can be evicted are ranked anew.
    pub fn set_eviction_order(&mut self, order: Box<dyn EvictionOrder>) {
        self.drain();
        self.eviction = order;
        let leaves: Vec<NodeId> = self.order.iter().map(|key| key.leaf).collect();
        leaves.into_iter().for_each(|id| self.refresh(id));
    }

    /// Updates a node's entry in the order of eviction: a leaf without a lock has one.
    pub(super) fn refresh(&mut self, id: NodeId) {
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
        let (saved_blocks, continuations) = (self.saved_blocks(id), self.continuations(id));
        let record = &mut self.records[id.index()];
        // If the end of an atomic token span was evicted, no match can use the rest of it, so it is
        // evicted first. So is KV after the last checkpoint, if there are checkpoints.
        let mut rank = EvictionRank(0, if is_whole { record.last_use } else { 0 });
        if is_whole && saved_blocks > 0 {
            let leaf = EvictionCandidate {
                created: record.created,
                last_use: record.last_use,
                hits: record.hits,
                priority: record.priority,
                block_count,
                start_block: record.start_block as usize,
                saved_blocks,
                continuations,
            };
            let panics = &mut self.stats.eviction_order_panics;
            rank = eviction::contain(panics, || self.eviction.rank(&leaf))
                .unwrap_or(EvictionRank(0, leaf.last_use));
        }
        // A pinned prefix ends between spans.
        (record.ranked, record.rank, record.ranked_as_pinned) = (true, rank, record.pins > 0);
        let key = record.order_key(id);
        self.order.insert(key);
        self.quotas.add_leaf(record.root, key);
    }

    /// Number of blocks that requests do not have to compute because a leaf is cached: its own, or,
    /// if there are checkpoints, those between its checkpoint and the one before it.
    fn saved_blocks(&self, leaf: NodeId) -> usize {
        let edge = self.arena.edge(leaf);
        let own = edge.kv_hashes().len();
        let Some(span) = &self.arena.core.checkpoint else { return own };
        if own == edge.block_count() {
            return 0;
        }
        let mut saved = own;
        let mut above = self.arena.parent(leaf);
        // The parent's checkpoint is this one, unless the leaf has KV before it.
        let mut is_same = own == 0;
        while !self.arena.is_root(above)
            && (is_same || self.arena.checkpoint(above, span).is_none())
        {
            saved += self.arena.edge(above).block_count();
            above = self.arena.parent(above);
            is_same = false;
        }
        saved
    }

    /// Ranks the next checkpoints below a node anew, because the blocks that they save depend on
    /// whether there is one at its end.
    pub(super) fn refresh_checkpoints_below(&mut self, id: NodeId) {
        let core = self.arena.core.clone();
        let Some(span) = &core.checkpoint else { return };
        let mut pending = vec![id];
        while let Some(id) = pending.pop() {
            for child in self.arena.children(id) {
                match self.arena.checkpoint(child, span) {
                    Some(checkpoint) => self.refresh(checkpoint),
                    None if self.arena.child_count(child) == 0 => self.refresh(child),
                    None => pending.push(child),
                }
            }
        }
    }

    /// Ranks the checkpoint directly below a node anew, because the number of its continuations has
    /// changed.
    pub(super) fn refresh_checkpoint_of(&mut self, id: NodeId) {
        let core = self.arena.core.clone();
        let span = core.checkpoint.as_ref().filter(|_| !self.arena.is_root(id));
        let checkpoint = span.and_then(|span| self.arena.checkpoint(id, span));
        checkpoint.into_iter().for_each(|checkpoint| self.refresh(checkpoint));
    }

    /// Number of cached continuations of the prefix before a leaf that is a checkpoint; 0 for others.
    fn continuations(&self, leaf: NodeId) -> usize {
        match self.arena.edge(leaf).kv_hashes() {
            [] => self.arena.child_count(self.arena.parent(leaf)) - 1,
            _ => 0,
        }
    }

    /// If the node ends inside an atomic token span, returns the number of its blocks before that
    /// span. Otherwise returns the number of its blocks.
    pub(super) fn whole_blocks(&self, id: NodeId) -> usize {
        let positions = self.arena.edge(id).positions();
        let block_size = self.block_size();
        token_span::whole_spans(positions, positions.len(), block_size) / block_size
    }

    /// Removes a node's entry from the order of eviction, if it has one.
    pub(super) fn leave_order(&mut self, id: NodeId) {
        let record = &mut self.records[id.index()];
        if std::mem::take(&mut record.ranked) {
            let key = record.order_key(id);
            self.order.remove(&key);
            self.quotas.remove_leaf(record.root, &key);
        }
    }
}
