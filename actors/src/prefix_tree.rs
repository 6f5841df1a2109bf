//! The prefix tree's actor: owns the one [`TreeWriter`] and makes every change to the tree.
//!
//! It calls no other actor. Readers query the tree concurrently, without a message.

mod pins;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use stolon_kvcache::{
    ConfigError, EvictedBlocks, EvictionPolicy, Namespace, PinId, TreeCounts, TreeWriter,
};
use stolon_scheduler::{
    Acquired, CacheStats, CheckpointItem, CommitItem, Committed, Evicted, EvictionCounts,
    EvictionDemand, Gauges, KvSink, PinBudget, Pinned, Removal, acquire, commit, commit_checkpoint,
    evict, remove,
};

use crate::cache::CacheEvents;
use crate::fault::{EnginePart, FaultPlan};
use pins::PinRecord;

pub(crate) use pins::PinMessage;

/// The messages of the prefix tree's actor.
#[derive(Debug)]
pub(crate) enum TreeMessage {
    /// Lock the longest match of the first `limit` tokens, as
    /// [`Memory::acquire`](stolon_scheduler::Memory::acquire) does.
    Acquire {
        namespace: Namespace,
        tokens: Arc<Vec<u32>>,
        limit: usize,
        priority: Option<i32>,
        reply: RpcReplyPort<Acquired>,
    },
    /// Add full blocks.
    Commit(Vec<CommitItem>, RpcReplyPort<Vec<Committed>>),
    /// Add checkpoints.
    CommitCheckpoints(Vec<CheckpointItem>, RpcReplyPort<Vec<bool>>),
    /// Evict what is demanded and return it, with the prefixes that it ended if `note` is set.
    Evict { demand: EvictionDemand, note: bool, reply: RpcReplyPort<Evicted> },
    /// Remove everything that no request holds and return its blocks.
    Flush(RpcReplyPort<EvictedBlocks>),
    /// Remove part of the tree and return its blocks.
    Remove(Removal, RpcReplyPort<EvictedBlocks>),
    /// Evict in this order from now on.
    SetEvictionPolicy(EvictionPolicy),
    /// Count blocks.
    Counts(RpcReplyPort<TreeCounts>),
    /// Verify the tree's invariants, then count blocks.
    Audit(RpcReplyPort<Result<TreeCounts, String>>),
    /// Begin, end or list pins.
    Pin(PinMessage),
    /// Report all changes from now on, and the present content of the cache.
    Subscribe(usize, RpcReplyPort<Result<CacheEvents, ConfigError>>),
    /// Report statistics.
    Stats(RpcReplyPort<CacheStats>),
}

#[derive(Debug)]
pub(crate) struct TreeState {
    writer: TreeWriter,
    /// The properties of the pins that the tree does not store.
    pins: HashMap<PinId, PinRecord>,
    /// The evictions that the gauges have counted.
    counted: EvictionCounts,
}

pub(crate) struct PrefixTreeActor {
    pub(crate) gauges: Arc<Gauges>,
    pub(crate) pin_budget: Arc<PinBudget>,
    /// The sink that also stores pinned prefixes, if one is configured.
    pub(crate) sink_of_pins: Option<Arc<dyn KvSink>>,
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
        self.pin_budget.set_pinned(Pinned::default());
        Ok(TreeState { writer, pins: HashMap::new(), counted: EvictionCounts::default() })
    }

    async fn handle(
        &self,
        myself: ActorRef<TreeMessage>,
        message: TreeMessage,
        state: &mut TreeState,
    ) -> Result<(), ActorProcessingErr> {
        self.faults.trigger(EnginePart::PrefixTree)?;
        let writer = &mut state.writer;
        // A send fails only if the caller has stopped; dropping a lease returns what it holds.
        match message {
            TreeMessage::Acquire { namespace, tokens, limit, priority, reply } => {
                let acquired = acquire(writer, &namespace, &tokens[..limit], priority);
                state.renew_used_pins();
                self.publish(state);
                drop(tokens);
                let _ = reply.send(acquired);
            }
            TreeMessage::Commit(items, reply) => {
                let committed = items.into_iter().map(|item| commit(writer, item)).collect();
                state.renew_used_pins();
                self.publish(state);
                let _ = reply.send(committed);
            }
            TreeMessage::CommitCheckpoints(items, reply) => {
                let commit = |item| commit_checkpoint(writer, item);
                let committed = items.into_iter().map(commit).collect();
                self.publish(state);
                let _ = reply.send(committed);
            }
            TreeMessage::Evict { demand, note, reply } => {
                let evicted = evict(writer, demand, note);
                self.publish(state);
                let _ = reply.send(evicted);
            }
            TreeMessage::Flush(reply) => {
                let flushed = writer.flush();
                state.pins.clear();
                self.publish_pins(state);
                let _ = reply.send(flushed);
            }
            TreeMessage::Remove(removal, reply) => {
                if let Removal::Prefix(namespace, tokens) = &removal {
                    state.unmark(namespace, tokens);
                }
                let writer = &mut state.writer;
                let removed = remove(writer, &removal);
                let live: HashSet<PinId> = writer.pins().iter().map(|pin| pin.id).collect();
                state.pins.retain(|id, _| live.contains(id));
                self.publish_pins(state);
                let _ = reply.send(removed);
            }
            TreeMessage::SetEvictionPolicy(policy) => writer.set_eviction_order(policy.order()),
            TreeMessage::Counts(reply) => {
                let _ = reply.send(self.publish(state));
            }
            TreeMessage::Audit(reply) => {
                let checked = writer.audit().map_err(|error| error.to_string());
                let _ = reply.send(checked.map(|()| self.publish(state)));
            }
            TreeMessage::Pin(message) => self.handle_pin(message, state, &myself),
            TreeMessage::Subscribe(capacity, reply) => {
                let receiver = writer.subscribe(capacity);
                let with_snapshot =
                    |receiver| CacheEvents { snapshot: writer.snapshot(), receiver };
                let _ = reply.send(receiver.map(with_snapshot));
            }
            TreeMessage::Stats(reply) => {
                let counts = self.publish(state);
                let writer = &state.writer;
                let stats = CacheStats::new(&counts, writer.stats(), writer.index_bytes());
                let _ = reply.send(stats);
            }
        }
        Ok(())
    }
}

impl PrefixTreeActor {
    /// Sets the gauges, and lets long prompts use the blocks of the pin budget that are not pinned.
    fn publish_pins(&self, state: &mut TreeState) {
        let (blocks, pins) = (self.publish(state).pinned, state.writer.pin_count());
        self.pin_budget.set_pinned(Pinned { blocks, pins });
    }

    /// Sets the gauges, counts the new evictions and returns the counts.
    fn publish(&self, state: &mut TreeState) -> TreeCounts {
        let counts = state.writer.counts();
        self.gauges.set_tree(&counts);
        let evictions = EvictionCounts::new(state.writer.stats());
        self.gauges.count_evictions(state.counted, evictions);
        state.counted = evictions;
        counts
    }
}
