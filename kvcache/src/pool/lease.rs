//! Leases on private blocks.

use crate::sync::{Arc, Mutex, lock};
use crate::{BlockId, Commit};

/// Word from a lease to the pool.
#[derive(Debug)]
pub(crate) enum Returned {
    /// The lease ended with these blocks in it.
    Dropped(Vec<BlockId>),
    /// These blocks now belong to the tree.
    Committed(Vec<BlockId>),
}

/// Blocks that one sequence has to itself. Move-only; dropping it, on any thread and also while
/// panicking, gives the blocks back, to be handed out again once no running step can touch them.
#[derive(Debug)]
pub struct BlockLease {
    blocks: Vec<BlockId>,
    queue: Arc<Mutex<Vec<Returned>>>,
}

impl BlockLease {
    pub(crate) fn new(blocks: Vec<BlockId>, queue: Arc<Mutex<Vec<Returned>>>) -> BlockLease {
        BlockLease { blocks, queue }
    }

    /// The blocks, in the order in which they are to be filled.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// How many blocks the lease holds.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether the lease holds no block.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Hands the first `count` blocks (all, if there are fewer) over to the tree: they are no
    /// longer reserved but committed, and come back through
    /// [`BlockPool::release`](crate::BlockPool::release).
    #[must_use = "the blocks belong to the caller until the tree or the pool takes them"]
    pub fn commit_front(&mut self, count: usize) -> Vec<BlockId> {
        let blocks: Vec<BlockId> = self.blocks.drain(..count.min(self.blocks.len())).collect();
        if !blocks.is_empty() {
            lock(&self.queue).push(Returned::Committed(blocks.clone()));
        }
        blocks
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

    /// Takes another lease's blocks in, behind its own. A lease of another pool is not taken in
    /// but dropped, which gives its blocks back to that pool.
    pub fn append(&mut self, mut other: BlockLease) {
        let same_pool = Arc::ptr_eq(&self.queue, &other.queue);
        debug_assert!(same_pool, "both leases are of one pool");
        if same_pool {
            self.blocks.append(&mut other.blocks);
        }
    }

    /// Moves the first `count` blocks (all, if there are fewer) into a lease of their own.
    #[must_use = "a dropped lease gives its blocks back"]
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
