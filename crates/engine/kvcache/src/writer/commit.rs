//! Adding blocks to the index.

use super::{BlockSource, Record, TreeWriter};
use crate::node::NodeId;
use crate::node::edge::Edge;
use crate::sync::Arc;
use crate::{
    BlockId, BlockLease, CacheEvent, Commit, CommitError, EvictedBlock, PrefixLease, hash,
    token_span,
};

impl TreeWriter {
    /// Publishes blocks whose KV has been written, by id, and extends `lease` by them. For an engine
    /// that does not keep its blocks in a [`BlockPool`](crate::BlockPool);
    /// [`commit_from`](TreeWriter::commit_from) is for the others. The caller of this form is
    /// responsible for every offered block:
    ///
    /// - the first `commit.blocks.len()` of `blocks` now belong to the tree, except those in
    ///   `commit.duplicates`, which the caller must free;
    /// - the remaining ones still belong to the caller.
    ///
    /// `positions` is the sequence from its start up to the last position whose KV has been
    /// written; a partial block at its end is ignored. `blocks` are the blocks of the part after
    /// `lease.len()`. If the positions are shorter than that, nothing is committed.
    ///
    /// # Errors
    ///
    /// If the lease, the positions and the blocks do not belong together, or the tree has blocks of
    /// a pool. Nothing is changed then, and all offered blocks still belong to the caller.
    pub fn commit(
        &mut self,
        lease: &mut PrefixLease,
        positions: &[u32],
        blocks: &[BlockId],
    ) -> Result<Commit, CommitError> {
        if matches!(self.source, BlockSource::Pool(_)) {
            return Err(CommitError::OtherPool);
        }
        let commit = self.commit_ids(lease, positions, blocks)?;
        if !commit.blocks.is_empty() {
            self.source = BlockSource::Caller;
        }
        Ok(commit)
    }

    fn commit_ids(
        &mut self,
        lease: &mut PrefixLease,
        positions: &[u32],
        blocks: &[BlockId],
    ) -> Result<Commit, CommitError> {
        self.begin_operation();
        let have = lease.blocks.len();
        let total = self.committable(lease, positions, have + blocks.len())?;
        if total <= have {
            return Ok(Commit::default());
        }
        let positions = &positions[..total * self.block_size()];
        let blocks = &blocks[..total - have];
        if !lease.end.is_none() && !self.arena.is_live(lease.end) {
            return self.commit_detached(lease, positions, blocks);
        }
        let matched = self.find(&lease.namespace, positions) / self.block_size();
        if matched < have || !self.path_passes(lease.end) {
            return Err(CommitError::OtherPrefix { locked: lease.len() });
        }

        let known =
            self.path.iter().flat_map(|&(id, count)| self.arena.edge(id).blocks().take(count));
        let known: Vec<BlockId> = known.skip(have).collect();
        let (offered, fresh) = blocks.split_at(known.len());
        let duplicates = offered.iter().zip(&known).filter(|(offered, known)| offered != known);
        let duplicates: Vec<BlockId> = duplicates.map(|(&offered, _)| offered).collect();
        self.owned.add(duplicates.iter().chain(fresh).copied())?;
        self.owned.remove(duplicates.iter().copied());

        for &(id, _) in &self.path {
            self.records[id.index()].last_use = self.tick;
        }
        self.stats.blocks_committed += fresh.len() as u64;
        self.stats.blocks_duplicate += duplicates.len() as u64;
        let end = self.insert(lease, &positions[matched * self.block_size()..], matched, fresh);
        if let Some(priority) = lease.priority {
            self.raise_priority(end, priority);
        }
        self.lock_up(end, lease.end);
        self.refresh_checkpoint_of(self.arena.parent(end));
        lease.end = end;
        self.renew_pins(&lease.namespace, positions, end, fresh.len());
        let commit = Commit { blocks: [&known, fresh].concat(), duplicates };
        lease.blocks.extend_from_slice(&commit.blocks);
        self.quotas.add_blocks(self.records[end.index()].root, fresh.len());
        self.enforce_quotas();
        Ok(commit)
    }

    /// Checks the lease and the positions of a commit. Returns the number of blocks, from the start
    /// of the sequence and at most `offered`, at which it can end.
    fn committable(
        &self,
        lease: &PrefixLease,
        positions: &[u32],
        offered: usize,
    ) -> Result<usize, CommitError> {
        if !Arc::ptr_eq(&lease.queue, &self.returns) {
            return Err(CommitError::OtherTree);
        }
        let block_size = self.block_size();
        let end = offered.min(positions.len() / block_size) * block_size;
        // The lease ends between spans, so the rest does not start inside one.
        let rest = positions.get(lease.len()..end).unwrap_or_default();
        let checkpoint = self.arena.core.checkpoint.as_ref();
        let is_checkpoint = checkpoint.is_some_and(|span| *rest == *span.positions);
        if !is_checkpoint && let Some(at) = token_span::first_invalid(rest) {
            let index = lease.len() + at;
            return Err(CommitError::InvalidPosition { index, got: rest[at] });
        }
        Ok(token_span::whole_spans(positions, end, block_size) / block_size)
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
    ///
    /// # Errors
    ///
    /// If the lease, the positions and the blocks do not belong together. In this case nothing is
    /// changed.
    pub fn commit_from(
        &mut self,
        prefix: &mut PrefixLease,
        positions: &[u32],
        private: &mut BlockLease,
    ) -> Result<usize, CommitError> {
        let fits = match &self.source {
            BlockSource::Unknown => true,
            BlockSource::Caller => private.is_empty(),
            BlockSource::Pool(pool) => private.returns_to(pool),
        };
        if !fits {
            return Err(CommitError::OtherPool);
        }
        let commit = self.commit_ids(prefix, positions, private.blocks())?;
        if !commit.blocks.is_empty() {
            self.source = BlockSource::Pool(private.pool().clone());
        }
        private.settle(&commit);
        Ok(commit.blocks.len())
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
        if edge.is_some() && !token_span::is_checkpoint(positions[0]) {
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
                self.records[sibling.index()].priority = lease.priority.unwrap_or_default();
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
        let (root, leaf) = match self.arena.root(&lease.namespace) {
            Some(root) => (root, self.arena.add_leaf(last.map_or(root, |(id, _)| id), edge)),
            None => {
                let (root, leaf) = self.arena.add_namespace(&lease.namespace, edge);
                self.set_record(root, self.new_record(0, root));
                self.quotas.add_root(&lease.namespace, root);
                (root, leaf)
            }
        };
        let priority = lease.priority.unwrap_or_default();
        self.set_record(leaf, Record { priority, ..self.new_record(matched, root) });
        if let Some((parent, _)) = last {
            self.refresh(parent);
        }
        self.refresh(leaf);
        leaf
    }

    /// Sets the priority of the nodes from `end` to the root to at least `priority`. The lease that
    /// calls this locks them all next, so that none of them is ranked by its old priority.
    fn raise_priority(&mut self, end: NodeId, priority: i32) {
        let mut id = end;
        while !id.is_none() && !self.arena.is_root(id) {
            let record = &mut self.records[id.index()];
            record.priority = record.priority.max(priority);
            id = self.arena.parent(id);
        }
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
            && self.records[above.index()].pins == 0
            && (above == id || self.arena.child_count(above) == 1)
            && self.arena.edge(above).block_count() <= length
        {
            length += self.arena.edge(above).block_count();
            run.push(above);
            above = self.arena.parent(above);
        }
        if run.is_empty() {
            let leaf = self.arena.add_leaf(id, edge);
            let Record { root, priority, .. } = self.records[id.index()];
            self.set_record(leaf, Record { priority, ..self.new_record(matched, root) });
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
    fn commit_detached(
        &mut self,
        lease: &mut PrefixLease,
        positions: &[u32],
        blocks: &[BlockId],
    ) -> Result<Commit, CommitError> {
        self.owned.add(blocks.iter().copied())?;
        let id = self.arena.take_id(lease.end);
        self.set_record(id, Record { locks: 1, ..Record::default() });
        let namespace = lease.namespace;
        let root_hash = namespace.root_hash(self.arena.core.seed);
        let hashes = hash::block_hashes(root_hash, positions, self.block_size());
        let new = hashes.into_iter().skip(lease.blocks.len()).zip(blocks);
        let new = new.map(|(hash, &id)| EvictedBlock { id, namespace, hash }).collect();
        self.detached.insert(id, new);
        self.detached_blocks += blocks.len();
        lease.end = id;
        lease.blocks.extend_from_slice(blocks);
        Ok(Commit { blocks: blocks.to_vec(), duplicates: Vec::new() })
    }
}
