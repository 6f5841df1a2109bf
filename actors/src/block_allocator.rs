//! The block allocator's actor: owns the [`BlockPool`] and makes room by asking the tree to evict.
//! Every block that leaves the tree comes by here, so what is kept with such blocks is here too.
//!
//! It calls the tree's actor; nobody it is called by is called by it.

use std::sync::Arc;

use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use stolon_kvcache::{BlockId, BlockLease, BlockPool, Namespace};

use crate::fault::{FaultPlan, Part};
use crate::gauges::Gauges;
use crate::kept_rows::PromptRow;
use crate::memory::pool::{self, Blocks};
use crate::memory::{BlockCounts, CoreAudit, FoundRow, Gone};
use crate::prefix_tree::TreeMessage;

/// What the actor is told.
#[derive(Debug)]
pub(crate) enum AllocatorMessage {
    /// So many blocks for one sequence, or none.
    Reserve(usize, RpcReplyPort<Option<BlockLease>>),
    /// Blocks that the tree did not take.
    Release(Vec<BlockId>),
    /// Keep a prompt's last row of logits while its block is in the tree.
    KeepRow(Box<PromptRow>),
    /// Look for the last row of logits of the prompt `tokens`.
    FindRow {
        block: BlockId,
        namespace: Namespace,
        tokens: Vec<u32>,
        reply: RpcReplyPort<FoundRow>,
    },
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
    type State = Blocks;
    type Arguments = Blocks;

    async fn pre_start(
        &self,
        _: ActorRef<AllocatorMessage>,
        blocks: Blocks,
    ) -> Result<Blocks, ActorProcessingErr> {
        Ok(blocks)
    }

    async fn handle(
        &self,
        _: ActorRef<AllocatorMessage>,
        message: AllocatorMessage,
        state: &mut Blocks,
    ) -> Result<(), ActorProcessingErr> {
        self.faults.strike(Part::BlockAllocator)?;
        // A caller that has gone needs no answer; dropping a lease returns its blocks.
        match message {
            AllocatorMessage::Reserve(count, reply) => {
                let lease = self.reserve(state, count).await?;
                self.publish(&mut state.pool);
                let _ = reply.send(lease);
            }
            AllocatorMessage::Release(blocks) => {
                state.pool.release(blocks);
                self.publish(&mut state.pool);
            }
            AllocatorMessage::KeepRow(row) => state.rows.keep(*row),
            AllocatorMessage::FindRow { block, namespace, tokens, reply } => {
                let logits = state.rows.get(block, &namespace, &tokens);
                let _ = reply.send(FoundRow { tokens, logits });
            }
            AllocatorMessage::Flush(reply) => {
                state.rows.clear();
                state.pool.release(self.ask_tree(TreeMessage::Flush).await?);
                self.publish(&mut state.pool);
                let _ = reply.send(());
            }
            AllocatorMessage::Counts(reply) => {
                let tree = self.ask_tree(TreeMessage::Counts).await?;
                self.publish(&mut state.pool);
                let _ = reply.send(pool::counts(&state.pool, &tree));
            }
            AllocatorMessage::Settle(reply) => {
                // What was flushed while it was in use comes back by eviction, before anything
                // that is still in the index.
                let flushed = self.ask_tree(TreeMessage::Counts).await?.detached;
                if flushed > 0 {
                    let evict = |reply| TreeMessage::Evict(flushed, reply);
                    state.take_back(self.ask_tree(evict).await?);
                }
                self.publish(&mut state.pool);
                let _ = reply.send(());
            }
            AllocatorMessage::Audit(reply) => {
                let tree = self.ask_tree(TreeMessage::Audit).await?;
                self.publish(&mut state.pool);
                let _ = reply.send(tree.and_then(|tree| pool::audit(&mut state.pool, &tree)));
            }
        }
        Ok(())
    }
}

impl BlockAllocatorActor {
    /// Reserves blocks, evicting only if that gives enough.
    async fn reserve(&self, state: &mut Blocks, count: usize) -> Result<Option<BlockLease>, Gone> {
        let missing = match state.pool.reserve(count) {
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
        state.take_back(self.ask_tree(|reply| TreeMessage::Evict(missing, reply)).await?);
        Ok(state.pool.reserve(count).ok())
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
