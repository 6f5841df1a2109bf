//! Leases on cached prefixes. While a lease lives, no block of its prefix is evicted.

use crate::node::NodeId;
use crate::sync::{Arc, AtomicUsize, Mutex, Ordering, lock};
use crate::{BlockId, Namespace};
use std::fmt;

/// The queue through which dropped leases reach the writer.
#[derive(Debug)]
pub(crate) struct ReturnQueue {
    /// Length of `ended`. Stored with Release under the lock and loaded with Acquire without it, so
    /// that an empty queue costs the writer one load.
    pending: AtomicUsize,
    /// The end nodes of the dropped leases.
    ended: Mutex<Vec<NodeId>>,
}

impl ReturnQueue {
    pub(crate) fn new() -> ReturnQueue {
        ReturnQueue { pending: AtomicUsize::new(0), ended: Mutex::new(Vec::new()) }
    }

    fn push(&self, end: NodeId) {
        let mut ended = lock(&self.ended);
        ended.push(end);
        self.pending.store(ended.len(), Ordering::Release);
    }

    /// Takes the end nodes of the leases that were dropped since the last call.
    pub(crate) fn take(&self) -> Vec<NodeId> {
        if self.pending.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let mut ended = lock(&self.ended);
        self.pending.store(0, Ordering::Release);
        std::mem::take(&mut *ended)
    }
}

/// A locked prefix of a request's prompt, returned by
/// [`TreeWriter::acquire`](crate::TreeWriter::acquire).
///
/// Dropping the lease unlocks the prefix. It may be dropped on any thread, also during a panic; the
/// writer notices at its next operation. The blocks of a lease that is passed to
/// [`std::mem::forget`] never come back.
pub struct PrefixLease {
    pub(crate) namespace: Namespace,
    /// The tree's blocks of the prefix, from position 0.
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) block_size: usize,
    /// The priority of the blocks that are committed through it.
    pub(crate) priority: Option<i32>,
    /// The deepest locked node, which ends exactly where the prefix ends. Its number stays valid
    /// while it is locked: after a split the rear keeps the number, after a merge the merged node
    /// has the number of its lowest part.
    pub(crate) end: NodeId,
    pub(crate) queue: Arc<ReturnQueue>,
}

impl PrefixLease {
    /// Length of the prefix in positions: a multiple of the block size, 0 if nothing was cached.
    pub fn len(&self) -> usize {
        self.blocks.len() * self.block_size
    }

    /// The blocks that hold the prefix's KV, in order. Other requests read them too, so they must
    /// not be written to.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Number of positions in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// The namespace of the prefix.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Whether the prefix is empty, so that nothing is locked.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}

impl Drop for PrefixLease {
    fn drop(&mut self) {
        if !self.end.is_none() {
            self.queue.push(self.end);
        }
    }
}

impl fmt::Debug for PrefixLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefixLease")
            .field("namespace", &self.namespace)
            .field("positions", &self.len())
            .finish()
    }
}

/// The result of [`TreeWriter::commit`](crate::TreeWriter::commit).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "dropped block ids are never freed"]
pub struct Commit {
    /// The tree's blocks of the committed part, in order. They extend the lease's prefix and belong
    /// into the sequence's block table in place of the offered ones.
    ///
    /// There are fewer of them than were offered if there are fewer positions, or if the part would
    /// end inside an atomic token span. The remaining offered blocks still belong to the caller.
    pub blocks: Vec<BlockId>,
    /// Offered blocks that the tree did not take because it already holds blocks with the same
    /// content. They belong to the caller, who may free them once no running step can access them.
    pub duplicates: Vec<BlockId>,
}
