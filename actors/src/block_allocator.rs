//! The block allocator's actor: owns the [`BlockPool`] and makes room by asking the tree to evict.
//!
//! It calls the tree's actor; nobody it is called by is called by it.

use std::sync::Arc;

use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use stolon_kvcache::{BlockId, BlockLease, BlockPool};

use crate::fault::{FaultPlan, Part};
use crate::gauges::Gauges;
use crate::memory::{BlockCounts, CoreAudit, Gone, pool};
use crate::prefix_tree::TreeMessage;

/// What the actor is told.
#[derive(Debug)]
pub(crate) enum AllocatorMessage {
    /// So many blocks for one sequence, or none.
    Reserve(usize, RpcReplyPort<Option<BlockLease>>),
    /// Blocks that the tree did not take.
    Release(Vec<BlockId>),
    /// Empty the cache.
    Flush(RpcReplyPort<()>),
    /// Count blocks, after everything dropped has come back.
    Counts(RpcReplyPort<BlockCounts>),
    /// Take in everything that has come back; nothing is held at this moment.
    Settle(RpcReplyPort<()>),
    /// Check the pool, the tree, and one against the other.
    Audit(RpcReplyPort<Result<CoreAudit, String>>),
}

/// The actor.
pub(crate) struct BlockAllocatorActor {
    pub(crate) tree: ActorRef<TreeMessage>,
    pub(crate) gauges: Arc<Gauges>,
    pub(crate) faults: Arc<FaultPlan>,
}

impl Actor for BlockAllocatorActor {
    type Msg = AllocatorMessage;
    type State = BlockPool;
    type Arguments = BlockPool;

    async fn pre_start(
        &self,
        _: ActorRef<AllocatorMessage>,
        pool: BlockPool,
    ) -> Result<BlockPool, ActorProcessingErr> {
        Ok(pool)
    }

    async fn handle(
        &self,
        _: ActorRef<AllocatorMessage>,
        message: AllocatorMessage,
        pool: &mut BlockPool,
    ) -> Result<(), ActorProcessingErr> {
        self.faults.strike(Part::BlockAllocator)?;
        // A caller that has gone needs no answer; dropping a lease returns its blocks.
        match message {
            AllocatorMessage::Reserve(count, reply) => {
                let lease = self.reserve(pool, count).await?;
                self.publish(pool);
                let _ = reply.send(lease);
            }
            AllocatorMessage::Release(blocks) => {
                pool.release(blocks);
                self.publish(pool);
            }
            AllocatorMessage::Flush(reply) => {
                pool.release(self.ask_tree(TreeMessage::Flush).await?);
                self.publish(pool);
                let _ = reply.send(());
            }
            AllocatorMessage::Counts(reply) => {
                let tree = self.ask_tree(TreeMessage::Counts).await?;
                self.publish(pool);
                let _ = reply.send(pool::counts(pool, &tree));
            }
            AllocatorMessage::Settle(reply) => {
                // What was flushed while it was in use comes back by eviction, before anything
                // that is still in the index.
                let flushed = self.ask_tree(TreeMessage::Counts).await?.detached;
                if flushed > 0 {
                    pool.release(self.ask_tree(|reply| TreeMessage::Evict(flushed, reply)).await?);
                }
                self.publish(pool);
                let _ = reply.send(());
            }
            AllocatorMessage::Audit(reply) => {
                let tree = self.ask_tree(TreeMessage::Audit).await?;
                self.publish(pool);
                let _ = reply.send(tree.and_then(|tree| pool::audit(pool, &tree)));
            }
        }
        Ok(())
    }
}

impl BlockAllocatorActor {
    /// Reserves blocks, evicting only if that gives enough.
    async fn reserve(
        &self,
        pool: &mut BlockPool,
        count: usize,
    ) -> Result<Option<BlockLease>, Gone> {
        let missing = match pool.reserve(count) {
            Ok(lease) => return Ok(Some(lease)),
            Err(shortage) => shortage.missing(),
        };
        // Nothing is missing when enough blocks come free with the step in flight.
        if missing == 0 {
            return Ok(None);
        }
        let tree = self.ask_tree(TreeMessage::Counts).await?;
        if tree.evictable + tree.detached < missing {
            return Ok(None);
        }
        pool.release(self.ask_tree(|reply| TreeMessage::Evict(missing, reply)).await?);
        Ok(pool.reserve(count).ok())
    }

    async fn ask_tree<T: Send + 'static>(
        &self,
        message: impl FnOnce(RpcReplyPort<T>) -> TreeMessage,
    ) -> Result<T, Gone> {
        crate::memory::actors::ask(&self.tree, message, "the prefix tree").await
    }

    fn publish(&self, pool: &mut BlockPool) {
        let counts = pool.counts();
        self.gauges.blocks_free.set(counts.free + counts.fenced);
        self.gauges.blocks_reserved.set(counts.reserved);
    }
}
