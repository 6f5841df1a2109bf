//! Leases on private blocks.

use crate::sync::{Arc, Mutex, lock};
use crate::{BlockId, Commit};

/// The queue through which leases send messages to their pool. It also identifies the pool.
pub(crate) type PoolQueue = Arc<Mutex<Vec<Returned>>>;

/// A message from a lease to the pool.
#[derive(Debug)]
pub(crate) enum Returned {
    /// The sequence no longer uses these reserved blocks.
    Dropped(Vec<BlockId>),
    /// These reserved blocks now belong to the tree.
    Committed(Vec<BlockId>),
}

/// Private blocks: only one sequence uses them, and it may write to them. Created by
/// [`BlockPool::reserve`](crate::BlockPool::reserve).
///
/// Dropping the lease returns its blocks to the pool, on any thread and also during a panic. They
/// are handed out again once no running step can access them.
#[derive(Debug)]
pub struct BlockLease {
    blocks: Vec<BlockId>,
    queue: PoolQueue,
}

impl BlockLease {
    pub(crate) fn new(blocks: Vec<BlockId>, queue: PoolQueue) -> BlockLease {
        BlockLease { blocks, queue }
    }

    /// The blocks, in the order in which the sequence fills them.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Number of blocks in the lease.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether the lease contains no block.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Removes the front blocks about which a tree has decided. The pool learns that the blocks
    /// that the tree has taken are committed, and gets the duplicates back.
    pub(crate) fn settle(&mut self, commit: &Commit) {
        let decided = self.blocks.drain(..commit.blocks.len());
        // The duplicates are a subsequence of the decided blocks.
        let mut duplicates = commit.duplicates.iter().peekable();
        let (duplicates, taken): (Vec<BlockId>, Vec<BlockId>) =
            decided.partition(|block| duplicates.next_if_eq(&block).is_some());
        let mut queue = lock(&self.queue);
        if !taken.is_empty() {
            queue.push(Returned::Committed(taken));
        }
        if !duplicates.is_empty() {
            queue.push(Returned::Dropped(duplicates));
        }
    }

    /// Appends the blocks of `other`.
    ///
    /// # Errors
    ///
    /// Returns `other` if it was reserved from another pool.
    pub fn append(&mut self, mut other: BlockLease) -> Result<(), BlockLease> {
        if !other.returns_to(&self.queue) {
            return Err(other);
        }
        self.blocks.append(&mut other.blocks);
        Ok(())
    }

    /// The queue of the pool that the blocks came from.
    pub(crate) fn pool(&self) -> &PoolQueue {
        &self.queue
    }

    /// Whether the lease belongs to the pool with this queue.
    pub(crate) fn returns_to(&self, queue: &PoolQueue) -> bool {
        Arc::ptr_eq(&self.queue, queue)
    }

    /// Moves the first `count` blocks (all, if there are fewer) into a new lease.
    #[must_use = "a dropped lease returns its blocks to the pool"]
    pub fn split(&mut self, count: usize) -> BlockLease {
        let blocks = self.blocks.drain(..count.min(self.blocks.len())).collect();
        BlockLease { blocks, queue: self.queue.clone() }
    }
}

impl Drop for BlockLease {
    fn drop(&mut self) {
        if !self.blocks.is_empty() {
            lock(&self.queue).push(Returned::Dropped(std::mem::take(&mut self.blocks)));
        }
    }
}
