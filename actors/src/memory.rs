//! [`Memory`] behind the actors of the prefix tree and the block allocator.

use std::pin::pin;
use std::sync::Arc;

use futures::FutureExt;
use futures::future::{Either, select, try_join};
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
///
/// The end of the actor ends the call, too. Mostly, the actor's mailbox drops the message with its reply
/// port then. But a message that is sent while the mailbox is being dropped may stay in it for as long as
/// anybody can send to it, which the caller can.
pub(crate) async fn call<M: Message, T: Send + 'static>(
    actor: &ActorRef<M>,
    message: impl FnOnce(RpcReplyPort<T>) -> M,
    name: &'static str,
) -> Result<T, ActorStopped> {
    let answer = pin!(actor.call(message, None));
    let answer = match select(answer, pin!(actor.wait(None))).await {
        Either::Left((answer, _)) => Some(answer),
        // It may have answered just before its end.
        Either::Right((_, answer)) => answer.now_or_never(),
    };
    match answer {
        Some(Ok(CallResult::Success(answer))) => Ok(answer),
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use ractor::{Actor, ActorProcessingErr};

    use super::*;

    /// Keeps the reply ports of all calls, as a mailbox may, and fails at the first one.
    struct Keeps(Arc<Mutex<Vec<RpcReplyPort<u32>>>>);

    impl Actor for Keeps {
        type Msg = RpcReplyPort<u32>;
        type State = ();
        type Arguments = ();

        async fn pre_start(
            &self,
            _: ActorRef<Self::Msg>,
            (): (),
        ) -> Result<(), ActorProcessingErr> {
            Ok(())
        }

        async fn handle(
            &self,
            _: ActorRef<Self::Msg>,
            port: RpcReplyPort<u32>,
            (): &mut (),
        ) -> Result<(), ActorProcessingErr> {
            self.0.lock().expect("no panic").push(port);
            Err("it fails".into())
        }
    }

    /// Goal: a call ends when the actor has ended, also if its reply port still exists.
    #[tokio::test]
    async fn a_call_ends_with_its_actor() {
        let ports = Arc::default();
        let (actor, task) =
            Actor::spawn(None, Keeps(Arc::clone(&ports)), ()).await.expect("an actor");
        let limit = Duration::from_secs(10);
        let call = call(&actor, |port| port, "the actor");
        let answer = tokio::time::timeout(limit, call).await.expect("it does not wait forever");
        assert_eq!(answer, Err(ActorStopped("the actor")));
        assert_eq!(ports.lock().expect("no panic").len(), 1, "the port was kept");
        task.await.expect("no panic");
    }
}
