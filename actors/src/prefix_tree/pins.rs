//! Pins: the properties that the tree does not store, and their times to live.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ractor::{ActorRef, RpcReplyPort};
use stolon_kvcache::{Namespace, PinId, PinInfo, TreeWriter, checkpoint_positions};
use stolon_scheduler::{EngineError, SaveRequest};

use super::{PrefixTreeActor, TreeMessage, TreeState};
use crate::cache::{Pin, PinOptions};

/// The messages that concern pins.
#[derive(Debug)]
pub(crate) enum PinMessage {
    /// Pin the cached prefix of these tokens.
    Begin {
        namespace: Namespace,
        tokens: Vec<u32>,
        options: PinOptions,
        reply: RpcReplyPort<Result<NewPin, EngineError>>,
    },
    /// End a pin. Answers whether there was one.
    End(PinId, RpcReplyPort<bool>),
    /// A pin's time to live has passed.
    Expire(PinId),
    /// List all pins.
    List(RpcReplyPort<Vec<Pin>>),
}

/// A pin that was made.
#[derive(Debug)]
pub(crate) struct NewPin {
    pub(crate) id: PinId,
    /// The blocks of its prefix, and of the prefix's checkpoint, that are to be stored.
    pub(crate) saves: Vec<SaveRequest>,
}

/// The properties of a pin that the tree does not store.
#[derive(Debug)]
pub(super) struct PinRecord {
    options: PinOptions,
    token_ids: Arc<[u32]>,
    /// The chained hash of its last block.
    last_hash: u64,
    /// When it ends, unless it is used. The tree knows no wall clock, so the actor sends itself a
    /// message for that time.
    end: Option<Instant>,
    /// The last use of its prefix at the time when `end` was set, in ticks of the tree.
    last_use: Option<u64>,
    /// Protects the stored prefix. It has no other use than to be dropped.
    _stored: Vec<Box<dyn Any + Send>>,
}

impl PrefixTreeActor {
    pub(super) fn handle_pin(
        &self,
        message: PinMessage,
        state: &mut TreeState,
        myself: &ActorRef<TreeMessage>,
    ) {
        // A send fails only if the caller has stopped.
        match message {
            PinMessage::Begin { namespace, tokens, options, reply } => {
                let pinned = match self.pin_budget.begin_pin() {
                    true => state.writer.pin(&namespace, &tokens).map_err(EngineError::from),
                    false => Err(EngineError::PinBudgetInUse),
                };
                self.publish_pins(state);
                let keep = |id| NewPin { id, saves: self.keep(state, id, tokens, options, myself) };
                let _ = reply.send(pinned.map(keep));
            }
            PinMessage::End(id, reply) => {
                let _ = reply.send(self.unpin(state, id));
            }
            PinMessage::Expire(id) => {
                if !state.was_renewed(id, myself) {
                    self.unpin(state, id);
                }
            }
            PinMessage::List(reply) => {
                let pins = state.writer.pins();
                let _ = reply.send(pins.iter().map(|info| state.pin(info)).collect());
            }
        }
    }

    /// Remembers a new pin of the prefix of `tokens`. Returns the blocks that are to be stored.
    fn keep(
        &self,
        state: &mut TreeState,
        id: PinId,
        mut tokens: Vec<u32>,
        options: PinOptions,
        myself: &ActorRef<TreeMessage>,
    ) -> Vec<SaveRequest> {
        let infos = state.writer.pins();
        let Some(info) = infos.iter().find(|info| info.id == id) else { return Vec::new() };
        tokens.truncate(info.position_count);
        let hashes = state.writer.reader().block_hashes(&info.namespace, &tokens);
        let token_ids = tokens.as_slice().into();
        let (mut stored, mut saves) = (Vec::new(), Vec::new());
        if let Some(sink) = &self.sink_of_pins {
            let with_state = with_checkpoint(&mut state.writer, &info.namespace, &tokens);
            for tokens in [Some(tokens), with_state].into_iter().flatten() {
                let Some(pin) = sink.pinned(&info.namespace, &Arc::new(tokens)) else { continue };
                stored.push(pin.held);
                saves.extend(pin.save);
            }
        }
        let record = PinRecord {
            options,
            token_ids,
            last_hash: hashes.last().copied().unwrap_or_default(),
            end: None,
            last_use: None,
            _stored: stored,
        };
        state.pins.insert(id, record);
        state.set_end(id, myself);
        saves
    }

    fn unpin(&self, state: &mut TreeState, id: PinId) -> bool {
        state.pins.remove(&id);
        let was_there = state.writer.unpin(id);
        self.publish_pins(state);
        was_there
    }
}

/// Sends the actor the message that a pin may have ended. If it has stopped by then, the pin has ended
/// with it.
fn expire_after(time: Duration, id: PinId, myself: &ActorRef<TreeMessage>) {
    drop(myself.send_after(time, move || TreeMessage::Pin(PinMessage::Expire(id))));
}

/// The positions of the last checkpoint of a prefix, after those that it covers.
fn with_checkpoint(
    writer: &mut TreeWriter,
    namespace: &Namespace,
    prefix: &[u32],
) -> Option<Vec<u32>> {
    let lease = writer.lock_checkpoint_of_prefix(namespace, prefix)?;
    let positions = checkpoint_positions(lease.blocks().len() * writer.block_size());
    Some([&prefix[..lease.len()], &positions].concat())
}

impl TreeState {
    /// Lets a new pin with a time to live end after that time.
    fn set_end(&mut self, id: PinId, myself: &ActorRef<TreeMessage>) {
        let Some(pin) = self.pins.get_mut(&id) else { return };
        let Some(ttl) = pin.options.ttl else { return };
        pin.end = Instant::now().checked_add(ttl);
        pin.last_use = self.writer.pin_last_use(id);
        if pin.end.is_some() {
            expire_after(ttl, id, myself);
        }
    }

    /// Lets the pins with `refresh_on_hit` that were used since the last call live for their time
    /// to live from now on. Called after each use of the tree.
    pub(super) fn renew_used_pins(&mut self) {
        for (&id, pin) in &mut self.pins {
            let Some(ttl) = pin.options.ttl.filter(|_| pin.options.refresh_on_hit) else {
                continue;
            };
            let last_use = self.writer.pin_last_use(id);
            if last_use != pin.last_use {
                pin.end = Instant::now().checked_add(ttl);
                pin.last_use = last_use;
            }
        }
    }

    /// Whether a pin continues to live because it was renewed. If so, it is looked at again when it
    /// ends.
    fn was_renewed(&self, id: PinId, myself: &ActorRef<TreeMessage>) -> bool {
        let Some(pin) = self.pins.get(&id) else { return false };
        // A pin without an end has a time to live that never passes.
        let Some(end) = pin.end else { return true };
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        expire_after(left, id, myself);
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
            demoted: info.demoted,
            ends_in: end.map(|end| end.saturating_duration_since(Instant::now())),
            token_ids: record.map(|record| Arc::clone(&record.token_ids)).unwrap_or_default(),
            last_hash: record.map(|record| record.last_hash).unwrap_or_default(),
            options: record.map(|record| record.options.clone()).unwrap_or_default(),
        }
    }
}
