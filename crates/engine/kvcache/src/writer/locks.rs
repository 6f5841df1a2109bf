//! Locks along paths, and merging of chains that no branch and no lease separates any longer.

use super::TreeWriter;
use crate::node::NodeId;
use crate::node::edge::Edge;

impl TreeWriter {
    /// Handles the changes by other threads since the last operation: releases the locks of dropped
    /// leases, evicts what then exceeds the quotas of namespaces, and frees nodes that readers no
    /// longer hold.
    pub(super) fn drain(&mut self) {
        self.arena.collect_garbage();
        self.release_returned();
        self.enforce_quotas();
    }

    /// Releases the locks of dropped leases.
    pub(super) fn release_returned(&mut self) {
        for end in self.returns.take() {
            self.unlock_up(end);
        }
    }

    /// Adds a lock to the nodes from `from` up to `until`, without `until` itself.
    pub(super) fn lock_up(&mut self, from: NodeId, until: NodeId) {
        let mut id = from;
        while !id.is_none() && id != until && !self.arena.is_root(id) {
            self.records[id.index()].locks += 1;
            if self.records[id.index()].locks == 1 && self.arena.is_live(id) {
                self.locked += self.arena.edge(id).block_count();
                self.refresh(id);
            }
            if self.arena.is_live(id) {
                self.show(id);
            }
            id = self.arena.parent(id);
        }
    }

    /// Removes the lock of one lease that ends at `end` from its whole path.
    pub(super) fn unlock_up(&mut self, end: NodeId) {
        let mut id = end;
        while !id.is_none() && !self.arena.is_root(id) {
            let parent = self.arena.parent(id);
            let record = &mut self.records[id.index()];
            debug_assert!(record.locks > 0, "a lease holds a lock on its whole path");
            record.locks -= 1;
            if record.locks == 0 {
                match self.detached.remove(&id) {
                    Some(blocks) => {
                        self.detached_blocks -= blocks.len();
                        self.freed.extend(blocks);
                        self.arena.release_id(id);
                    }
                    None => {
                        self.locked -= self.arena.edge(id).block_count();
                        self.refresh(id);
                    }
                }
            }
            if self.arena.is_live(id) {
                self.show(id);
            }
            id = parent;
        }
        self.merge_around(end);
    }

    /// Whether `child` is the only child of `parent` and every lease and pin on `parent` continues
    /// through `child`. Then the two can be merged into one node.
    fn mergeable(&self, parent: NodeId, child: NodeId) -> bool {
        !self.arena.is_root(parent)
            && self.arena.child_count(parent) == 1
            && self.records[parent.index()].locks == self.records[child.index()].locks
            && self.records[parent.index()].pins == self.records[child.index()].pins
    }

    /// Merges the longest chain around `id` that has no branch and in which no lease ends before
    /// the last node.
    pub(super) fn merge_around(&mut self, id: NodeId) {
        if id.is_none() || !self.arena.is_live(id) || self.arena.is_root(id) {
            return;
        }
        let mut top = id;
        while self.mergeable(self.arena.parent(top), top) {
            top = self.arena.parent(top);
        }
        let mut run = vec![top];
        let mut bottom = top;
        while let Some(child) = self.arena.only_child(bottom).filter(|&c| self.mergeable(bottom, c))
        {
            run.push(child);
            bottom = child;
        }
        if run.len() > 1 {
            let edge = Edge::concat(run.iter().map(|&id| self.arena.edge(id)));
            self.replace_run(&run, edge);
            self.refresh(bottom);
        }
    }

    /// Replaces a chain by one node with `edge`. Its record gets the largest number of hits, the
    /// highest priority and the latest use of the chain; if a checkpoint is at its end, the hits of
    /// the checkpoint instead.
    pub(super) fn replace_run(&mut self, run: &[NodeId], edge: Edge) {
        let (Some(&top), Some(&bottom)) = (run.first(), run.last()) else { return };
        let mut merged = self.records[bottom.index()].clone();
        merged.start_block = self.records[top.index()].start_block;
        let ends_with_checkpoint = edge.kv_hashes().len() < edge.block_count();
        for id in run {
            let record = &self.records[id.index()];
            debug_assert!(!record.ranked || *id == bottom, "only leaves are ranked");
            if !ends_with_checkpoint {
                merged.hits = merged.hits.max(record.hits);
            }
            merged.priority = merged.priority.max(record.priority);
            merged.last_use = merged.last_use.max(record.last_use);
        }
        self.arena.replace_run(run, edge);
        self.set_record(bottom, merged);
        self.show(bottom);
    }
}
