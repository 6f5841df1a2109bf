//! Giving blocks back: the least wanted first, a namespace, or all.

use super::{Record, TreeWriter};
use crate::core::Core;
use crate::node::NodeId;
use crate::{BlockId, CacheEvent, Namespace};

/// How many victims are looked at ahead of their eviction.
const WARM: usize = 16;

impl TreeWriter {
    /// Takes up to `block_count` blocks out of the index and gives them back: from unlocked
    /// leaves, in the order of the policy, from the tail of a leaf that is longer than needed.
    /// What was left of an atom that is no longer whole goes before all else. Gives fewer only when
    /// everything left is locked.
    #[must_use = "dropped block ids are never freed"]
    pub fn evict(&mut self, block_count: usize) -> Vec<BlockId> {
        self.begin_operation();
        let at_hand = self.freed.len().min(block_count);
        let mut out = self.freed.split_off(self.freed.len() - at_hand);
        // In a large tree each victim costs a few cache misses; take those of a batch together.
        let next = self.order.iter().take(block_count.saturating_sub(out.len()).min(WARM));
        let warm = next
            .fold(0, |sum, &(_, id)| sum ^ self.arena.warm(id) ^ self.records[id.index()].created);
        std::hint::black_box(warm);
        while out.len() < block_count {
            let Some(&(rank, id)) = self.order.first() else { break };
            let edge = self.arena.edge(id);
            let length = edge.block_count();
            let most = match length - self.whole_blocks(id) {
                0 => {
                    self.eviction.evicted(rank);
                    length
                }
                rest_of_atom => rest_of_atom,
            };
            let taken = most.min(block_count - out.len());
            out.extend(edge.blocks().skip(length - taken));
            let hashes = || edge.hashes()[length - taken..].iter().rev().copied().collect();
            self.events.report(|| CacheEvent::Removed { hashes: hashes() });
            self.cached -= taken;
            self.stats.evicted_for_room += taken as u64;
            self.stats.lived(self.tick - self.records[id.index()].created);
            if taken == length {
                self.remove_leaf(id);
            } else {
                let kept = edge.part(0, length - taken, self.arena.core.block_size);
                self.arena.replace_run(&[id], kept);
                self.show(id);
                self.refresh(id);
            }
        }
        out
    }

    /// Empties the index and ends all pins. Blocks that no lease holds are given back at once;
    /// those of leases in use leave the index too and are given back by a later `evict` or
    /// `flush`, after the last lease on them has ended.
    #[must_use = "dropped block ids are never freed"]
    pub fn flush(&mut self) -> Vec<BlockId> {
        self.begin_operation();
        for pin in self.pins.infos().map(|pin| pin.id).collect::<Vec<_>>() {
            self.end_pin(pin);
        }
        let mut out = std::mem::take(&mut self.freed);
        self.stats.evicted_by_flush += self.cached as u64;
        self.events.report(|| CacheEvent::Cleared);
        let mut roots = self.arena.children(Core::DIRECTORY);
        roots.push(Core::BASE);
        for root in roots {
            self.take_out_below(root, &mut out);
        }
        let detached = &self.detached;
        let keep = |id: NodeId| detached.contains_key(&id);
        self.arena.clear_below(Core::BASE, keep);
        self.arena.clear_below(Core::DIRECTORY, keep);
        out
    }

    /// Takes everything of one namespace out of the index, as [`flush`](TreeWriter::flush) does
    /// for all: after an adapter was unloaded, or a tenant has left.
    #[must_use = "dropped block ids are never freed"]
    pub fn evict_namespace(&mut self, namespace: &Namespace) -> Vec<BlockId> {
        self.begin_operation();
        let pins = self.pins.infos().filter(|pin| pin.namespace == *namespace);
        for pin in pins.map(|pin| pin.id).collect::<Vec<_>>() {
            self.end_pin(pin);
        }
        let mut out = std::mem::take(&mut self.freed);
        let Some(root) = self.arena.root(namespace) else { return out };
        let before = self.cached;
        let hashes = self.take_out_below(root, &mut out);
        self.stats.evicted_by_namespace += (before - self.cached) as u64;
        self.events.report(|| CacheEvent::Removed { hashes });
        let detached = &self.detached;
        self.arena.clear_below(root, |id| detached.contains_key(&id));
        if root != Core::BASE {
            self.arena.remove_leaf(root);
        }
        out
    }

    /// Moves the records of everything below `root` out of the index, ahead of the nodes: `out`
    /// gets the blocks that nobody holds, the others become detached. Returns the blocks' hashes,
    /// descendants first.
    fn take_out_below(&mut self, root: NodeId, out: &mut Vec<BlockId>) -> Vec<u64> {
        let mut hashes = Vec::new();
        let mut pending = self.arena.children(root);
        while let Some(id) = pending.pop() {
            pending.extend(self.arena.children(id));
            let edge = self.arena.edge(id);
            let record = &mut self.records[id.index()];
            hashes.extend_from_slice(edge.hashes());
            self.stats.lived(self.tick - record.created);
            self.cached -= edge.block_count();
            if std::mem::take(&mut record.ranked) {
                self.order.remove(&(record.rank, id));
            }
            if record.locks > 0 {
                self.locked -= edge.block_count();
                self.detached_blocks += edge.block_count();
                self.detached.insert(id, edge.blocks().collect());
            } else {
                out.extend(edge.blocks());
            }
        }
        hashes.reverse();
        hashes
    }

    /// Takes a leaf out, and what its absence leaves without purpose: an empty namespace, a
    /// border between two nodes.
    fn remove_leaf(&mut self, id: NodeId) {
        let parent = self.arena.parent(id);
        self.leave_order(id);
        self.arena.remove_leaf(id);
        self.set_record(id, Record::default());
        match (self.arena.is_root(parent), self.arena.child_count(parent)) {
            (true, 0) if parent != Core::BASE => self.arena.remove_leaf(parent),
            (true, _) => {}
            (false, 0) => self.refresh(parent),
            (false, _) => self.merge_around(parent),
        }
    }
}
