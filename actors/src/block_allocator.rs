//! The block allocator's actor: owns the [`BlockAllocator`], which decides when the prefix tree
//! has to evict, and gives it access to the tree by messages.
//!
//! It calls the tree's actor. None of the actors that call it is called by it.

use std::sync::Arc;

use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use stolon_kvcache::{BlockId, EvictedBlock, Namespace, TreeCounts};
use stolon_scheduler::{
    ActorStopped, AuditReport, BlockAllocator, BlockCounts, Evicted, Gauges, PromptLogits,
    Reserved, TreeAccess,
};

use crate::cache::Removal;
use crate::fault::{EnginePart, FaultPlan};
use crate::memory::{PREFIX_TREE, call};
use crate::prefix_tree::TreeMessage;

/// The messages of the block allocator's actor. Each is answered by the method of
/// [`BlockAllocator`] with the same name.
#[derive(Debug)]
pub(crate) enum AllocatorMessage {
    Reserve(usize, RpcReplyPort<Reserved>),
    CacheLogits(Box<PromptLogits>),
    FindLogits {
        block: BlockId,
        namespace: Namespace,
        tokens: Arc<Vec<u32>>,
        reply: RpcReplyPort<Option<Arc<[f32]>>>,
    },
    Flush(RpcReplyPort<()>),
    /// Removes part of the cache and answers how many blocks were freed.
    Remove(Removal, RpcReplyPort<usize>),
    Counts(RpcReplyPort<BlockCounts>),
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

    async fn counts(&mut self) -> Result<TreeCounts, ActorStopped> {
        call(self.0, TreeMessage::Counts, PREFIX_TREE).await
    }

    async fn evict(&mut self, count: usize, note: bool) -> Result<Evicted, ActorStopped> {
        call(self.0, |reply| TreeMessage::Evict { count, note, reply }, PREFIX_TREE).await
    }

    async fn flush(&mut self) -> Result<Vec<EvictedBlock>, ActorStopped> {
        call(self.0, TreeMessage::Flush, PREFIX_TREE).await
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
            AllocatorMessage::Reserve(count, reply) => {
                let reserved = allocator.reserve(&mut tree, count).await?;
                self.gauges.set_pool(&allocator.pool_counts());
                let _ = reply.send(reserved);
            }
            AllocatorMessage::CacheLogits(logits) => allocator.cache_logits(*logits),
            AllocatorMessage::FindLogits { block, namespace, tokens, reply } => {
                let logits = allocator.find_logits(block, &namespace, &tokens);
                drop(tokens);
                let _ = reply.send(logits);
            }
            AllocatorMessage::Flush(reply) => {
                allocator.flush(&mut tree).await?;
                self.gauges.set_pool(&allocator.pool_counts());
                let _ = reply.send(());
            }
            AllocatorMessage::Remove(removal, reply) => {
                let remove = |reply| TreeMessage::Remove(removal, reply);
                let removed = call(&self.tree, remove, PREFIX_TREE).await?;
                let count = removed.len();
                allocator.take_evicted(removed);
                self.gauges.set_pool(&allocator.pool_counts());
                let _ = reply.send(count);
            }
            AllocatorMessage::Counts(reply) => {
                let counts = allocator.counts(&mut tree).await?;
                self.gauges.set_pool(&allocator.pool_counts());
                let _ = reply.send(counts);
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
