//! [`Memory`] behind the tree's and the allocator's actors.

use ractor::rpc::CallResult;
use ractor::{ActorRef, Message, RpcReplyPort};
use stolon_kvcache::{BlockId, BlockLease, Namespace};

use super::{Acquired, BlockCounts, CommitItem, Committed, CoreAudit, FoundRow, Gone, Memory};
use crate::block_allocator::AllocatorMessage;
use crate::kept_rows::PromptRow;
use crate::prefix_tree::TreeMessage;

/// The two actors.
#[derive(Clone, Debug)]
pub(crate) struct ActorMemory {
    pub(crate) tree: ActorRef<TreeMessage>,
    pub(crate) allocator: ActorRef<AllocatorMessage>,
}

/// Calls an actor and waits for its answer.
pub(crate) async fn ask<M: Message, T: Send + 'static>(
    actor: &ActorRef<M>,
    message: impl FnOnce(RpcReplyPort<T>) -> M,
    name: &'static str,
) -> Result<T, Gone> {
    match actor.call(message, None).await {
        Ok(CallResult::Success(answer)) => Ok(answer),
        _ => Err(Gone(name)),
    }
}

impl ActorMemory {
    async fn ask_tree<T: Send + 'static>(
        &self,
        message: impl FnOnce(RpcReplyPort<T>) -> TreeMessage,
    ) -> Result<T, Gone> {
        ask(&self.tree, message, "the prefix tree").await
    }

    async fn ask_allocator<T: Send + 'static>(
        &self,
        message: impl FnOnce(RpcReplyPort<T>) -> AllocatorMessage,
    ) -> Result<T, Gone> {
        ask(&self.allocator, message, "the block allocator").await
    }
}

impl Memory for ActorMemory {
    async fn acquire(
        &mut self,
        namespace: &Namespace,
        tokens: Vec<u32>,
        limit: usize,
    ) -> Result<Acquired, Gone> {
        let namespace = namespace.clone();
        self.ask_tree(move |reply| TreeMessage::Acquire { namespace, tokens, limit, reply }).await
    }

    async fn commit(&mut self, items: Vec<CommitItem>) -> Result<Vec<Committed>, Gone> {
        self.ask_tree(move |reply| TreeMessage::Commit(items, reply)).await
    }

    async fn reserve(&mut self, count: usize) -> Result<Option<BlockLease>, Gone> {
        self.ask_allocator(move |reply| AllocatorMessage::Reserve(count, reply)).await
    }

    fn keep_row(&mut self, row: PromptRow) -> Result<(), Gone> {
        let gone = |_| Gone("the block allocator");
        self.allocator.cast(AllocatorMessage::KeepRow(Box::new(row))).map_err(gone)
    }

    async fn find_row(
        &mut self,
        block: BlockId,
        namespace: &Namespace,
        tokens: Vec<u32>,
    ) -> Result<FoundRow, Gone> {
        let namespace = namespace.clone();
        let find = move |reply| AllocatorMessage::FindRow { block, namespace, tokens, reply };
        self.ask_allocator(find).await
    }

    fn release(&mut self, blocks: Vec<BlockId>) -> Result<(), Gone> {
        let gone = |_| Gone("the block allocator");
        self.allocator.cast(AllocatorMessage::Release(blocks)).map_err(gone)
    }

    async fn counts(&mut self) -> Result<BlockCounts, Gone> {
        self.ask_allocator(AllocatorMessage::Counts).await
    }

    async fn settle(&mut self) -> Result<(), Gone> {
        self.ask_allocator(AllocatorMessage::Settle).await
    }

    async fn flush(&mut self) -> Result<(), Gone> {
        self.ask_allocator(AllocatorMessage::Flush).await
    }

    async fn audit(&mut self) -> Result<Result<CoreAudit, String>, Gone> {
        self.ask_allocator(AllocatorMessage::Audit).await
    }
}
