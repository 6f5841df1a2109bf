//! Pins and marks: the properties that the tree does not store, and their times to live.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ractor::{ActorRef, RpcReplyPort};
use stolon_kvcache::{Namespace, PinId, PinInfo, TreeWriter, checkpoint_positions};
use stolon_scheduler::{EngineError, HeldMark, MarkRoom, PrefixMark, SaveRequest};
use tokio::task::AbortHandle;

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
    /// Mark prefixes of these tokens.
    Mark {
        namespace: Namespace,
        tokens: Arc<Vec<u32>>,
        marks: Arc<[PrefixMark]>,
        tenant: Option<Arc<str>>,
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
    /// Sends the message that the pin may have ended.
    timer: Option<Timer>,
    /// What only a mark has.
    mark: Option<MarkRecord>,
    /// Protects the stored prefix. It has no other use than to be dropped.
    _stored: Vec<Box<dyn Any + Send>>,
}

/// The properties of a mark that other pins do not have.
#[derive(Debug)]
struct MarkRecord {
    namespace: Namespace,
    tenant: Option<Arc<str>>,
    /// Number of blocks that it protects, with those of its checkpoint.
    blocks: usize,
    /// Protects the last checkpoint of the prefix.
    checkpoint: Option<PinId>,
}

/// A message to the actor that is sent later, unless this is dropped before.
#[derive(Debug)]
struct Timer(AbortHandle);

impl Drop for Timer {
    fn drop(&mut self) {
        self.0.abort();
    }
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
            PinMessage::Mark { namespace, tokens, marks, tenant } => {
                for mark in marks.iter().take(PrefixMark::MAX_OF_REQUEST) {
                    let prefix = &tokens[..mark.len.min(tokens.len())];
                    let ttl = mark.ttl.min(PrefixMark::MAX_TTL);
                    self.mark(state, &namespace, prefix, ttl, &tenant, myself);
                }
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
                let _ = reply.send(pins.iter().filter_map(|info| state.pin(info)).collect());
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
            timer: None,
            mark: None,
            _stored: stored,
        };
        state.pins.insert(id, record);
        state.set_end(id, myself);
        saves
    }

    /// Marks the cached prefix of `tokens`. It replaces the tenant's marks of shorter prefixes of
    /// `tokens` that would end before it.
    fn mark(
        &self,
        state: &mut TreeState,
        namespace: &Namespace,
        tokens: &[u32],
        ttl: Duration,
        tenant: &Option<Arc<str>>,
        myself: &ActorRef<TreeMessage>,
    ) {
        let (block_size, end) = (state.writer.block_size(), Instant::now() + ttl);
        let tokens = &tokens[..tokens.len() / block_size * block_size];
        let own = state.pins.iter().filter(|(_, pin)| {
            let is_own = |mark: &MarkRecord| (mark.namespace, &mark.tenant) == (*namespace, tenant);
            pin.mark.as_ref().is_some_and(is_own)
        });
        let mut replaced = Vec::new();
        for (&id, pin) in own {
            let ends_first = pin.end.is_some_and(|other| other <= end);
            if !ends_first && pin.token_ids.starts_with(tokens) {
                return;
            }
            if ends_first && tokens.starts_with(&pin.token_ids) {
                replaced.push(id);
            }
        }
        for id in replaced {
            self.unpin(state, id);
        }
        let budget = self.pin_budget.mark_blocks();
        let checkpoint = with_checkpoint(&mut state.writer, namespace, tokens);
        let of_checkpoint = checkpoint.as_ref().map_or(0, |_| state.writer.checkpoint_blocks());
        let wanted = tokens.len() / block_size + of_checkpoint;
        let room = MarkRoom::make(state.held_marks(), tenant, wanted, budget);
        for id in room.ended {
            self.unpin(state, id);
        }
        let Some(id) = state.writer.mark(namespace, tokens, room.blocks) else { return };
        let pinned = state.writer.pins().into_iter().find(|info| info.id == id);
        let Some(info) = pinned else { return };
        let tokens = &tokens[..info.position_count];
        // The checkpoint of a part of the prefix is of no use without the room for it.
        let fits = |whole: &Vec<u32>| {
            info.block_count + of_checkpoint <= room.blocks
                && whole.len() <= tokens.len() + of_checkpoint * block_size
        };
        let checkpoint = checkpoint.filter(fits);
        let checkpoint =
            checkpoint.and_then(|whole| state.writer.mark(namespace, &whole, usize::MAX));
        let blocks = info.block_count + checkpoint.map_or(0, |_| of_checkpoint);
        let hashes = state.writer.reader().block_hashes(namespace, tokens);
        let reason = Some("mark".to_owned());
        let record = PinRecord {
            options: PinOptions { ttl: Some(ttl), refresh_on_hit: true, reason, description: None },
            token_ids: tokens.into(),
            last_hash: hashes.last().copied().unwrap_or_default(),
            end: None,
            last_use: None,
            timer: None,
            mark: Some(MarkRecord {
                namespace: *namespace,
                tenant: tenant.clone(),
                blocks,
                checkpoint,
            }),
            _stored: Vec::new(),
        };
        state.pins.insert(id, record);
        state.set_end(id, myself);
    }

    fn unpin(&self, state: &mut TreeState, id: PinId) -> bool {
        let was_there = state.end_pin(id);
        self.publish_pins(state);
        was_there
    }
}

/// Sends the actor the message that a pin may have ended. If it has stopped by then, the pin has ended
/// with it.
fn expire_after(time: Duration, id: PinId, myself: &ActorRef<TreeMessage>) -> Timer {
    let sent = myself.send_after(time, move || TreeMessage::Pin(PinMessage::Expire(id)));
    Timer(sent.abort_handle())
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
        pin.timer = pin.end.map(|_| expire_after(ttl, id, myself));
    }

    /// Ends a pin. Returns whether it existed.
    fn end_pin(&mut self, id: PinId) -> bool {
        let record = self.pins.remove(&id);
        if let Some(checkpoint) = record.and_then(|record| record.mark?.checkpoint) {
            self.writer.unpin(checkpoint);
        }
        self.writer.unpin(id)
    }

    /// Ends the marks of the prefixes of `tokens`, and of the sequences that start with `tokens`, so
    /// that these can be removed.
    pub(super) fn unmark(&mut self, namespace: &Namespace, tokens: &[u32]) {
        let whole = &tokens[..tokens.len() / self.writer.block_size() * self.writer.block_size()];
        let is_on_path = |pin: &PinRecord| {
            pin.mark.as_ref().is_some_and(|mark| mark.namespace == *namespace)
                && (pin.token_ids.starts_with(whole) || whole.starts_with(&pin.token_ids))
        };
        let ids = self.pins.iter().filter(|(_, pin)| is_on_path(pin)).map(|(&id, _)| id);
        for id in ids.collect::<Vec<_>>() {
            self.end_pin(id);
        }
    }

    /// All marks.
    fn held_marks(&self) -> Vec<HeldMark> {
        let held = |(&id, pin): (&PinId, &PinRecord)| {
            let mark = pin.mark.as_ref()?;
            Some(HeldMark { id, tenant: mark.tenant.clone(), blocks: mark.blocks, end: pin.end? })
        };
        self.pins.iter().filter_map(held).collect()
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
    fn was_renewed(&mut self, id: PinId, myself: &ActorRef<TreeMessage>) -> bool {
        let Some(pin) = self.pins.get_mut(&id) else { return false };
        // A pin without an end has a time to live that never passes.
        let Some(end) = pin.end else { return true };
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        pin.timer = Some(expire_after(left, id, myself));
        true
    }

    /// A pin as callers see it; `None` for the checkpoint of a mark, which is a part of the mark.
    fn pin(&self, info: &PinInfo) -> Option<Pin> {
        let record = self.pins.get(&info.id)?;
        let mark = record.mark.as_ref();
        Some(Pin {
            id: info.id,
            is_mark: info.is_mark,
            namespace: info.namespace,
            tokens: info.position_count,
            blocks: mark.map_or(info.block_count, |mark| mark.blocks),
            demoted: info.demoted,
            ends_in: record.end.map(|end| end.saturating_duration_since(Instant::now())),
            token_ids: Arc::clone(&record.token_ids),
            last_hash: record.last_hash,
            options: record.options.clone(),
        })
    }
}
