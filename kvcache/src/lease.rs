//! Leases on cached prefixes: while one lives, nothing of its prefix is evicted.

use crate::node::NodeId;
use crate::sync::{Arc, AtomicUsize, Mutex, Ordering, lock};
use crate::{BlockId, Namespace};
use std::fmt;

/// Where dropped leases leave word for the writer.
#[derive(Debug)]
pub(crate) struct ReturnQueue {
    /// Leases in `ended`. Stored with Release under the lock, loaded with Acquire without it, so
    /// that an idle queue costs the writer one load.
    pending: AtomicUsize,
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

    /// Takes what has come back since the last call.
    pub(crate) fn take(&self) -> Vec<NodeId> {
        if self.pending.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let mut ended = lock(&self.ended);
        self.pending.store(0, Ordering::Release);
        std::mem::take(&mut *ended)
    }
}

/// A locked prefix. Move-only; dropping it, on any thread and also while panicking, unlocks the
/// prefix at the writer's next operation.
pub struct PrefixLease {
    pub(crate) namespace: Namespace,
    /// The canonical blocks of the prefix, from position 0.
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) block_size: usize,
    /// The deepest node locked; ends exactly where the prefix ends. Keeps its number as long as
    /// it is locked: a split leaves the number to the rear, a merge to the lowest node.
    pub(crate) end: NodeId,
    pub(crate) queue: Arc<ReturnQueue>,
}

impl PrefixLease {
    /// Positions of the prefix: a multiple of the block size, 0 when nothing was cached.
    pub fn len(&self) -> usize {
        self.blocks.len() * self.block_size
    }

    /// The blocks that hold the prefix's KV, in order. They must not be written to.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// The namespace that the prefix is in.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Whether nothing is locked.
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

/// What came of a commit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Commit {
    /// The canonical blocks of the committed part, in order: put them into your block table. May
    /// be fewer than were offered (a cut that would end inside an atom, or positions that do not
    /// start with the lease's prefix); the offered blocks past them stay the caller's.
    pub blocks: Vec<BlockId>,
    /// Offered blocks that the tree did not take, because it holds the same part already: free
    /// them once no running step can touch them.
    pub duplicates: Vec<BlockId>,
}
