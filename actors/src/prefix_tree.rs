//! The prefix tree's actor: owns the one [`TreeWriter`] and makes every change to the tree.
//!
//! It calls no other actor. Readers query the tree concurrently, without a message.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use stolon_kvcache::{
    ConfigError, EvictedBlock, EvictionPolicy, Namespace, PinId, PinInfo, TreeCounts, TreeWriter,
};
use stolon_scheduler::{
    Acquired, CacheStats, CommitItem, Committed, EngineError, Evicted, EvictionDemand, Gauges,
    PinBudget, commit, evict,
};

use crate::cache::{CacheEvents, Pin, PinOptions, Removal};
use crate::fault::{EnginePart, FaultPlan};

/// The messages of the prefix tree's actor.
#[derive(Debug)]
pub(crate) enum TreeMessage {
    /// Lock the longest match of the first `limit` tokens, for a request with this priority.
    Acquire {
        namespace: Namespace,
        tokens: Arc<Vec<u32>>,
        limit: usize,
        priority: i32,
        reply: RpcReplyPort<Acquired>,
    },
    /// Add full blocks.
    Commit(Vec<CommitItem>, RpcReplyPort<Vec<Committed>>),
    /// Evict what is demanded and return it, with the prefixes that it ended if `note` is set.
    Evict { demand: EvictionDemand, note: bool, reply: RpcReplyPort<Evicted> },
    /// Remove everything that no request holds and return its blocks.
    Flush(RpcReplyPort<Vec<EvictedBlock>>),
    /// Remove some of what no request holds and return its blocks.
    Remove(Removal, RpcReplyPort<Vec<EvictedBlock>>),
    /// Evict in this order from now on.
    SetEvictionPolicy(EvictionPolicy),
    /// Count blocks.
    Counts(RpcReplyPort<TreeCounts>),
    /// Verify the tree's invariants, then count blocks.
    Audit(RpcReplyPort<Result<TreeCounts, String>>),
    /// Pin the cached prefix of these tokens.
    Pin {
        namespace: Namespace,
        tokens: Vec<u32>,
        options: PinOptions,
        reply: RpcReplyPort<Result<PinId, EngineError>>,
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
    /// What the tree does not know of the pins.
    pins: HashMap<PinId, PinRecord>,
}

/// What the tree does not know of a pin.
#[derive(Debug)]
struct PinRecord {
    options: PinOptions,
    token_ids: Arc<[u32]>,
    /// The chained hash of its last block.
    last_hash: u64,
    /// When it ends, unless it is used. The tree knows no wall clock, so the actor sends itself a
    /// message at that time.
    end: Option<Instant>,
    /// When its prefix had last been used when `end` was set, in ticks of the tree.
    last_use: Option<u64>,
}

/// The actor.
pub(crate) struct PrefixTreeActor {
    pub(crate) gauges: Arc<Gauges>,
    pub(crate) pin_budget: Arc<PinBudget>,
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
        self.pin_budget.set_pinned(false);
        Ok(TreeState { writer, pins: HashMap::new() })
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
                let lease = writer.acquire_prioritized(&namespace, &tokens[..limit], priority);
                let evictable = self.publish(writer).evictable;
                drop(tokens);
                let _ = reply.send(Acquired { lease, evictable });
            }
            TreeMessage::Commit(items, reply) => {
                let committed = items.into_iter().map(|item| commit(writer, item)).collect();
                self.publish(writer);
                let _ = reply.send(committed);
            }
            TreeMessage::Evict { demand, note, reply } => {
                let evicted = evict(writer, demand, note);
                self.gauges.count_evictions(evicted.blocks.len());
                self.publish(writer);
                let _ = reply.send(evicted);
            }
            TreeMessage::Flush(reply) => {
                let before = writer.counts().cached;
                let flushed = writer.flush();
                self.gauges.count_requested_evictions(before);
                state.pins.clear();
                self.publish_pins(writer);
                let _ = reply.send(flushed);
            }
            TreeMessage::Remove(removal, reply) => {
                let before = writer.counts().cached;
                let removed = match removal {
                    Removal::Namespace(namespace) => writer.evict_namespace(&namespace),
                    Removal::Prefix(namespace, tokens) => writer.evict_prefix(&namespace, &tokens),
                };
                self.gauges.count_requested_evictions(before - self.publish(writer).cached);
                let live: HashSet<PinId> = writer.pins().iter().map(|pin| pin.id).collect();
                state.pins.retain(|id, _| live.contains(id));
                self.publish_pins(writer);
                let _ = reply.send(removed);
            }
            TreeMessage::SetEvictionPolicy(policy) => writer.set_eviction_order(policy.order()),
            TreeMessage::Counts(reply) => {
                let _ = reply.send(self.publish(writer));
            }
            TreeMessage::Audit(reply) => {
                let checked = writer.audit().map_err(|error| error.to_string());
                let _ = reply.send(checked.map(|_| self.publish(writer)));
            }
            TreeMessage::Pin { namespace, tokens, options, reply } => {
                let pinned = match self.pin_budget.begin_pin() {
                    true => writer.pin(&namespace, &tokens).map_err(EngineError::from),
                    false => Err(EngineError::PinBudgetInUse),
                };
                self.publish_pins(writer);
                if let Ok(id) = pinned {
                    state.keep(id, &tokens, options, &myself);
                }
                let _ = reply.send(pinned);
            }
            TreeMessage::Unpin(id, reply) => {
                let _ = reply.send(self.unpin(state, id));
            }
            TreeMessage::Expire(id) => {
                if !state.prolong(id, &myself) {
                    self.unpin(state, id);
                }
            }
            TreeMessage::Pins(reply) => {
                let pins = writer.pins();
                let _ = reply.send(pins.iter().map(|info| state.pin(info)).collect());
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
    /// Remembers a new pin of the prefix of `tokens`.
    fn keep(
        &mut self,
        id: PinId,
        tokens: &[u32],
        options: PinOptions,
        myself: &ActorRef<TreeMessage>,
    ) {
        let infos = self.writer.pins();
        let Some(info) = infos.iter().find(|info| info.id == id) else { return };
        let pinned = &tokens[..info.position_count];
        let hashes = self.writer.reader().block_hashes(&info.namespace, pinned);
        let record = PinRecord {
            options,
            token_ids: pinned.into(),
            last_hash: hashes.last().copied().unwrap_or_default(),
            end: None,
            last_use: None,
        };
        self.pins.insert(id, record);
        self.set_end(id, myself);
    }

    /// Lets a pin with a time to live end after that time, from now on.
    fn set_end(&mut self, id: PinId, myself: &ActorRef<TreeMessage>) {
        let Some(pin) = self.pins.get_mut(&id) else { return };
        let Some(ttl) = pin.options.ttl else { return };
        pin.end = Instant::now().checked_add(ttl);
        pin.last_use = self.writer.pin_last_use(id);
        if pin.end.is_some() {
            // If this actor has stopped by then, the pin has ended with it.
            drop(myself.send_after(ttl, move || TreeMessage::Expire(id)));
        }
    }

    /// Renews a pin whose time has passed if it has `refresh_on_hit` and was used. Returns whether
    /// it does.
    fn prolong(&mut self, id: PinId, myself: &ActorRef<TreeMessage>) -> bool {
        let Some(pin) = self.pins.get(&id) else { return false };
        if !pin.options.refresh_on_hit || self.writer.pin_last_use(id) == pin.last_use {
            return false;
        }
        self.set_end(id, myself);
        true
    }

    fn pin(&self, info: &PinInfo) -> Pin {
        let record = self.pins.get(&info.id);
        let end = record.and_then(|record| record.end);
        Pin {
            id: info.id,
            namespace: info.namespace,
            tokens: info.position_count,
            blocks: info.block_count,
            ends_in: end.map(|end| end.saturating_duration_since(Instant::now())),
            token_ids: record.map(|record| Arc::clone(&record.token_ids)).unwrap_or_default(),
            last_hash: record.map(|record| record.last_hash).unwrap_or_default(),
            options: record.map(|record| record.options.clone()).unwrap_or_default(),
        }
    }
}

impl PrefixTreeActor {
    fn unpin(&self, state: &mut TreeState, id: PinId) -> bool {
        state.pins.remove(&id);
        let was_there = state.writer.unpin(id);
        self.publish_pins(&mut state.writer);
        was_there
    }

    /// Sets the gauges, and lets long prompts use the blocks of the pin budget if nothing is
    /// pinned.
    fn publish_pins(&self, writer: &mut TreeWriter) {
        self.pin_budget.set_pinned(self.publish(writer).pinned > 0);
    }

    /// Sets the gauges and returns the counts.
    fn publish(&self, writer: &mut TreeWriter) -> TreeCounts {
        let counts = writer.counts();
        self.gauges.set_tree(&counts);
        counts
    }
}
