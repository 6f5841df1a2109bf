//! The block allocator's actor: owns the [`BlockAllocator`], which decides when the prefix tree
//! has to evict, and gives it access to the tree by messages.
//!
//! It calls the tree's actor. None of the actors that call it is called by it.

use std::sync::Arc;

use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use stolon_kvcache::{EvictedBlocks, TreeCounts};
use stolon_scheduler::{
    ActorStopped, AuditReport, BlockAllocator, Evicted, EvictionDemand, Gauges, LogitsKey,
    PromptLogits, Removal, Reserved, TreeAccess,
};

use crate::fault::{EnginePart, FaultPlan};
use crate::memory::{PREFIX_TREE, call};
use crate::prefix_tree::TreeMessage;

/// The messages of the block allocator's actor. Each is answered by the method of
/// [`BlockAllocator`] with the same name, and `Free` by [`BlockAllocator::pool_counts`].
#[derive(Debug)]
pub(crate) enum AllocatorMessage {
    Reserve {
        count: usize,
        logits: Option<LogitsKey>,
        reply: RpcReplyPort<Reserved>,
    },
    CacheLogits(Box<PromptLogits>),
    Flush(RpcReplyPort<()>),
    /// Removes part of the cache and answers how many blocks were freed.
    Remove(Removal, RpcReplyPort<usize>),
    /// Counts the free blocks.
    Free(RpcReplyPort<usize>),
    Settle(RpcReplyPort<()>),
    Audit(RpcReplyPort<Result<AuditReport, String>>),
}

/// The actor. Its state is the [`BlockAllocator`].
pub(crate) struct BlockAllocatorActor {
    pub(crate) tree: ActorRef<TreeMessage>,
    pub(crate) gauges: Arc<Gauges>,
    pub(crate) faults: Arc<FaultPlan>,
}

/// The prefix tree behind its actor.
struct TreeClient<'a>(&'a ActorRef<TreeMessage>);

impl TreeAccess for TreeClient<'_> {
    type Error = ActorStopped;

    async fn evict(&mut self, demand: EvictionDemand, note: bool) -> Result<Evicted, ActorStopped> {
        call(self.0, |reply| TreeMessage::Evict { demand, note, reply }, PREFIX_TREE).await
    }

    async fn flush(&mut self) -> Result<EvictedBlocks, ActorStopped> {
        call(self.0, TreeMessage::Flush, PREFIX_TREE).await
    }

    async fn remove(&mut self, removal: Removal) -> Result<EvictedBlocks, ActorStopped> {
        call(self.0, |reply| TreeMessage::Remove(removal, reply), PREFIX_TREE).await
    }

    async fn audit(&mut self) -> Result<Result<TreeCounts, String>, ActorStopped> {
        call(self.0, TreeMessage::Audit, PREFIX_TREE).await
    }
}

impl Actor for BlockAllocatorActor {
    type Msg = AllocatorMessage;
    type State = BlockAllocator;
    type Arguments = BlockAllocator;

    async fn pre_start(
        &self,
        _: ActorRef<AllocatorMessage>,
        allocator: BlockAllocator,
    ) -> Result<BlockAllocator, ActorProcessingErr> {
        Ok(allocator)
    }

    async fn handle(
        &self,
        _: ActorRef<AllocatorMessage>,
        message: AllocatorMessage,
        allocator: &mut BlockAllocator,
    ) -> Result<(), ActorProcessingErr> {
        self.faults.trigger(EnginePart::BlockAllocator)?;
        let mut tree = TreeClient(&self.tree);
        // The gauges are set before the answer is sent, so that the caller finds them up to date.
        // A send fails only if the caller has stopped; dropping a lease returns its blocks.
        match message {
            AllocatorMessage::Reserve { count, logits, reply } => {
                let reserved = allocator.reserve(&mut tree, count, logits.as_ref()).await?;
                self.gauges.set_pool(&allocator.pool_counts());
                drop(logits);
                let _ = reply.send(reserved);
            }
            AllocatorMessage::CacheLogits(logits) => allocator.cache_logits(*logits),
            AllocatorMessage::Flush(reply) => {
                allocator.flush(&mut tree).await?;
                self.gauges.set_pool(&allocator.pool_counts());
                let _ = reply.send(());
            }
            AllocatorMessage::Remove(removal, reply) => {
                let count = allocator.remove(&mut tree, removal).await?;
                self.gauges.set_pool(&allocator.pool_counts());
                let _ = reply.send(count);
            }
            AllocatorMessage::Free(reply) => {
                let counts = allocator.pool_counts();
                self.gauges.set_pool(&counts);
                let _ = reply.send(counts.free);
            }
            AllocatorMessage::Settle(reply) => {
                allocator.settle(&mut tree).await?;
                self.gauges.set_pool(&allocator.pool_counts());
                let _ = reply.send(());
            }
            AllocatorMessage::Audit(reply) => {
                let report = allocator.audit(&mut tree).await?;
                self.gauges.set_pool(&allocator.pool_counts());
                let _ = reply.send(report);
            }
        }
        Ok(())
    }
}
