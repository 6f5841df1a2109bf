//! [`Checkpoints`]: the recurrent states of running sequences, for a model that has them, and the
//! checkpoints of these states that are not in the tree yet.
//!
//! 1. [`Checkpoints::choose`] says after which positions a slice of the next step takes checkpoints,
//!    [`Checkpoints::reserve`] reserves blocks for them, and [`Checkpoints::begin_slice`] gives the
//!    sequence a slot.
//! 2. [`Checkpoints::take`] takes those that the step has written. The one of an answer stays with
//!    its sequence, which overwrites it, until [`Checkpoints::keep_answer`].
//! 3. [`Checkpoints::publish`] adds them to the tree.

use std::mem;
use std::sync::Arc;

use stolon_backend::{SliceState, StateCheckpoint};
use stolon_kvcache::{BlockLease, Namespace, TokenSpan, checkpoint_positions};

use super::batch::Batch;
use super::blocks::Blocks;
use super::transfers::Transfers;
use crate::context::EngineContext;
use crate::memory::{ActorStopped, Memory};
use crate::queue::Queue;
use crate::schedule::Slice;
use crate::sequence::Sequence;
use crate::states::{CheckpointItem, CheckpointWishes, FreeSlots, Resume, StateLoad};

/// The checkpoints that a slice of the step in flight reads and writes for its sequence.
#[derive(Debug, Default)]
pub(super) struct StateInFlight {
    /// The checkpoint that the slice resumes from.
    resume: Option<Resume>,
    /// The checkpoints that the slice writes, with the number of positions that they cover.
    checkpoints: Vec<(usize, BlockLease)>,
}

impl StateInFlight {
    /// Number of blocks that are reserved for checkpoints.
    pub(super) fn block_count(&self) -> usize {
        let written = self.checkpoints.iter().map(|(_, blocks)| blocks.len()).sum::<usize>();
        written + self.resume.as_ref().map_or(0, Resume::reserved)
    }
}

/// The states and their checkpoints. See the module documentation.
#[derive(Debug)]
pub(super) struct Checkpoints {
    context: EngineContext,
    /// The slots for recurrent states that no sequence has; `None` for a model without.
    free_slots: Option<Arc<FreeSlots>>,
    /// Checkpoints that steps have written and that are not in the tree yet.
    written: Vec<CheckpointItem>,
}

impl Checkpoints {
    pub(super) fn new(context: &EngineContext) -> Checkpoints {
        let free_slots = context.spec.state.map(|state| FreeSlots::new(state.slots));
        Checkpoints { context: context.clone(), free_slots, written: Vec::new() }
    }

    /// The lengths of the prefixes after which a slice of the next step takes checkpoints. `queue` has
    /// the followers of its sequence.
    pub(super) fn choose(&self, sequence: &Sequence, slice: &Slice, queue: &Queue) -> Vec<usize> {
        let caches = self.context.config.prefix_caching && sequence.writes_cache();
        let Some(rule) = self.context.checkpoint_rule().filter(|_| caches) else {
            return Vec::new();
        };
        let wishes = wishes(sequence, slice.start, queue);
        let mut lens = rule.choose(&wishes, slice.start, slice.start + slice.count);
        // No match ends inside an image, so no request would resume there.
        lens.retain(|len| TokenSpan::may_end_after(sequence.tokens[len - 1]));
        lens
    }

    /// Number of tokens that may be proposed to follow a sequence: the next checkpoint of its
    /// answer is taken after a token that is certain, so that no rejected token is ever part of
    /// one.
    pub(super) fn proposals_max(&self, sequence: &Sequence) -> usize {
        let caches = self.context.config.prefix_caching && sequence.writes_cache();
        let rule = self.context.checkpoint_rule().filter(|_| caches);
        rule.map_or(usize::MAX, |rule| {
            let end = sequence.tokens.len();
            rule.answer_checkpoint_after(end) - end - 1
        })
    }

    /// Reserves blocks for checkpoints after the first `lens` positions of a sequence. Those for
    /// which there are not enough blocks are not taken.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub(super) async fn reserve<M: Memory>(
        &self,
        sequence: &mut Sequence,
        lens: Vec<usize>,
        blocks: &mut Blocks<M>,
    ) -> Result<StateInFlight, ActorStopped> {
        let mut state = StateInFlight::default();
        let Some(rule) = self.context.checkpoint_rule() else { return Ok(state) };
        let prompt_end = rule.end_of_prompt(sequence.prompt_len);
        for len in lens {
            let held = &mut sequence.held.state;
            // The step overwrites the checkpoint of an answer. If it fails, so does the request.
            let own = held.answer.take_if(|_| len > prompt_end).map(|(_, blocks)| blocks);
            let reserved = match own {
                Some(own) => Some(own),
                None => blocks.reserve(rule.blocks).await?,
            };
            state.checkpoints.extend(reserved.map(|blocks| (len, blocks)));
        }
        Ok(state)
    }

    /// The state of a slice of the next step, which computes `sequence` up to `end`, and `proposed`
    /// tokens that may follow.
    pub(super) fn begin_slice(
        &self,
        sequence: &mut Sequence,
        (end, proposed): (usize, usize),
        in_flight: &mut StateInFlight,
    ) -> Option<SliceState> {
        let slots = self.free_slots.as_ref()?;
        let held = &mut sequence.held.state;
        if held.slot.is_none() {
            held.slot = slots.take();
        }
        debug_assert!(held.slot.is_some(), "there is a slot for each running sequence");
        held.planned = end;
        in_flight.resume = held.resume.take();
        let written = in_flight.checkpoints.iter();
        Some(SliceState {
            slot: held.slot.as_ref()?.id(),
            resume: in_flight.resume.as_ref().map(|resume| resume.blocks().to_vec()),
            checkpoints: written
                .map(|(len, blocks)| StateCheckpoint {
                    len: *len,
                    blocks: blocks.blocks().to_vec(),
                })
                .collect(),
            proposed,
        })
    }

    /// Takes the checkpoints that a slice has written and that its sequence has reached. `start` is
    /// the position of its first token.
    pub(super) fn take(&mut self, sequence: &mut Sequence, start: usize, state: StateInFlight) {
        let Some(rule) = self.context.checkpoint_rule() else { return };
        let caches = self.context.config.prefix_caching;
        if let Some(Resume::Loaded(blocks)) = state.resume
            && caches
            && sequence.writes_cache()
        {
            self.written.push(item(sequence, start, blocks));
        }
        let prompt_end = rule.end_of_prompt(sequence.prompt_len);
        for (len, blocks) in state.checkpoints {
            if len > sequence.held.computed {
                continue;
            }
            if len > prompt_end {
                sequence.held.state.answer = Some((len, blocks));
            } else {
                self.written.push(item(sequence, len, blocks));
            }
        }
    }

    /// Marks the checkpoint of a sequence's answer to be added to the tree, because the sequence
    /// ends or is preempted.
    pub(super) fn keep_answer(&mut self, sequence: &mut Sequence) {
        if let Some((len, blocks)) = sequence.held.state.answer.take() {
            self.written.push(item(sequence, len, blocks));
        }
    }

    /// Adds the written checkpoints to the tree, after the KV that they belong to, and saves those
    /// that the sink wants.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub(super) async fn publish<M: Memory>(
        &mut self,
        blocks: &mut Blocks<M>,
        transfers: &mut Transfers,
    ) -> Result<(), ActorStopped> {
        if self.written.is_empty() {
            return Ok(());
        }
        self.context.gauges.checkpoints.add(self.written.len());
        let items = mem::take(&mut self.written);
        let described = |item: &CheckpointItem| {
            (item.namespace, Arc::clone(&item.tokens), item.len, item.priority)
        };
        let described: Vec<_> = items.iter().map(described).collect();
        let committed = blocks.memory().commit_checkpoints(items).await?;
        for ((namespace, tokens, len, priority), is_cached) in described.into_iter().zip(committed)
        {
            if is_cached {
                self.save(&namespace, &tokens[..len], priority, blocks, transfers).await?;
            }
        }
        Ok(())
    }

    /// Copies a checkpoint of the tree out of the pool, if the sink wants it.
    async fn save<M: Memory>(
        &self,
        namespace: &Namespace,
        prefix: &[u32],
        priority: i32,
        blocks: &mut Blocks<M>,
        transfers: &mut Transfers,
    ) -> Result<(), ActorStopped> {
        let Some(sink) = &self.context.config.kv_sink else { return Ok(()) };
        let spec = &self.context.spec;
        let (first, count) = (prefix.len() / spec.block_size, spec.checkpoint_blocks());
        let positions = checkpoint_positions(count * spec.block_size);
        let whole = Arc::new([prefix, &positions].concat());
        match sink.wanted(namespace, &whole, first..first + count, priority) {
            Some(save) => transfers.save(save, blocks).await,
            None => Ok(()),
        }
    }

    /// Prepares the loads of stored KV with checkpoints: reserves blocks for the checkpoints. What
    /// cannot be loaded is computed.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub(super) async fn prepare_loads<M: Memory>(
        &self,
        batch: &mut Batch,
        blocks: &mut Blocks<M>,
    ) -> Result<(), ActorStopped> {
        let Some(rule) = self.context.checkpoint_rule() else { return Ok(()) };
        for sequence in batch.sequences_mut() {
            let Some(stored) = &sequence.stored else { continue };
            if sequence.held.state.load.is_some() || sequence.in_step {
                continue;
            }
            let (kv, committed) = (stored.kv_range(), sequence.held.committed());
            let reserved = match sequence.stored_checkpoint(committed, sequence.held.computed) {
                Some(_) => blocks.reserve(rule.blocks).await?,
                None => None,
            };
            match reserved {
                Some(blocks) => {
                    let next = (committed / rule.block_size).min(kv.end);
                    sequence.held.state.load = Some(StateLoad { blocks, next });
                }
                None => sequence.stored = None,
            }
        }
        Ok(())
    }

    /// Marks the checkpoints of the answers of sequences that end now, and adds them to the tree:
    /// those with an end and those of the ids `finished`. Turns of sessions lock the last checkpoint
    /// of their prefix. They do it only when they end, so that no running request waits for blocks
    /// of a checkpoint.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub(super) async fn publish_ending<M: Memory>(
        &mut self,
        finished: &[u64],
        batch: &mut Batch,
        blocks: &mut Blocks<M>,
        transfers: &mut Transfers,
    ) -> Result<(), ActorStopped> {
        if self.free_slots.is_none() {
            return Ok(());
        }
        let mut turns = Vec::new();
        for sequence in batch.sequences_mut() {
            let ends = sequence.end.is_some() || sequence.events.is_closed();
            if (ends && !sequence.in_step) || finished.contains(&sequence.id) {
                self.keep_answer(sequence);
                turns.extend(sequence.turn.is_some().then_some(sequence.id));
            }
        }
        self.publish(blocks, transfers).await?;
        for id in turns {
            let Some(sequence) = batch.get_mut(id) else { continue };
            let Sequence { namespace, tokens, .. } = &*sequence;
            let acquired = blocks.memory().acquire(namespace, tokens, tokens.len(), None).await?;
            sequence.held.state.of_session = acquired.checkpoint;
        }
        Ok(())
    }

    /// Drops the checkpoints that are not in the tree, because the engine stops.
    pub(super) fn close(&mut self) {
        self.written.clear();
    }

    /// Number of blocks of the checkpoints that are not in the tree.
    pub(super) fn block_count(&self) -> usize {
        self.written.iter().map(|item| item.blocks.len()).sum()
    }

    /// Verifies that each slot for a recurrent state is free, or a running sequence has it.
    pub(super) fn audit(&self, batch: &Batch) -> Result<(), String> {
        let Some((slots, state)) = self.free_slots.as_ref().zip(self.context.spec.state) else {
            return Ok(());
        };
        let used = batch.sequences().filter(|sequence| sequence.held.state.slot.is_some()).count();
        if slots.count() + used != state.slots {
            return Err(format!(
                "state slots: {used} used and {} free, expected {} together",
                slots.count(),
                state.slots
            ));
        }
        Ok(())
    }
}

/// Releases the blocks of the checkpoints of answers, because they are needed for something else.
/// Returns whether there was one.
pub(super) fn release_answers(batch: &mut Batch) -> bool {
    let held = batch.sequences_mut().map(|sequence| &mut sequence.held.state);
    held.filter_map(|state| state.answer.take()).count() > 0
}

/// The properties of a slice that begins at `start` on which the choice of its checkpoints depends.
/// Nothing follows an answer.
fn wishes(sequence: &Sequence, start: usize, queue: &Queue) -> CheckpointWishes {
    let is_prompt = start < sequence.prompt_len;
    let waiting = if is_prompt { queue.entries() } else { &[] };
    let follows = waiting.iter().filter_map(|waiting| waiting.follow);
    let followers = follows.filter(|follow| follow.leader == sequence.id);
    CheckpointWishes {
        prompt_len: sequence.prompt_len,
        first_message: sequence.held.state.first_message,
        marks: sequence.options.marks.iter().map(|mark| mark.len).collect(),
        images_end: sequence.images.end(),
        parted: sequence.held.state.parted,
        followers: followers.map(|follow| follow.shared).collect(),
    }
}

fn item(sequence: &Sequence, len: usize, blocks: BlockLease) -> CheckpointItem {
    let (namespace, tokens) = (sequence.namespace, Arc::clone(&sequence.tokens));
    CheckpointItem { namespace, tokens, len, priority: sequence.options.priority, blocks }
}
