//! The prefix tree's actor: owns the one [`TreeWriter`] and makes every change to the tree.
//!
//! It calls nobody. Readers query the tree beside it, without a message.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use stolon_kvcache::{
    BlockId, ConfigError, EventReceiver, Namespace, PinError, PinId, PinInfo, Snapshot, TreeCounts,
    TreeStats, TreeWriter,
};

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
    /// Keep what is cached of these tokens, for so long or until told otherwise.
    Pin {
        namespace: Namespace,
        tokens: Vec<u32>,
        ttl: Option<Duration>,
        reply: RpcReplyPort<Result<PinId, PinError>>,
    },
    /// End a pin; whether there was one.
    Unpin(PinId, RpcReplyPort<bool>),
    /// A pin's time is over.
    Expire(PinId),
    /// All pins.
    Pins(RpcReplyPort<Vec<CorePin>>),
    /// Report all changes from now on, with what is there already.
    Subscribe(usize, RpcReplyPort<Result<CacheEvents, ConfigError>>),
    /// What was counted.
    Report(RpcReplyPort<CacheReport>),
}

/// A pinned prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CorePin {
    /// What it holds.
    pub info: PinInfo,
    /// When it ends by itself, if it does.
    pub ends: Option<Instant>,
}

/// What is cached, and a queue of what changes.
#[derive(Debug)]
pub struct CacheEvents {
    /// The cache at the moment of the subscription.
    pub snapshot: Snapshot,
    /// Every change since.
    pub receiver: EventReceiver,
}

/// Numbers about the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheReport {
    /// Blocks and nodes at this moment.
    pub counts: TreeCounts,
    /// Counts since the tree was made.
    pub stats: TreeStats,
    /// Bytes of the index itself.
    pub index_bytes: usize,
}

/// What the actor owns.
#[derive(Debug)]
pub(crate) struct TreeState {
    writer: TreeWriter,
    /// When pins end by themselves. The tree knows no wall clock, so the actor sends itself word.
    ends: HashMap<PinId, Instant>,
}

/// The actor.
pub(crate) struct PrefixTreeActor {
    pub(crate) gauges: Arc<Gauges>,
    pub(crate) faults: Arc<FaultPlan>,
}

impl Actor for PrefixTreeActor {
    type Msg = TreeMessage;
    type State = TreeState;
    type Arguments = TreeWriter;

    async fn pre_start(
        &self,
        _: ActorRef<TreeMessage>,
        writer: TreeWriter,
    ) -> Result<TreeState, ActorProcessingErr> {
        Ok(TreeState { writer, ends: HashMap::new() })
    }

    async fn handle(
        &self,
        myself: ActorRef<TreeMessage>,
        message: TreeMessage,
        state: &mut TreeState,
    ) -> Result<(), ActorProcessingErr> {
        self.faults.strike(Part::PrefixTree)?;
        let writer = &mut state.writer;
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
                state.ends.clear();
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
            TreeMessage::Pin { namespace, tokens, ttl, reply } => {
                let pinned = writer.pin(&namespace, &tokens, None);
                self.publish(writer);
                if let (Ok(id), Some(ttl)) = (pinned, ttl)
                    && let Some(end) = Instant::now().checked_add(ttl)
                {
                    state.ends.insert(id, end);
                    // If this actor is gone by then, so is the pin.
                    drop(myself.send_after(ttl, move || TreeMessage::Expire(id)));
                }
                let _ = reply.send(pinned);
            }
            TreeMessage::Unpin(id, reply) => {
                let _ = reply.send(self.unpin(state, id));
            }
            TreeMessage::Expire(id) => {
                self.unpin(state, id);
            }
            TreeMessage::Pins(reply) => {
                let pins = writer.pins().into_iter();
                let _ = reply.send(pins.map(|info| state.pin(info)).collect());
            }
            TreeMessage::Subscribe(capacity, reply) => {
                let receiver = writer.subscribe(capacity);
                let with_snapshot =
                    |receiver| CacheEvents { snapshot: writer.snapshot(), receiver };
                let _ = reply.send(receiver.map(with_snapshot));
            }
            TreeMessage::Report(reply) => {
                let counts = self.publish(writer);
                let (stats, index_bytes) = (writer.stats().clone(), writer.index_bytes());
                let _ = reply.send(CacheReport { counts, stats, index_bytes });
            }
        }
        Ok(())
    }
}

impl TreeState {
    fn pin(&self, info: PinInfo) -> CorePin {
        CorePin { ends: self.ends.get(&info.id).copied(), info }
    }
}

impl PrefixTreeActor {
    fn unpin(&self, state: &mut TreeState, id: PinId) -> bool {
        state.ends.remove(&id);
        let was_there = state.writer.unpin(id);
        self.publish(&mut state.writer);
        was_there
    }

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
