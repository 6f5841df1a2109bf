//! The scheduler's view of the prefix tree and the block pool.
//!
//! [`Memory`] is a trait, so that the same scheduler runs in front of two actors in the engine and
//! directly on the data in simulations and tests. What the implementations do is written once:
//! [`BlockAllocator`] reserves, evicts, settles and flushes, [`commit`] adds blocks to the tree.

mod allocator;
mod direct;

use std::future::Future;
use std::sync::Arc;

use stolon_kvcache::{
    BlockId, BlockLease, CheckpointLease, EvictedPrefix, Namespace, PrefixLease, TreeWriter,
};

pub use allocator::{BlockAllocator, Evicted, EvictionDemand, Removal, TreeAccess, evict, remove};
pub use direct::DirectMemory;

use crate::cached_logits::PromptLogits;
use crate::states::CheckpointItem;
use crate::stats::AuditReport;

/// The actor that owns part of the memory has stopped; the engine restarts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} has stopped")]
pub struct ActorStopped(pub &'static str);

/// A locked prefix.
#[derive(Debug)]
pub struct Acquired {
    /// The longest match, locked.
    pub lease: PrefixLease,
    /// For a model with a recurrent state: the checkpoint from which the request resumes, locked.
    pub checkpoint: Option<CheckpointLease>,
    /// Number of blocks that the tree can still return now that the match is locked.
    pub evictable: usize,
}

/// Full blocks of one sequence, to be added to the tree.
#[derive(Debug)]
pub struct CommitItem {
    /// The sequence's tokens.
    pub tokens: Arc<Vec<u32>>,
    /// Number of positions to be cached, from position 0; a multiple of the block size.
    pub len: usize,
    /// The prefix that the sequence has locked.
    pub lease: PrefixLease,
    /// The sequence's reserved blocks, from the end of the lease.
    pub reserved: BlockLease,
}

/// The result of a commit.
#[derive(Debug)]
pub struct Committed {
    /// The lease, extended over the committed positions.
    pub lease: PrefixLease,
    /// The reserved blocks that remain. Blocks that the tree has already are returned to the pool.
    pub reserved: BlockLease,
}

/// Identifies the cached logits of a prompt's last position.
#[derive(Clone, Debug)]
pub struct LogitsKey {
    /// The last full block of the prompt.
    pub block: BlockId,
    /// The namespace of the prompt.
    pub namespace: Namespace,
    /// The tokens of the prompt.
    pub tokens: Arc<Vec<u32>>,
}

/// The answer to a reservation.
#[derive(Debug, Default)]
pub struct Reserved {
    /// The blocks; `None` if fewer than requested are available now.
    pub lease: Option<BlockLease>,
    /// The cached logits that were asked for, `[vocab_size]` values, if there are any.
    pub logits: Option<Arc<[f32]>>,
    /// The prefixes that were evicted for them, if
    /// [`KvSink::takes_evicted`](crate::KvSink::takes_evicted). The content of these blocks is
    /// overwritten by the next step at the earliest.
    pub evicted: Vec<EvictedPrefix>,
}

/// The blocks that a request could reserve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    /// Free blocks.
    pub free: usize,
    /// Blocks that the tree can return: cached blocks that no request and no pin holds, and blocks
    /// that have left the index already.
    pub evictable: usize,
}

impl BlockCounts {
    /// Number of blocks that can be reserved now.
    pub fn available(self) -> usize {
        self.free + self.evictable
    }
}

/// The prefix tree and the block pool. There is one caller, and each call is answered before the
/// next one is made.
pub trait Memory: Send {
    /// Locks the longest cached prefix of the first `limit` tokens, for a request with this
    /// priority; without one, only to keep it, which is no hit.
    fn acquire(
        &mut self,
        namespace: &Namespace,
        tokens: &Arc<Vec<u32>>,
        limit: usize,
        priority: Option<i32>,
    ) -> impl Future<Output = Result<Acquired, ActorStopped>> + Send;

    /// Adds checkpoints to the tree, for positions that are in the tree. Returns for each of them
    /// whether the tree has it now.
    fn commit_checkpoints(
        &mut self,
        items: Vec<CheckpointItem>,
    ) -> impl Future<Output = Result<Vec<bool>, ActorStopped>> + Send;

    /// Adds full blocks to the tree, in this order.
    fn commit(
        &mut self,
        items: Vec<CommitItem>,
    ) -> impl Future<Output = Result<Vec<Committed>, ActorStopped>> + Send;

    /// Reserves `count` blocks, evicting cached ones if necessary. Reserves and evicts nothing if
    /// fewer than `count` are available now. Also looks up the logits of `logits`.
    fn reserve(
        &mut self,
        count: usize,
        logits: Option<LogitsKey>,
    ) -> impl Future<Output = Result<Reserved, ActorStopped>> + Send;

    /// Caches the logits of a prompt's last position for as long as its block stays in the tree.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    fn cache_logits(&mut self, logits: PromptLogits) -> Result<(), ActorStopped>;

    /// Counts blocks, after everything that was dropped so far has been returned.
    fn counts(&mut self) -> impl Future<Output = Result<BlockCounts, ActorStopped>> + Send;

    /// Returns blocks to the pool that have left the index: those of a flush that were still in
    /// use, and those that were evicted for quotas. Called when nothing runs.
    fn settle(&mut self) -> impl Future<Output = Result<(), ActorStopped>> + Send;

    /// Removes everything from the tree that no request holds.
    fn flush(&mut self) -> impl Future<Output = Result<(), ActorStopped>> + Send;

    /// Verifies the accounting of the pool and of the tree, and one against the other. The inner
    /// error describes the first inconsistency.
    fn audit(
        &mut self,
    ) -> impl Future<Output = Result<Result<AuditReport, String>, ActorStopped>> + Send;
}

/// Locks the longest cached prefix of `tokens` and the checkpoint from which a request resumes, if
/// the tree has checkpoints; as [`Memory::acquire`].
pub fn acquire(
    writer: &mut TreeWriter,
    namespace: &Namespace,
    tokens: &[u32],
    priority: Option<i32>,
) -> Acquired {
    let (lease, checkpoint) = match priority {
        Some(priority) => (
            writer.acquire_prioritized(namespace, tokens, priority),
            writer.acquire_checkpoint(namespace, tokens, priority),
        ),
        None => (writer.lock(namespace, tokens), writer.lock_checkpoint(namespace, tokens)),
    };
    Acquired { lease, checkpoint, evictable: writer.counts().returnable() }
}

/// Adds a checkpoint to the tree. Returns whether the tree has it now. If its positions were evicted,
/// the blocks are returned to the pool.
pub fn commit_checkpoint(writer: &mut TreeWriter, item: CheckpointItem) -> bool {
    let CheckpointItem { namespace, tokens, len, mut blocks, .. } = item;
    match writer.commit_checkpoint(&namespace, &tokens[..len], &mut blocks) {
        Ok(lease) => lease.is_some(),
        Err(error) => {
            debug_assert!(false, "{error}");
            tracing::error!(%error, "the prefix tree refused a checkpoint");
            false
        }
    }
}

/// Adds one sequence's full blocks to the tree.
pub fn commit(writer: &mut TreeWriter, item: CommitItem) -> Committed {
    let CommitItem { tokens, len, mut lease, mut reserved } = item;
    if let Err(error) = writer.commit_from(&mut lease, &tokens[..len], &mut reserved) {
        // A defect. The sequence keeps its blocks to itself and continues.
        debug_assert!(false, "{error}");
        tracing::error!(%error, "the prefix tree refused the blocks of a sequence");
    }
    Committed { lease, reserved }
}
