//! [`Speculating`]: which tokens are proposed in the next step, of what the others leave.

use std::time::Instant;

use stolon_kvcache::TreeReader;

use super::batch::{Batch, Step};
use super::checkpoints::Checkpoints;
use crate::blocks_for;
use crate::context::EngineContext;
use crate::schedule::Slice;
use crate::sequence::Sequence;
use crate::speculation::{DraftContext, Drafts, StepTimes, Worth};

/// The durations from which follows what proposals are worth. See the module documentation.
#[derive(Debug)]
pub(super) struct Speculating {
    context: EngineContext,
    times: StepTimes,
}

impl Speculating {
    pub(super) fn new(context: &EngineContext) -> Speculating {
        Speculating { context: context.clone(), times: StepTimes::default() }
    }

    /// Learns from the step that ends now how long steps take. Steps with prompts say nothing about
    /// others.
    pub(super) fn note(&mut self, step: &Step, now: Instant) {
        let is_decode = step.slices.iter().all(|slice| slice.count == 1);
        if self.is_on() && is_decode && !step.slices.is_empty() {
            let proposed = step.slices.iter().map(|slice| slice.proposed).sum();
            let time = now.saturating_duration_since(step.began);
            self.times.note(step.slices.len(), proposed, time);
        }
    }

    /// The tokens that are proposed for each of `slices`, at most `tokens` together. `is_alone` says
    /// that no other request waits for the step, and `several_tenants` that requests of different
    /// tenants do.
    pub(super) fn propose(
        &self,
        (batch, checkpoints): (&mut Batch, &Checkpoints),
        slices: &[(u64, Slice)],
        tokens: usize,
        (is_alone, several_tenants): (bool, bool),
        tree: &TreeReader,
    ) -> Vec<Vec<u32>> {
        let mut proposals = vec![Vec::new(); slices.len()];
        // A step with prompts is as long as it may be.
        if !self.is_on() || slices.iter().any(|(_, slice)| slice.count != 1) {
            return proposals;
        }
        let config = &self.context.config;
        let (worth, room) = match config.speculation.adaptive {
            false => (None, usize::MAX),
            true => {
                let Some(worth) = self.times.worth(slices.len()) else { return proposals };
                let target = config.step_time_target.filter(|_| !several_tenants);
                let room = self.times.room(slices.len(), target);
                (Some(worth), if is_alone { usize::MAX } else { room })
            }
        };
        let mut left = tokens.saturating_sub(slices.len()).min(room);
        for (index, (id, slice)) in slices.iter().enumerate() {
            let Some(sequence) = batch.get_mut(*id) else { continue };
            // Equal shares; what one does not use goes to the next ones.
            let share = left.div_ceil(slices.len() - index);
            let is_decode = slice.start + 1 == sequence.tokens.len();
            let limit = if is_decode { self.limit(sequence, checkpoints) } else { 0 };
            let limit = limit.min(self.covered(sequence)).min(share);
            let proposed = self.draft(sequence, limit, worth, tree);
            if !proposed.is_empty() {
                left -= proposed.len();
                self.context.gauges.drafts.add(1);
                self.context.gauges.drafted_tokens.add(proposed.len());
            }
            proposals[index] = proposed;
        }
        proposals
    }

    fn is_on(&self) -> bool {
        self.context.spec.proposals && self.context.config.speculation.max_tokens > 0
    }

    /// Maximum number of tokens that may be proposed for a sequence that decodes, if it has blocks
    /// for them: their events have room, and no answer gets longer than it may be.
    fn limit(&self, sequence: &Sequence, checkpoints: &Checkpoints) -> usize {
        let Sequence { options, .. } = sequence;
        if sequence.generated() == 0 || options.regions || options.pooling.is_some() {
            return 0;
        }
        let in_context = self.context.spec.max_positions.saturating_sub(sequence.tokens.len());
        (self.context.config.speculation.max_tokens)
            .min(checkpoints.proposals_max(sequence))
            .min(in_context)
            .min(sequence.remaining().saturating_sub(1))
            .min(sequence.events.room())
    }

    /// Number of positions after its tokens for which a sequence has blocks.
    fn covered(&self, sequence: &Sequence) -> usize {
        let covered = sequence.held.table.len() * self.context.spec.block_size;
        covered.saturating_sub(sequence.tokens.len())
    }

    /// Number of blocks that a sequence lacks for the tokens that are likely to be proposed next,
    /// as some were in the last step.
    pub(super) fn lacking(&self, sequence: &Sequence, checkpoints: &Checkpoints) -> usize {
        let proposes = sequence.drafts.as_ref().is_some_and(|drafts| drafts.has_proposed());
        if !self.is_on() || !proposes || sequence.held.computed + 1 != sequence.tokens.len() {
            return 0;
        }
        let more = self.limit(sequence, checkpoints).saturating_sub(self.covered(sequence));
        blocks_for(self.context.spec.block_size, more)
    }

    /// The tokens that are proposed for a sequence, at most `limit`. None of them ends its answer, so
    /// that only the last token that is sampled can.
    fn draft(
        &self,
        sequence: &mut Sequence,
        limit: usize,
        worth: Option<Worth>,
        tree: &TreeReader,
    ) -> Vec<u32> {
        let Some(sampler) = sequence.sampler.as_deref().filter(|_| limit > 0) else {
            return Vec::new();
        };
        let speculation = &self.context.config.speculation;
        let drafts = sequence.drafts.get_or_insert_with(|| Box::new(Drafts::new(speculation)));
        let context = DraftContext {
            tokens: &sequence.tokens,
            prompt_len: sequence.prompt_len,
            prediction: &sequence.options.prediction,
            tree,
            namespace: &sequence.namespace,
            sampler,
        };
        let mut proposed = drafts.propose(&context, limit, worth);
        let vocab_size = self.context.spec.vocab_size;
        let ends = |&token: &u32| {
            token as usize >= vocab_size
                || sequence.eos_ids.contains(token)
                || sequence.options.stop_ids.contains(token)
        };
        let end = proposed.iter().position(ends).unwrap_or(proposed.len());
        proposed.truncate(end);
        if !proposed.is_empty() {
            sampler.prepare_ahead(&proposed);
        }
        proposed
    }
}
