//! The prefix tree's actor: owns the one [`TreeWriter`] and makes every change to the tree.
//!
//! It calls no other actor. Readers query the tree concurrently, without a message.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use stolon_kvcache::{
    ConfigError, EvictedBlock, Namespace, PinError, PinId, PinInfo, TreeCounts, TreeWriter,
};
use stolon_scheduler::{Acquired, CacheStats, CommitItem, Committed, Gauges, commit};

use crate::cache::{CacheEvents, Pin};
use crate::fault::{EnginePart, FaultPlan};

/// The messages of the prefix tree's actor.
#[derive(Debug)]
pub(crate) enum TreeMessage {
    /// Lock the longest match of the first `limit` tokens.
    Acquire {
        namespace: Namespace,
        tokens: Arc<Vec<u32>>,
        limit: usize,
        reply: RpcReplyPort<Acquired>,
    },
    /// Add full blocks.
    Commit(Vec<CommitItem>, RpcReplyPort<Vec<Committed>>),
    /// Evict up to this many blocks and return them.
    Evict(usize, RpcReplyPort<Vec<EvictedBlock>>),
    /// Remove everything that no request holds and return its blocks.
    Flush(RpcReplyPort<Vec<EvictedBlock>>),
    /// Count blocks.
    Counts(RpcReplyPort<TreeCounts>),
    /// Verify the tree's invariants, then count blocks.
    Audit(RpcReplyPort<Result<TreeCounts, String>>),
    /// Pin the cached prefix of these tokens, for `ttl` or until it is unpinned.
    Pin {
        namespace: Namespace,
        tokens: Vec<u32>,
        ttl: Option<Duration>,
        reply: RpcReplyPort<Result<PinId, PinError>>,
    },
    /// End a pin. Answers whether there was one.
    Unpin(PinId, RpcReplyPort<bool>),
    /// A pin's time to live has passed.
    Expire(PinId),
    /// List all pins.
    Pins(RpcReplyPort<Vec<Pin>>),
    /// Report all changes from now on, and what is cached already.
    Subscribe(usize, RpcReplyPort<Result<CacheEvents, ConfigError>>),
    /// Report statistics.
    Stats(RpcReplyPort<CacheStats>),
}

/// The state of the actor.
#[derive(Debug)]
pub(crate) struct TreeState {
    writer: TreeWriter,
    /// When pins with a time to live end. The tree knows no wall clock, so the actor sends itself a
    /// message at that time.
    deadlines: HashMap<PinId, Instant>,
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
        Ok(TreeState { writer, deadlines: HashMap::new() })
    }

    async fn handle(
        &self,
        myself: ActorRef<TreeMessage>,
        message: TreeMessage,
        state: &mut TreeState,
    ) -> Result<(), ActorProcessingErr> {
        self.faults.strike(EnginePart::PrefixTree)?;
        let writer = &mut state.writer;
        // A send fails only if the caller has stopped; dropping a lease returns what it holds.
        match message {
            TreeMessage::Acquire { namespace, tokens, limit, reply } => {
                let lease = writer.acquire(&namespace, &tokens[..limit]);
                let evictable = self.publish(writer).evictable;
                drop(tokens);
                let _ = reply.send(Acquired { lease, evictable });
            }
            TreeMessage::Commit(items, reply) => {
                let committed = items.into_iter().map(|item| commit(writer, item)).collect();
                self.publish(writer);
                let _ = reply.send(committed);
            }
            TreeMessage::Evict(count, reply) => {
                let evicted = writer.evict(count);
                self.gauges.count_evictions(evicted.len());
                self.publish(writer);
                let _ = reply.send(evicted);
            }
            TreeMessage::Flush(reply) => {
                let before = writer.counts().cached;
                let flushed = writer.flush();
                self.gauges.count_requested_evictions(before);
                state.deadlines.clear();
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
                let pinned = writer.pin(&namespace, &tokens);
                self.publish(writer);
                if let (Ok(id), Some(ttl)) = (pinned, ttl)
                    && let Some(end) = Instant::now().checked_add(ttl)
                {
                    state.deadlines.insert(id, end);
                    // If this actor has stopped by then, the pin has ended with it.
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
            TreeMessage::Stats(reply) => {
                let counts = self.publish(writer);
                let stats = CacheStats::new(&counts, writer.stats(), writer.index_bytes());
                let _ = reply.send(stats);
            }
        }
        Ok(())
    }
}

impl TreeState {
    fn pin(&self, info: PinInfo) -> Pin {
        let deadline = self.deadlines.get(&info.id);
        Pin {
            id: info.id,
            tokens: info.position_count,
            blocks: info.block_count,
            ends_in: deadline.map(|end| end.saturating_duration_since(Instant::now())),
        }
    }
}

impl PrefixTreeActor {
    fn unpin(&self, state: &mut TreeState, id: PinId) -> bool {
        state.deadlines.remove(&id);
        let was_there = state.writer.unpin(id);
        self.publish(&mut state.writer);
        was_there
    }

    /// Sets the gauges and returns the counts.
    fn publish(&self, writer: &mut TreeWriter) -> TreeCounts {
        let counts = writer.counts();
        self.gauges.set_tree(&counts);
        counts
    }
}
