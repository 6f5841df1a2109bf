//! Giving blocks back: the least wanted first, or all.

use super::{Record, TreeWriter};
use crate::BlockId;
use crate::core::Core;
use crate::node::NodeId;
use crate::reclaim::Reclaimer;

impl<R: Reclaimer> TreeWriter<R> {
    /// Takes up to `block_count` blocks out of the index and gives them back: from unlocked
    /// leaves, in the order of the policy, from the tail of a leaf that is longer than needed.
    /// Gives fewer only when everything left is locked.
    pub fn evict(&mut self, block_count: usize) -> Vec<BlockId> {
        self.begin_operation();
        let at_hand = self.freed.len().min(block_count);
        let mut out = self.freed.split_off(self.freed.len() - at_hand);
        while out.len() < block_count {
            let Some(&(rank, id)) = self.order.first() else { break };
            self.policy.evicted(rank);
            let length = self.arena.edge(id).block_count();
            let wanted = block_count - out.len();
            if length <= wanted {
                out.extend(self.arena.edge(id).blocks());
                self.cached -= length;
                self.remove_leaf(id);
            } else {
                let edge = self.arena.edge(id);
                out.extend(edge.blocks().skip(length - wanted));
                let kept = edge.part(0, length - wanted, self.block_size());
                self.cached -= wanted;
                self.arena.replace_run(&[id], kept);
                self.refresh(id);
            }
        }
        out
    }

    /// Empties the index. Blocks that no lease holds are given back at once; those of leases in
    /// use leave the index too and are given back by a later `evict` or `flush`, after the last
    /// lease on them has ended.
    pub fn flush(&mut self) -> Vec<BlockId> {
        self.begin_operation();
        let mut out = std::mem::take(&mut self.freed);
        for id in self.arena.ids().collect::<Vec<_>>() {
            if self.arena.is_root(id) {
                continue;
            }
            let blocks = self.arena.edge(id).blocks();
            let record = &mut self.records[id.index()];
            record.rank = None;
            if record.locks > 0 {
                self.detached += blocks.len();
                record.detached = Some(blocks.collect());
            } else {
                out.extend(blocks);
            }
        }
        self.order.clear();
        (self.cached, self.locked) = (0, 0);
        let records = &self.records;
        let keep = |id: NodeId| records[id.index()].detached.is_some();
        self.arena.clear_below(Core::<R>::BASE, keep);
        self.arena.clear_below(Core::<R>::DIRECTORY, keep);
        out
    }

    /// Takes a leaf out, and what its absence leaves without purpose: an empty namespace, a
    /// border between two nodes.
    fn remove_leaf(&mut self, id: NodeId) {
        let parent = self.arena.parent(id);
        if let Some(rank) = self.records[id.index()].rank.take() {
            self.order.remove(&(rank, id));
        }
        self.arena.remove_leaf(id);
        self.set_record(id, Record::default());
        match (self.arena.is_root(parent), self.arena.child_count(parent)) {
            (true, 0) if parent != Core::<R>::BASE => self.arena.remove_leaf(parent),
            (true, _) => {}
            (false, 0) => self.refresh(parent),
            (false, _) => self.merge_around(parent),
        }
    }
}
