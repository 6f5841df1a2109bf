//! [`Memory`] behind the actors of the prefix tree and the block allocator.

use std::sync::Arc;

use futures::future::try_join;
use ractor::rpc::CallResult;
use ractor::{ActorRef, Message, RpcReplyPort};
use stolon_kvcache::Namespace;
use stolon_scheduler::{
    Acquired, ActorStopped, AuditReport, BlockCounts, CheckpointItem, CommitItem, Committed,
    LogitsKey, Memory, PromptLogits, Reserved,
};

use crate::block_allocator::AllocatorMessage;
use crate::prefix_tree::TreeMessage;

/// The names of actors in errors.
pub(crate) const PREFIX_TREE: &str = "the prefix tree's actor";
pub(crate) const BLOCK_ALLOCATOR: &str = "the block allocator's actor";

/// The two actors.
#[derive(Clone, Debug)]
pub(crate) struct ActorMemory {
    pub(crate) tree: ActorRef<TreeMessage>,
    pub(crate) allocator: ActorRef<AllocatorMessage>,
}

/// Calls an actor and waits for its answer. `name` names it in the error.
pub(crate) async fn call<M: Message, T: Send + 'static>(
    actor: &ActorRef<M>,
    message: impl FnOnce(RpcReplyPort<T>) -> M,
    name: &'static str,
) -> Result<T, ActorStopped> {
    match actor.call(message, None).await {
        Ok(CallResult::Success(answer)) => Ok(answer),
        _ => Err(ActorStopped(name)),
    }
}

impl ActorMemory {
    async fn call_tree<T: Send + 'static>(
        &self,
        message: impl FnOnce(RpcReplyPort<T>) -> TreeMessage,
    ) -> Result<T, ActorStopped> {
        call(&self.tree, message, PREFIX_TREE).await
    }

    async fn call_allocator<T: Send + 'static>(
        &self,
        message: impl FnOnce(RpcReplyPort<T>) -> AllocatorMessage,
    ) -> Result<T, ActorStopped> {
        call(&self.allocator, message, BLOCK_ALLOCATOR).await
    }
}

impl Memory for ActorMemory {
    async fn acquire(
        &mut self,
        namespace: &Namespace,
        tokens: &Arc<Vec<u32>>,
        limit: usize,
        priority: Option<i32>,
    ) -> Result<Acquired, ActorStopped> {
        let (namespace, tokens) = (*namespace, Arc::clone(tokens));
        let acquire =
            move |reply| TreeMessage::Acquire { namespace, tokens, limit, priority, reply };
        self.call_tree(acquire).await
    }

    async fn commit_checkpoints(
        &mut self,
        items: Vec<CheckpointItem>,
    ) -> Result<Vec<bool>, ActorStopped> {
        self.call_tree(move |reply| TreeMessage::CommitCheckpoints(items, reply)).await
    }

    async fn commit(&mut self, items: Vec<CommitItem>) -> Result<Vec<Committed>, ActorStopped> {
        self.call_tree(move |reply| TreeMessage::Commit(items, reply)).await
    }

    async fn reserve(
        &mut self,
        count: usize,
        logits: Option<LogitsKey>,
    ) -> Result<Reserved, ActorStopped> {
        let reserve = move |reply| AllocatorMessage::Reserve { count, logits, reply };
        self.call_allocator(reserve).await
    }

    fn cache_logits(&mut self, logits: PromptLogits) -> Result<(), ActorStopped> {
        let message = AllocatorMessage::CacheLogits(Box::new(logits));
        self.allocator.cast(message).map_err(|_| ActorStopped(BLOCK_ALLOCATOR))
    }

    /// Asks both actors at the same time.
    async fn counts(&mut self) -> Result<BlockCounts, ActorStopped> {
        let tree = self.call_tree(TreeMessage::Counts);
        let (tree, free) = try_join(tree, self.call_allocator(AllocatorMessage::Free)).await?;
        Ok(BlockCounts { free, evictable: tree.returnable() })
    }

    async fn settle(&mut self) -> Result<(), ActorStopped> {
        self.call_allocator(AllocatorMessage::Settle).await
    }

    async fn flush(&mut self) -> Result<(), ActorStopped> {
        self.call_allocator(AllocatorMessage::Flush).await
    }

    async fn audit(&mut self) -> Result<Result<AuditReport, String>, ActorStopped> {
        self.call_allocator(AllocatorMessage::Audit).await
    }
}
