//! Checkpoints of recurrent states: taken by steps, and added to the tree.

use std::mem;
use std::sync::Arc;

use stolon_backend::{SliceState, StateCheckpoint};
use stolon_kvcache::{BlockLease, Namespace, TokenSpan, checkpoint_positions};

use super::{Running, Scheduler};
use crate::event::FinishReason;
use crate::memory::{ActorStopped, Memory};
use crate::schedule::Slice;
use crate::sequence::Sequence;
use crate::states::{CheckpointItem, CheckpointWishes, Resume, StateLoad};

/// The checkpoints that a slice of the step in flight reads and writes for its sequence.
#[derive(Debug, Default)]
pub(super) struct StateInFlight {
    /// The checkpoint that the slice resumes from.
    resume: Option<Resume>,
    /// The checkpoints that the slice writes, with the number of positions that they cover.
    pub(super) checkpoints: Vec<(usize, BlockLease)>,
}

impl StateInFlight {
    /// Number of blocks that are reserved for checkpoints.
    pub(super) fn block_count(&self) -> usize {
        let written = self.checkpoints.iter().map(|(_, blocks)| blocks.len()).sum::<usize>();
        written + self.resume.as_ref().map_or(0, Resume::reserved)
    }
}

impl<M: Memory> Scheduler<M> {
    /// Reserves blocks for the checkpoints that the slices of the next step take; empty for a model
    /// without states. Slices for which there are not enough blocks take none.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub(super) async fn reserve_checkpoints(
        &mut self,
        slices: &[Slice],
    ) -> Result<Vec<StateInFlight>, ActorStopped> {
        let Some(rule) = self.context.checkpoint_rule() else { return Ok(Vec::new()) };
        let mut states: Vec<StateInFlight> =
            slices.iter().map(|_| StateInFlight::default()).collect();
        let caches = self.context.config.prefix_caching;
        for (slice, state) in slices.iter().zip(&mut states).filter(|_| caches) {
            if !self.running[slice.index].sequence.writes_cache() {
                continue;
            }
            let wishes = self.wishes(slice.index, slice.start);
            let prompt_end = rule.end_of_prompt(wishes.prompt_len);
            for len in rule.choose(&wishes, slice.start, slice.start + slice.count) {
                let sequence = &mut self.running[slice.index].sequence;
                // No match ends inside an image, so no request would resume there.
                if !TokenSpan::may_end_after(sequence.tokens[len - 1]) {
                    continue;
                }
                let held = &mut sequence.held.state;
                // The step overwrites the checkpoint of an answer. If it fails, so does the request.
                let own = held.answer.take_if(|_| len > prompt_end).map(|(_, blocks)| blocks);
                let blocks = match own {
                    Some(blocks) => Some(blocks),
                    None => self.reserve(rule.blocks).await?,
                };
                state.checkpoints.extend(blocks.map(|blocks| (len, blocks)));
            }
        }
        Ok(states)
    }

    /// The properties of a slice that begins at `start` on which the choice of its checkpoints
    /// depends. Nothing follows an answer.
    fn wishes(&self, index: usize, start: usize) -> CheckpointWishes {
        let sequence = &self.running[index].sequence;
        let is_prompt = start < sequence.prompt_len;
        let waiting = if is_prompt { self.queue.entries() } else { &[] };
        let follows = waiting.iter().filter_map(|waiting| waiting.follow);
        let followers = follows.filter(|follow| follow.leader == sequence.id);
        CheckpointWishes {
            prompt_len: sequence.prompt_len,
            first_message: sequence.held.state.first_message,
            images_end: sequence.images.end(),
            parted: sequence.held.state.parted,
            followers: followers.map(|follow| follow.shared).collect(),
        }
    }

    /// The state of a slice of the next step, which computes its sequence up to `end`.
    pub(super) fn slice_state(
        &mut self,
        index: usize,
        end: usize,
        in_flight: &mut StateInFlight,
    ) -> Option<SliceState> {
        let slots = self.free_slots.as_ref()?;
        let held = &mut self.running[index].sequence.held.state;
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
        })
    }

    /// Takes the checkpoints that a slice has written and that its sequence has reached. `start` is
    /// the position of its first token.
    pub(super) fn take_checkpoints(&mut self, index: usize, start: usize, state: StateInFlight) {
        let Some(rule) = self.context.checkpoint_rule() else { return };
        let caches = self.context.config.prefix_caching;
        let sequence = &mut self.running[index].sequence;
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
    pub(super) fn keep_answer(written: &mut Vec<CheckpointItem>, sequence: &mut Sequence) {
        if let Some((len, blocks)) = sequence.held.state.answer.take() {
            written.push(item(sequence, len, blocks));
        }
    }

    /// Adds the written checkpoints to the tree, after the KV that they belong to.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub(super) async fn publish_checkpoints(&mut self) -> Result<(), ActorStopped> {
        if self.written.is_empty() {
            return Ok(());
        }
        self.context.gauges.checkpoints.add(self.written.len());
        let items = mem::take(&mut self.written);
        let described = |item: &CheckpointItem| {
            (item.namespace, Arc::clone(&item.tokens), item.len, item.priority)
        };
        let described: Vec<_> = items.iter().map(described).collect();
        let committed = self.memory.commit_checkpoints(items).await?;
        for ((namespace, tokens, len, priority), is_cached) in described.into_iter().zip(committed)
        {
            if is_cached {
                self.save_checkpoint(&namespace, &tokens[..len], priority).await?;
            }
        }
        Ok(())
    }

    /// Copies a checkpoint of the tree out of the pool, if the sink wants it.
    async fn save_checkpoint(
        &mut self,
        namespace: &Namespace,
        prefix: &[u32],
        priority: i32,
    ) -> Result<(), ActorStopped> {
        let Some(sink) = self.context.config.kv_sink.clone() else { return Ok(()) };
        let spec = &self.context.spec;
        let (first, count) = (prefix.len() / spec.block_size, spec.checkpoint_blocks());
        let positions = checkpoint_positions(count * spec.block_size);
        let whole = Arc::new([prefix, &positions].concat());
        match sink.wanted(namespace, &whole, first..first + count, priority) {
            Some(save) => self.save(save).await,
            None => Ok(()),
        }
    }

    /// Prepares the loads of stored KV with checkpoints: reserves blocks for the checkpoints. What
    /// cannot be loaded is computed.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub(super) async fn prepare_state_loads(&mut self) -> Result<(), ActorStopped> {
        let Some(rule) = self.context.checkpoint_rule() else { return Ok(()) };
        for index in 0..self.running.len() {
            let sequence = &self.running[index].sequence;
            let Some(stored) = &sequence.stored else { continue };
            if sequence.held.state.load.is_some() || sequence.in_step {
                continue;
            }
            let (kv, committed) = (stored.kv_range(), sequence.held.committed());
            let blocks = match sequence.stored_checkpoint(committed, sequence.held.computed) {
                Some(_) => self.reserve(rule.blocks).await?,
                None => None,
            };
            let sequence = &mut self.running[index].sequence;
            match blocks {
                Some(blocks) => {
                    let next = (committed / rule.block_size).min(kv.end);
                    sequence.held.state.load = Some(StateLoad { blocks, next });
                }
                None => sequence.stored = None,
            }
        }
        Ok(())
    }

    /// Marks the checkpoints of the answers of sequences that end now, and adds them to the tree.
    /// Turns of sessions lock the last checkpoint of their prefix. They do it only when they end, so
    /// that no running request waits for blocks of a checkpoint.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub(super) async fn publish_ending(
        &mut self,
        finished: &[(u64, FinishReason)],
    ) -> Result<(), ActorStopped> {
        if self.free_slots.is_none() {
            return Ok(());
        }
        let mut turns = Vec::new();
        for (index, Running { sequence, .. }) in self.running.iter_mut().enumerate() {
            let ends = sequence.end.is_some() || sequence.events.is_closed();
            if (ends && !sequence.in_step) || finished.iter().any(|&(id, _)| id == sequence.id) {
                Self::keep_answer(&mut self.written, sequence);
                turns.extend(sequence.turn.is_some().then_some(index));
            }
        }
        self.publish_checkpoints().await?;
        for index in turns {
            let Sequence { namespace, tokens, .. } = &self.running[index].sequence;
            let acquired = self.memory.acquire(namespace, tokens, tokens.len(), None).await?;
            self.running[index].sequence.held.state.of_session = acquired.checkpoint;
        }
        Ok(())
    }

    /// Releases the blocks of the checkpoints of answers, because they are needed for something
    /// else. Returns whether there was one.
    pub(super) fn release_answers(&mut self) -> bool {
        let held = self.running.iter_mut().map(|running| &mut running.sequence.held.state);
        held.filter_map(|state| state.answer.take()).count() > 0
    }
}

fn item(sequence: &Sequence, len: usize, blocks: BlockLease) -> CheckpointItem {
    let (namespace, tokens) = (sequence.namespace, Arc::clone(&sequence.tokens));
    CheckpointItem { namespace, tokens, len, priority: sequence.options.priority, blocks }
}
