//! Checkpoints in the index.

use super::TreeWriter;
use crate::{BlockLease, CheckpointLease, CommitError, Namespace};

impl TreeWriter {
    /// Number of blocks of a checkpoint; 0 in a tree without checkpoints.
    pub fn checkpoint_blocks(&self) -> usize {
        self.arena.core.checkpoint.as_ref().map_or(0, |span| span.block_count)
    }

    /// Locks the checkpoint of the longest prefix of `positions` that has one and is shorter than
    /// `positions`. Counts as a use of the checkpoint and its prefix for the order of eviction, but
    /// not in the statistics of acquires. `priority` is as for
    /// [`acquire_prioritized`](TreeWriter::acquire_prioritized).
    ///
    /// Returns `None` if there is no such checkpoint, which is always so in a tree without
    /// [`checkpoint_blocks`](crate::TreeBuilder::checkpoint_blocks).
    pub fn acquire_checkpoint(
        &mut self,
        namespace: &Namespace,
        positions: &[u32],
        priority: i32,
    ) -> Option<CheckpointLease> {
        self.checkpoint_within(namespace, positions, Some(priority), 1)
    }

    /// Locks the checkpoint that [`acquire_checkpoint`](TreeWriter::acquire_checkpoint) returns,
    /// only to keep it. This does not count as a hit and changes no priority.
    pub fn lock_checkpoint(
        &mut self,
        namespace: &Namespace,
        positions: &[u32],
    ) -> Option<CheckpointLease> {
        self.checkpoint_within(namespace, positions, None, 0)
    }

    /// As [`lock_checkpoint`](TreeWriter::lock_checkpoint), but a checkpoint at the end of `prefix`
    /// counts, too: the one from which every continuation of the prefix resumes.
    pub fn lock_checkpoint_of_prefix(
        &mut self,
        namespace: &Namespace,
        prefix: &[u32],
    ) -> Option<CheckpointLease> {
        self.lock_checkpoint(namespace, &[prefix, &[0]].concat())
    }

    /// Locks the last checkpoint before the end of `positions`, and adds `hits` to its hits.
    fn checkpoint_within(
        &mut self,
        namespace: &Namespace,
        positions: &[u32],
        priority: Option<i32>,
        hits: u32,
    ) -> Option<CheckpointLease> {
        self.arena.core.checkpoint.as_ref()?;
        self.begin_operation();
        let core = self.arena.core.clone();
        let span = core.checkpoint.as_ref()?;
        let root = self.arena.root(namespace)?;
        let root_hash = namespace.root_hash(core.seed);
        let found = self.arena.walk_checkpoints(root, root_hash, positions, span);
        if found.resume == 0 {
            return None;
        }
        let whole = [&positions[..found.resume], &*span.positions].concat();
        let lease = self.lock_match(namespace, &whole, priority, 0);
        // Only the checkpoint is hit: acquires count the hits of its prefix.
        let record = &mut self.records[lease.end.index()];
        record.hits = record.hits.saturating_add(hits);
        debug_assert_eq!(lease.len(), whole.len(), "the walk has found it");
        Some(CheckpointLease::new(lease, span.block_count))
    }

    /// Publishes a checkpoint: the state after `positions`, a whole number of blocks, which was
    /// copied to the first [`checkpoint_blocks`](crate::TreeBuilder::checkpoint_blocks) of
    /// `private`. Moves these blocks into the tree. If the tree has the checkpoint already, they
    /// return to their pool.
    ///
    /// Returns the checkpoint, locked; `None` if `positions` are not cached, because they were
    /// evicted or flushed, or if there are too few blocks. In these cases `private` keeps its
    /// blocks.
    ///
    /// # Errors
    ///
    /// [`CommitError`] as for [`commit_from`](TreeWriter::commit_from). After an error nothing is
    /// changed.
    pub fn commit_checkpoint(
        &mut self,
        namespace: &Namespace,
        positions: &[u32],
        private: &mut BlockLease,
    ) -> Result<Option<CheckpointLease>, CommitError> {
        self.begin_operation();
        let core = self.arena.core.clone();
        let Some(span) = &core.checkpoint else { return Ok(None) };
        if private.len() < span.block_count || positions.is_empty() {
            return Ok(None);
        }
        let mut lease = self.lock_match(namespace, positions, None, 0);
        if lease.len() < positions.len() {
            return Ok(None);
        }
        let before = lease.end;
        let hits = self.records[before.index()].hits;
        let whole = [positions, &*span.positions].concat();
        let mut own = private.split(span.block_count);
        let committed = self.commit_from(&mut lease, &whole, &mut own);
        if !own.is_empty() {
            // The tree has taken nothing. The blocks were split from this lease, so they can be
            // appended again.
            let fits = private.append(own);
            debug_assert!(fits.is_ok(), "blocks of one pool");
        }
        let is_whole = committed? > 0;
        if self.arena.is_live(before) {
            self.refresh_checkpoints_below(before);
        }
        // Requests may have diverged here before this checkpoint existed. Their hits count for it.
        let record = &mut self.records[lease.end.index()];
        record.hits = record.hits.max(hits);
        Ok(is_whole.then(|| CheckpointLease::new(lease, span.block_count)))
    }
}
