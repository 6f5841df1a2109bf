//! The prefix tree's actor: owns the one [`TreeWriter`] and makes every change to the tree.
//!
//! It calls nobody. Readers query the tree beside it, without a message.

use std::sync::Arc;

use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use stolon_kvcache::{BlockId, Namespace, TreeCounts, TreeWriter};

use crate::fault::{FaultPlan, Part};
use crate::gauges::Gauges;
use crate::memory::{Acquired, CommitItem, Committed};

/// What the actor is told.
#[derive(Debug)]
pub(crate) enum TreeMessage {
    /// Lock the longest match of the first `limit` tokens.
    Acquire { namespace: Namespace, tokens: Vec<u32>, limit: usize, reply: RpcReplyPort<Acquired> },
    /// Take full blocks in.
    Commit(Vec<CommitItem>, RpcReplyPort<Vec<Committed>>),
    /// Give up to so many blocks.
    Evict(usize, RpcReplyPort<Vec<BlockId>>),
    /// Give all blocks that nobody holds.
    Flush(RpcReplyPort<Vec<BlockId>>),
    /// Count blocks.
    Counts(RpcReplyPort<TreeCounts>),
    /// Check everything, then count.
    Audit(RpcReplyPort<Result<TreeCounts, String>>),
}

/// The actor; its state is the writer.
pub(crate) struct PrefixTreeActor {
    pub(crate) gauges: Arc<Gauges>,
    pub(crate) faults: Arc<FaultPlan>,
}

impl Actor for PrefixTreeActor {
    type Msg = TreeMessage;
    type State = TreeWriter;
    type Arguments = TreeWriter;

    async fn pre_start(
        &self,
        _: ActorRef<TreeMessage>,
        writer: TreeWriter,
    ) -> Result<TreeWriter, ActorProcessingErr> {
        Ok(writer)
    }

    async fn handle(
        &self,
        _: ActorRef<TreeMessage>,
        message: TreeMessage,
        writer: &mut TreeWriter,
    ) -> Result<(), ActorProcessingErr> {
        self.faults.strike(Part::PrefixTree)?;
        // A caller that has gone needs no answer; dropping what it asked for returns it.
        match message {
            TreeMessage::Acquire { namespace, tokens, limit, reply } => {
                let lease = writer.acquire(&namespace, &tokens[..limit]);
                let evictable = self.publish(writer).evictable;
                let _ = reply.send(Acquired { tokens, lease, evictable });
            }
            TreeMessage::Commit(items, reply) => {
                let committed = items.into_iter().map(|item| commit(writer, item)).collect();
                self.publish(writer);
                let _ = reply.send(committed);
            }
            TreeMessage::Evict(count, reply) => {
                let evicted = writer.evict(count);
                self.gauges.evictions.add(evicted.len());
                self.publish(writer);
                let _ = reply.send(evicted);
            }
            TreeMessage::Flush(reply) => {
                let flushed = writer.flush();
                self.publish(writer);
                let _ = reply.send(flushed);
            }
            TreeMessage::Counts(reply) => {
                let _ = reply.send(self.publish(writer));
            }
            TreeMessage::Audit(reply) => {
                let checked = writer.audit().map_err(|error| error.to_string());
                let _ = reply.send(checked.map(|_| self.publish(writer)));
            }
        }
        Ok(())
    }
}

impl PrefixTreeActor {
    fn publish(&self, writer: &mut TreeWriter) -> TreeCounts {
        let counts = writer.counts();
        self.gauges.blocks_cached.set(counts.cached + counts.detached);
        self.gauges.blocks_evictable.set(counts.evictable);
        counts
    }
}

/// Puts one sequence's full blocks into the tree.
pub(crate) fn commit(writer: &mut TreeWriter, item: CommitItem) -> Committed {
    let CommitItem { tokens, len, mut lease, blocks } = item;
    let commit = writer.commit(&mut lease, &tokens[..len], &blocks);
    Committed { tokens, lease, duplicates: commit.duplicates }
}
