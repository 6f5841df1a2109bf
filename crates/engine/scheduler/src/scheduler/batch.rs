//! [`Batch`]: the running sequences, and the step that computes a part of them.
//!
//! 1. [`Batch::start`] adds a sequence that was admitted.
//! 2. [`Batch::begin_step`] notes the slices of a step. Until it has ended, their sequences stay in
//!    the batch, because the step reads and writes their blocks.
//! 3. [`Batch::take_step`] ends the step, and [`Batch::apply`] takes the result of each slice. A
//!    token may be sampled later, on another thread ([`Batch::apply_late_tokens`]).
//! 4. [`Batch::remove`] and [`Batch::take_overdue`] remove sequences that end or are preempted.

use std::sync::Arc;
use std::time::Instant;

use indexmap::IndexMap;

use super::checkpoints::StateInFlight;
use crate::context::EngineContext;
use crate::error::EngineError;
use crate::event::FinishReason;
use crate::late_sampling::{LateSampling, LateToken};
use crate::policy::Place;
use crate::preempt::Holder;
use crate::sequence::{Ending, Sequence, unusable_logits};
use crate::step_cost::StepWork;
use crate::step_plan::{DraftDone, RowResult};

/// A running sequence, with its place in the order of arrival.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) sequence: Sequence,
    place: Place,
    /// It was stalled by a slow consumer when [`Batch::notice_stalled`] last looked.
    stalled: bool,
}

impl Running {
    pub(super) fn place(&self) -> Place {
        self.place
    }

    /// Whether it was stalled by a slow consumer when [`Batch::notice_stalled`] last looked.
    pub(super) fn was_stalled(&self) -> bool {
        self.stalled
    }

    /// What the choice of a sequence to preempt needs to know about it.
    pub(super) fn holder(&self) -> Holder {
        let Running { sequence, place, .. } = self;
        let (stalled, is_sampling) = (sequence.is_stalled(), sequence.is_sampling);
        Holder { id: sequence.id, arrival: place.arrival, stalled, is_sampling }
    }
}

/// One slice of the step in flight.
#[derive(Debug)]
pub(super) struct InFlight {
    /// The sequence's id.
    pub(super) id: u64,
    /// Position of its first token in the step.
    pub(super) start: usize,
    /// Number of its tokens in the step, without those that were proposed to follow.
    pub(super) count: usize,
    /// Number of tokens that were proposed to follow.
    pub(super) proposed: usize,
    /// What it holds for the recurrent state of its sequence.
    pub(super) state: StateInFlight,
}

/// The step in flight.
#[derive(Debug)]
pub(super) struct Step {
    /// In the order of the batch. Empty for a step that only copies blocks or encodes an image.
    pub(super) slices: Vec<InFlight>,
    /// When the step was planned.
    pub(super) began: Instant,
}

impl Step {
    /// The work of its forward pass.
    pub(super) fn work(&self) -> StepWork {
        let works = self.slices.iter().map(|slice| StepWork::of_slice(slice.start, slice.count));
        works.fold(StepWork::default(), StepWork::and)
    }
}

/// The running sequences. See the module documentation.
#[derive(Debug)]
pub(super) struct Batch {
    /// By id, in order of admission.
    running: IndexMap<u64, Running>,
    /// Increases whenever a sequence starts to run, because it may become a leader.
    version: u64,
    /// A sequence has started since the last call of [`Batch::take_unsettled`].
    unsettled: bool,
    step: Option<Step>,
    /// Number of the last step.
    step_number: u64,
    /// The rows that are sampled outside of steps.
    late_sampling: LateSampling,
}

impl Batch {
    pub(super) fn new(context: &EngineContext) -> Batch {
        // Twice the number of requests, so that a tenant has one for each request that can run. Calls
        // of requests that have ended may still run.
        let threads_max = 2 * context.config.max_running;
        Batch {
            running: IndexMap::new(),
            version: 0,
            unsettled: false,
            step: None,
            step_number: 0,
            late_sampling: LateSampling::new(threads_max),
        }
    }

    /// Sets the function that is called, on any thread, when a token was sampled outside of a step.
    pub(super) fn set_wake(&mut self, wake: Arc<dyn Fn() + Send + Sync>) {
        self.late_sampling.set_wake(wake);
    }

    /// Number of running sequences.
    pub(super) fn len(&self) -> usize {
        self.running.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// The version of the set of sequences that may lead others.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// The running sequences with their places, in order of admission.
    pub(super) fn running(&self) -> impl Iterator<Item = &Running> + Clone {
        self.running.values()
    }

    /// As [`Batch::running`].
    pub(super) fn running_mut(&mut self) -> impl Iterator<Item = &mut Running> {
        self.running.values_mut()
    }

    /// The running sequences, in order of admission.
    pub(super) fn sequences(&self) -> impl DoubleEndedIterator<Item = &Sequence> + Clone {
        self.running.values().map(|running| &running.sequence)
    }

    /// As [`Batch::sequences`].
    pub(super) fn sequences_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.running.values_mut().map(|running| &mut running.sequence)
    }

    /// The running sequence with this id; `None` if it does not run any longer.
    pub(super) fn get(&self, id: u64) -> Option<&Sequence> {
        self.running.get(&id).map(|running| &running.sequence)
    }

    /// As [`Batch::get`].
    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Sequence> {
        self.running.get_mut(&id).map(|running| &mut running.sequence)
    }

    /// Adds a sequence that was admitted.
    pub(super) fn start(&mut self, mut sequence: Sequence, place: Place) {
        sequence.held.last_step = self.step_number;
        let running = Running { sequence, place, stalled: false };
        let before = self.running.insert(running.sequence.id, running);
        debug_assert!(before.is_none(), "ids are unique");
        self.version += 1;
        self.unsettled = true;
    }

    /// Removes a sequence.
    pub(super) fn remove(&mut self, id: u64) -> Option<Running> {
        let running = self.running.shift_remove(&id)?;
        debug_assert!(!running.sequence.in_step, "a step still reads its blocks");
        Some(running)
    }

    /// Drops every sequence, because the engine stops.
    pub(super) fn close(&mut self) {
        self.running.clear();
    }

    /// Removes the sequences that were canceled, timed out or failed and are not part of the step in
    /// flight.
    pub(super) fn take_overdue(&mut self, now: Instant) -> Vec<(Sequence, Ending)> {
        let mut ended = Vec::new();
        for sequence in self.sequences_mut() {
            if sequence.end.is_none() {
                if sequence.events.is_closed() {
                    sequence.end = Some(Ending::Canceled);
                } else if sequence.times.deadline.is_some_and(|deadline| deadline <= now) {
                    sequence.end = Some(sequence.timed_out(now));
                }
            }
            if sequence.end.is_some() && !sequence.in_step {
                ended.push(sequence.id);
            }
        }
        let take = |id| {
            let sequence = self.remove(id)?.sequence;
            let ending = sequence.end.clone()?;
            Some((sequence, ending))
        };
        ended.into_iter().filter_map(take).collect()
    }

    /// Whether a sequence is about to end.
    pub(super) fn has_ending(&self) -> bool {
        self.sequences().any(|sequence| sequence.end.is_some())
    }

    /// The time of the next timeout.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let running = self.sequences().filter(|sequence| sequence.end.is_none());
        running.filter_map(|sequence| sequence.times.deadline).min()
    }

    /// Whether a sequence has been stalled by a slow consumer since the last call.
    pub(super) fn notice_stalled(&mut self) -> bool {
        let mut is_new = false;
        for running in self.running.values_mut() {
            let stalled = running.sequence.is_stalled();
            is_new |= stalled && !running.stalled;
            running.stalled = stalled;
        }
        is_new
    }

    /// A request that arrived later than this sequence runs in its place.
    pub(super) fn overtake(&mut self, id: u64, cost: usize) {
        if let Some(running) = self.running.get_mut(&id) {
            running.place.overtake(cost);
        }
    }

    /// Whether a sequence has started since the last call.
    pub(super) fn take_unsettled(&mut self) -> bool {
        std::mem::take(&mut self.unsettled)
    }

    /// The step in flight.
    pub(super) fn step(&self) -> Option<&Step> {
        self.step.as_ref()
    }

    /// Number of the next step.
    pub(super) fn next_step(&self) -> u64 {
        self.step_number + 1
    }

    /// A step begins that loads blocks of the sequences `loading`, and computes `slices`.
    pub(super) fn begin_step(
        &mut self,
        slices: Vec<InFlight>,
        loading: impl Iterator<Item = u64>,
        now: Instant,
    ) {
        self.step_number += 1;
        let step_number = self.step_number;
        for id in slices.iter().map(|slice| slice.id).chain(loading) {
            let Some(sequence) = self.get_mut(id) else { continue };
            sequence.in_step = true;
            sequence.held.last_step = step_number;
        }
        self.step = Some(Step { slices, began: now });
    }

    /// Ends the step in flight.
    pub(super) fn take_step(&mut self) -> Option<Step> {
        self.step.take()
    }

    /// Applies the result of one slice. Returns a reason if its sequence is complete.
    pub(super) fn apply(
        &mut self,
        slice: &InFlight,
        result: RowResult,
        now: Instant,
    ) -> Option<FinishReason> {
        let sequence = self.running.get_mut(&slice.id).map(|running| &mut running.sequence)?;
        sequence.in_step = false;
        sequence.sampler = result.sampler.or(sequence.sampler.take());
        if result.skipped {
            sequence.pooler = result.pooler.or(sequence.pooler.take());
            return None;
        }
        if let Some(failure) = result.failure.as_ref().filter(|_| result.sampled.is_empty()) {
            // The positions of a failed sequence are not counted as computed, so that they are
            // never committed.
            sequence.end = Some(Ending::Failed(unusable_logits(failure)));
            return None;
        }
        sequence.held.stepped(slice.start, slice.start + slice.count);
        sequence.images.forget(sequence.held.computed);
        sequence.gather_prompt_logprobs(result.prompt);
        if sequence.end.is_some() {
            return None;
        }
        if sequence.is_background {
            let is_complete = sequence.held.computed >= sequence.tokens.len();
            return is_complete.then_some(FinishReason::Length);
        }
        let end = result.pooler.and_then(|pooler| sequence.pooled(pooler));
        let end = end.or(sequence.accept(result.sampled, result.failure, now));
        if let Some(late) = result.late.filter(|_| sequence.end.is_none()) {
            sequence.reached_last();
            self.late_sampling.start(sequence.id, sequence.tenant, late);
            sequence.is_sampling = true;
        }
        end
    }

    /// Takes the tokens that a draft model has proposed in the step, before its results are applied.
    pub(super) fn take_drafts(&mut self, step: &mut Step, draft: &DraftDone) {
        for (index, tokens) in &draft.proposals {
            let slice = &mut step.slices[*index];
            slice.proposed = tokens.len();
            let Some(sequence) = self.get_mut(slice.id) else { continue };
            let gauges = sequence.record.gauges();
            gauges.drafts.add(1);
            gauges.drafted_tokens.add(tokens.len());
            gauges.model_drafts.add(1);
            gauges.model_drafted_tokens.add(tokens.len());
            if let Some(drafts) = &mut sequence.drafts {
                drafts.take_model_draft(tokens.clone());
            }
        }
    }

    /// The forward pass of a step has failed, so its sequences fail.
    pub(super) fn fail_step(&mut self, step: &Step, reason: &str) {
        for slice in &step.slices {
            let Some(sequence) = self.get_mut(slice.id) else { continue };
            sequence.in_step = false;
            let reason = reason.to_owned();
            sequence.end = Some(Ending::Failed(EngineError::StepFailed { reason }));
        }
    }

    /// Applies the tokens that were sampled outside of steps. Returns their sequences, each with a
    /// reason if it is complete.
    pub(super) fn apply_late_tokens(&mut self, now: Instant) -> Vec<(u64, Option<FinishReason>)> {
        let mut applied = Vec::new();
        let is_running = |id| self.running.contains_key(&id);
        for LateToken { id, sampler, sampled, failure, .. } in self.late_sampling.take(is_running) {
            let Some(sequence) = self.get_mut(id) else { continue };
            sequence.is_sampling = false;
            sequence.sampler = sampler;
            let end = match sequence.end {
                Some(_) => None,
                None => sequence.accept(sampled, failure, now),
            };
            applied.push((id, end));
        }
        applied
    }

    /// Number of blocks that the sequences and the step in flight have reserved.
    pub(super) fn reserved_blocks(&self) -> usize {
        let of_sequence = |sequence: &Sequence| {
            let reserved = sequence.held.reserved.as_ref().map_or(0, |lease| lease.len());
            reserved + sequence.held.state.reserved()
        };
        let slices = self.step.iter().flat_map(|step| &step.slices);
        let in_flight: usize = slices.map(|slice| slice.state.block_count()).sum();
        self.sequences().map(of_sequence).sum::<usize>() + in_flight
    }

    /// Verifies that sequences have blocks for what they have computed, and have computed what they
    /// have committed. With recurrent states (`has_states`), they may compute committed positions
    /// again.
    pub(super) fn audit(&self, block_size: usize, has_states: bool) -> Result<(), String> {
        for Sequence { id, held, .. } in self.sequences() {
            let covered = held.table.len() * block_size;
            let ahead = !has_states && held.committed() > held.computed;
            if held.computed > covered || ahead {
                return Err(format!(
                    "sequence {id}: {} positions committed, {} computed, {covered} covered",
                    held.committed(),
                    held.computed
                ));
            }
        }
        Ok(())
    }
}
