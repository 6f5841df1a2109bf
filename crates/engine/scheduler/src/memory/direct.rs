//! [`Memory`] without actors: the tree and the allocator in one value, for simulations and for
//! tests of the scheduler.

use std::convert::Infallible;
use std::sync::Arc;

use stolon_kvcache::{EvictedBlocks, Namespace, TreeCounts, TreeWriter};

use super::{
    Acquired, ActorStopped, BlockAllocator, BlockCounts, CommitItem, Committed, Evicted,
    EvictionDemand, LogitsKey, Memory, Removal, Reserved, TreeAccess, acquire, commit,
    commit_checkpoint, evict, remove,
};
use crate::cached_logits::PromptLogits;
use crate::states::CheckpointItem;
use crate::stats::AuditReport;

/// The tree and the allocator.
#[derive(Debug)]
pub struct DirectMemory {
    /// The prefix tree.
    pub writer: TreeWriter,
    /// The block pool.
    pub allocator: BlockAllocator,
}

impl TreeAccess for TreeWriter {
    type Error = Infallible;

    async fn evict(&mut self, demand: EvictionDemand, note: bool) -> Result<Evicted, Infallible> {
        Ok(evict(self, demand, note))
    }

    async fn flush(&mut self) -> Result<EvictedBlocks, Infallible> {
        Ok(TreeWriter::flush(self))
    }

    async fn remove(&mut self, removal: Removal) -> Result<EvictedBlocks, Infallible> {
        Ok(remove(self, &removal))
    }

    async fn audit(&mut self) -> Result<Result<TreeCounts, String>, Infallible> {
        let checked = TreeWriter::audit(self).map_err(|error| error.to_string());
        Ok(checked.map(|_| TreeWriter::counts(self)))
    }
}

/// The result of a call to a tree that always answers.
fn answered<T>(result: Result<T, Infallible>) -> Result<T, ActorStopped> {
    result.map_err(|never| match never {})
}

impl Memory for DirectMemory {
    async fn acquire(
        &mut self,
        namespace: &Namespace,
        tokens: &Arc<Vec<u32>>,
        limit: usize,
        priority: Option<i32>,
    ) -> Result<Acquired, ActorStopped> {
        Ok(acquire(&mut self.writer, namespace, &tokens[..limit], priority))
    }

    async fn commit_checkpoints(
        &mut self,
        items: Vec<CheckpointItem>,
    ) -> Result<Vec<bool>, ActorStopped> {
        Ok(items.into_iter().map(|item| commit_checkpoint(&mut self.writer, item)).collect())
    }

    async fn commit(&mut self, items: Vec<CommitItem>) -> Result<Vec<Committed>, ActorStopped> {
        Ok(items.into_iter().map(|item| commit(&mut self.writer, item)).collect())
    }

    async fn reserve(
        &mut self,
        count: usize,
        logits: Option<LogitsKey>,
    ) -> Result<Reserved, ActorStopped> {
        answered(self.allocator.reserve(&mut self.writer, count, logits.as_ref()).await)
    }

    fn cache_logits(&mut self, logits: PromptLogits) -> Result<(), ActorStopped> {
        self.allocator.cache_logits(logits);
        Ok(())
    }

    async fn counts(&mut self) -> Result<BlockCounts, ActorStopped> {
        let free = self.allocator.pool_counts().free;
        Ok(BlockCounts { free, evictable: self.writer.counts().returnable() })
    }

    async fn settle(&mut self) -> Result<(), ActorStopped> {
        answered(self.allocator.settle(&mut self.writer).await)
    }

    async fn flush(&mut self) -> Result<(), ActorStopped> {
        answered(self.allocator.flush(&mut self.writer).await)
    }

    async fn audit(&mut self) -> Result<Result<AuditReport, String>, ActorStopped> {
        answered(self.allocator.audit(&mut self.writer).await)
    }
}
