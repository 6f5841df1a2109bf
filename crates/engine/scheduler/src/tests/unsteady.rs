//! [`Unsteady`]: memory from which other parts of the engine remove cached blocks between any two
//! calls of the scheduler, as evictions for other requests, flushes and quotas do.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use stolon_kvcache::Namespace;

use super::*;
use crate::cached_logits::PromptLogits;
use crate::memory::{
    Acquired, BlockCounts, CommitItem, Committed, LogitsKey, Memory, Removal, Reserved,
};
use crate::states::CheckpointItem;
use crate::stats::AuditReport;

/// The tree and the allocator, and the removals that happen to them.
#[derive(Debug)]
pub(super) struct Unsteady {
    memory: DirectMemory,
    rng: SmallRng,
    /// Probability that something is removed before a call.
    pub(super) rate: f64,
}

impl Unsteady {
    /// Nothing is removed until `rate` is set.
    pub(super) fn new(memory: DirectMemory) -> Unsteady {
        Unsteady { memory, rng: SmallRng::seed_from_u64(0), rate: 0.0 }
    }

    /// Removes some or all of the cached blocks that no request holds, at a random call.
    async fn disturb(&mut self) -> Result<&mut DirectMemory, ActorStopped> {
        if self.rng.random_bool(self.rate) {
            let DirectMemory { writer, allocator } = &mut self.memory;
            if self.rng.random_bool(0.3) {
                let all = Removal::Namespace(Namespace::default());
                let removed = allocator.remove(writer, all).await;
                removed.expect("the tree always answers");
            } else {
                let count = allocator.pool_counts().free + self.rng.random_range(1..8);
                let reserved = allocator.reserve(writer, count, None).await;
                reserved.expect("the tree always answers");
            }
        }
        Ok(&mut self.memory)
    }
}

impl Memory for Unsteady {
    async fn acquire(
        &mut self,
        namespace: &Namespace,
        tokens: &Arc<Vec<u32>>,
        limit: usize,
        priority: Option<i32>,
    ) -> Result<Acquired, ActorStopped> {
        self.disturb().await?.acquire(namespace, tokens, limit, priority).await
    }

    async fn commit_checkpoints(
        &mut self,
        items: Vec<CheckpointItem>,
    ) -> Result<Vec<bool>, ActorStopped> {
        self.disturb().await?.commit_checkpoints(items).await
    }

    async fn commit(&mut self, items: Vec<CommitItem>) -> Result<Vec<Committed>, ActorStopped> {
        self.disturb().await?.commit(items).await
    }

    async fn reserve(
        &mut self,
        count: usize,
        logits: Option<LogitsKey>,
    ) -> Result<Reserved, ActorStopped> {
        self.disturb().await?.reserve(count, logits).await
    }

    fn cache_logits(&mut self, logits: PromptLogits) -> Result<(), ActorStopped> {
        self.memory.cache_logits(logits)
    }

    async fn counts(&mut self) -> Result<BlockCounts, ActorStopped> {
        self.disturb().await?.counts().await
    }

    async fn settle(&mut self) -> Result<(), ActorStopped> {
        self.disturb().await?.settle().await
    }

    async fn flush(&mut self) -> Result<(), ActorStopped> {
        self.disturb().await?.flush().await
    }

    async fn audit(&mut self) -> Result<Result<AuditReport, String>, ActorStopped> {
        self.memory.audit().await
    }
}
