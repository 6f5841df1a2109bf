//! Adding blocks to the index.

use super::{Record, TreeWriter};
use crate::node::NodeId;
use crate::node::edge::Edge;
use crate::sync::Arc;
use crate::{BlockId, BlockLease, CacheEvent, Commit, PrefixLease, hash, token_span};

impl TreeWriter {
    /// Publishes blocks whose KV has been written, by id, and extends `lease` by them.
    ///
    /// Use [`commit_from`](TreeWriter::commit_from) instead unless the blocks are not in a
    /// [`BlockLease`], or the lease is on another thread. The caller of this form is responsible
    /// for every offered block:
    ///
    /// - the first `commit.blocks.len()` of `blocks` now belong to the tree, except those in
    ///   `commit.duplicates`, which the caller must free;
    /// - the remaining ones still belong to the caller.
    ///
    /// With a `BlockLease`, call this method with ids from [`BlockLease::blocks`] first, then
    /// [`BlockLease::commit_front`] with `commit.blocks.len()`, and then
    /// [`BlockPool::release`](crate::BlockPool::release) with the duplicates. In the opposite
    /// order, blocks that the tree does not take would be lost.
    ///
    /// `positions` is the sequence from its start up to the last position whose KV has been
    /// written; a partial block at its end is ignored. `blocks` are the blocks of the part after
    /// `lease.len()`.
    #[must_use = "dropped block ids are never freed"]
    pub fn commit(
        &mut self,
        lease: &mut PrefixLease,
        positions: &[u32],
        blocks: &[BlockId],
    ) -> Commit {
        self.begin_operation();
        let block_size = self.block_size();
        let have = lease.blocks.len();
        let offered = (positions.len() / block_size).min(have + blocks.len());
        let total =
            token_span::whole_spans(positions, offered * block_size, block_size) / block_size;
        if total <= have || !Arc::ptr_eq(&lease.queue, &self.returns) {
            return Commit::default();
        }
        let positions = &positions[..total * block_size];
        let blocks = &blocks[..total - have];
        if !lease.end.is_none() && !self.arena.is_live(lease.end) {
            return self.commit_detached(lease, blocks);
        }
        let matched = self.find(&lease.namespace, positions) / block_size;
        if matched < have || !self.path_passes(lease.end) {
            return Commit::default();
        }

        let mut commit = Commit::default();
        let known =
            self.path.iter().flat_map(|&(id, count)| self.arena.edge(id).blocks().take(count));
        for (own, &offered) in known.skip(have).zip(blocks) {
            commit.blocks.push(own);
            if own != offered {
                commit.duplicates.push(offered);
            }
        }
        for &(id, _) in &self.path {
            self.records[id.index()].last_use = self.tick;
        }
        let fresh = &blocks[matched - have..];
        self.stats.blocks_committed += fresh.len() as u64;
        self.stats.blocks_duplicate += commit.duplicates.len() as u64;
        commit.blocks.extend_from_slice(fresh);
        let end = self.insert(lease, &positions[matched * block_size..], matched, fresh);
        self.lock_up(end, lease.end);
        lease.end = end;
        lease.blocks.extend_from_slice(&commit.blocks);
        commit
    }

    /// Publishes the blocks at the front of `private` whose KV has been written, and moves them
    /// into `prefix`, so that other requests can match them.
    ///
    /// `positions` is the sequence from its start up to the last position whose KV has been
    /// written. The full blocks after `prefix` are offered to the tree; a partial block at the end
    /// stays in `private`. Where the tree already holds a block with the same content, `prefix`
    /// gets the tree's block, and the offered one returns to its pool as if its lease had been
    /// dropped. Blocks that the tree does not take stay in `private`; [`Commit::blocks`] says when
    /// that happens. So no block can be lost, and the sequence's block table is always
    /// `prefix.blocks()` followed by `private.blocks()`.
    ///
    /// Returns the number of blocks by which `prefix` has grown.
    pub fn commit_from(
        &mut self,
        prefix: &mut PrefixLease,
        positions: &[u32],
        private: &mut BlockLease,
    ) -> usize {
        let commit = self.commit(prefix, positions, private.blocks());
        private.settle(&commit);
        commit.blocks.len()
    }

    fn path_passes(&self, end: NodeId) -> bool {
        end.is_none() || self.path.iter().any(|&(id, _)| id == end)
    }

    /// Adds the `fresh` blocks after the `matched` blocks that `path` covers. If there are none,
    /// only splits a node so that one ends there. Returns the node in which the sequence now ends.
    fn insert(
        &mut self,
        lease: &PrefixLease,
        positions: &[u32],
        matched: usize,
        fresh: &[BlockId],
    ) -> NodeId {
        let last = self.path.last().copied();
        let parent_hash = match last {
            Some((id, count)) => self.arena.edge(id).hashes()[count - 1],
            None => lease.namespace.root_hash(self.arena.core.seed),
        };
        let hashes = hash::block_hashes(parent_hash, positions, self.block_size());
        let edge = (!fresh.is_empty()).then(|| Edge::new(positions, fresh, &hashes));
        self.cached += fresh.len();
        if edge.is_some() {
            self.events.report(|| CacheEvent::Stored {
                namespace: lease.namespace,
                parent: last.map(|_| parent_hash),
                hashes: hashes.clone(),
                positions: positions.to_vec(),
            });
        }

        if let Some((id, count)) = last
            && count < self.arena.edge(id).block_count()
        {
            let (front, sibling) = self.split(id, count, edge);
            if let Some(sibling) = sibling {
                self.refresh(sibling);
            }
            return sibling.unwrap_or(front);
        }
        let Some(edge) = edge else {
            return last.map_or(NodeId::NONE, |(id, _)| id);
        };
        if let Some((id, _)) = last
            && id == lease.end
            && self.arena.child_count(id) == 0
            && self.records[id.index()].locks == 1
        {
            return self.extend_leaf(id, edge, matched);
        }
        let parent = last.map(|(id, _)| id).or_else(|| self.arena.root(&lease.namespace));
        let leaf = match parent {
            Some(parent) => self.arena.add_leaf(parent, edge),
            None => {
                let (root, leaf) = self.arena.add_namespace(&lease.namespace, edge);
                self.set_record(root, self.new_record(0));
                leaf
            }
        };
        self.set_record(leaf, self.new_record(matched));
        if let Some((parent, _)) = last {
            self.refresh(parent);
        }
        self.refresh(leaf);
        leaf
    }

    /// Extends the leaf `id`, which only the committing lease locks. Nodes above are merged into
    /// the leaf while they are not longer than everything below them. So a sequence that grows
    /// block by block is copied O(log n) times and never consists of more than O(log n) nodes.
    fn extend_leaf(&mut self, id: NodeId, edge: Edge, matched: usize) -> NodeId {
        let mut length = edge.block_count();
        let mut run = Vec::new();
        let mut above = id;
        while !self.arena.is_root(above)
            && self.records[above.index()].locks == 1
            && (above == id || self.arena.child_count(above) == 1)
            && self.arena.edge(above).block_count() <= length
        {
            length += self.arena.edge(above).block_count();
            run.push(above);
            above = self.arena.parent(above);
        }
        if run.is_empty() {
            let leaf = self.arena.add_leaf(id, edge);
            self.set_record(leaf, self.new_record(matched));
            return leaf;
        }
        run.reverse();
        let grown = Edge::concat(run.iter().map(|&id| self.arena.edge(id)).chain([&edge]));
        self.locked += edge.block_count();
        self.replace_run(&run, grown);
        id
    }

    /// Extends a lease whose prefix was removed from the index by a flush. The blocks stay outside
    /// the index and are returned after the lease was dropped.
    fn commit_detached(&mut self, lease: &mut PrefixLease, blocks: &[BlockId]) -> Commit {
        let id = self.arena.take_id(lease.end);
        self.set_record(id, Record { locks: 1, ..self.new_record(0) });
        self.detached.insert(id, blocks.to_vec());
        self.detached_blocks += blocks.len();
        lease.end = id;
        lease.blocks.extend_from_slice(blocks);
        Commit { blocks: blocks.to_vec(), duplicates: Vec::new() }
    }
}
