//! [`Speculating`]: which tokens are proposed in the next step, of what the others leave.

use std::time::Instant;

use stolon_kvcache::TreeReader;

use super::batch::{Batch, Step};
use super::checkpoints::Checkpoints;
use crate::blocks_for;
use crate::context::EngineContext;
use crate::schedule::Slice;
use crate::sequence::Sequence;
use crate::speculation::{
    Candidate, Choice, DraftContext, Drafts, ModelTimes, Proposal, StepTimes, Worth,
};
use crate::step_plan::{DraftDone, RowResult};

/// The durations from which follows what proposals are worth. See the module documentation.
#[derive(Debug)]
pub(super) struct Speculating {
    context: EngineContext,
    times: StepTimes,
    model: ModelTimes,
}

/// Number of shares of the time that a step may take longer for proposals of a draft model: for its
/// forward passes, for tokens that it has yet to compute, and for the positions in the step.
const SHARES: f64 = 3.0;

/// What the step leaves for proposals.
#[derive(Clone, Copy, Debug)]
struct Room {
    /// What a proposed token costs and saves; `None` if every draft is proposed.
    worth: Option<Worth>,
    /// Duration of the step without proposals in seconds; 0 if every draft is proposed.
    plain: f64,
    /// Maximum number of proposed tokens of all sequences.
    tokens: usize,
    /// Time in seconds for the forward passes of a draft model, and as much again for the tokens
    /// that it has yet to compute.
    spare: f64,
}

impl Speculating {
    pub(super) fn new(context: &EngineContext) -> Speculating {
        let (times, model) = (StepTimes::default(), ModelTimes::new());
        Speculating { context: context.clone(), times, model }
    }

    /// Learns from the step that ends now how long steps take. Steps with prompts say nothing about
    /// others.
    pub(super) fn note(
        &mut self,
        step: &Step,
        draft: &DraftDone,
        results: &[RowResult],
        now: Instant,
    ) {
        let is_decode = step.slices.iter().all(|slice| slice.count == 1);
        if !self.is_on() || !is_decode || step.slices.is_empty() {
            return;
        }
        let proposed = step.slices.iter().map(|slice| slice.proposed).sum();
        let time = now.saturating_duration_since(step.began).saturating_sub(draft.time);
        self.times.note(step.slices.len(), proposed, time);
        match draft.output.first_tokens {
            0 => self.model.forget(),
            _ => self.model.note(draft),
        }
        for (index, guesses) in &draft.proposals {
            let sampled = results.get(*index).map_or(&[][..], |result| &result.sampled);
            let followed: Vec<u32> = sampled.iter().map(|sampled| sampled.token).collect();
            self.model.learn(guesses.clone(), &followed);
        }
    }

    /// What is proposed for each of `slices`, at most `tokens` together, and the maximum number of
    /// tokens that a draft model computes in the step before it guesses any. `waits` says whether no
    /// other request waits for the step, and whether requests of different tenants do.
    pub(super) fn propose(
        &self,
        (batch, checkpoints): (&mut Batch, &Checkpoints),
        slices: &[(u64, Slice)],
        tokens: usize,
        waits: (bool, bool),
        tree: &TreeReader,
    ) -> (Vec<Proposal>, usize) {
        let mut proposals = vec![Proposal::Tokens(Vec::new()); slices.len()];
        // A step with prompts is as long as it may be.
        if !self.is_on() || slices.iter().any(|(_, slice)| slice.count != 1) {
            return (proposals, 0);
        }
        let Some(mut room) = self.room(slices.len(), tokens, waits) else { return (proposals, 0) };
        let budget = match room.spare.is_infinite() {
            true => tokens,
            false => tokens.min(self.model.tokens(room.plain, room.spare)),
        };
        let mut candidates = Vec::new();
        for (index, (id, slice)) in slices.iter().enumerate() {
            let Some(sequence) = batch.get_mut(*id) else { continue };
            // Equal shares; what one does not use goes to the next ones.
            let share = room.tokens.div_ceil(slices.len() - index);
            let is_decode = slice.start + 1 == sequence.tokens.len();
            let limit = if is_decode { self.limit(sequence, checkpoints) } else { 0 };
            let limit = limit.min(share);
            let (mut proposed, saved) = self.draft(sequence, limit, room.worth, tree);
            // With blocks for more, the next step may propose more.
            let covered = self.covered(sequence);
            proposed.truncate(covered);
            let saved = if proposed.is_empty() { 0.0 } else { saved };
            room.tokens -= proposed.len();
            if limit > 0 && self.context.spec.draft_model && sequence.images.positions() == 0 {
                let rate = sequence.drafts.as_ref().map_or(0.0, |drafts| drafts.model_rate());
                candidates.push((covered, Candidate { index, rate, limit, saved }));
            }
            proposals[index] = Proposal::Tokens(proposed);
        }
        if self.context.spec.draft_model {
            self.ask_model(batch, slices, candidates, room, &mut proposals);
        }
        for ((id, _), proposal) in slices.iter().zip(&proposals) {
            let Proposal::Tokens(tokens) = proposal else { continue };
            let sampler = batch.get_mut(*id).and_then(|sequence| sequence.sampler.as_deref());
            if let Some(sampler) = sampler.filter(|_| !tokens.is_empty()) {
                sampler.prepare_ahead(tokens);
                self.context.gauges.drafts.add(1);
                self.context.gauges.drafted_tokens.add(tokens.len());
            }
        }
        (proposals, budget)
    }

    /// What a step of `sequences` sequences leaves for proposals; `None` if nothing should be
    /// proposed.
    fn room(
        &self,
        sequences: usize,
        tokens: usize,
        (is_alone, several_tenants): (bool, bool),
    ) -> Option<Room> {
        let config = &self.context.config;
        let left = tokens.saturating_sub(sequences);
        if !config.speculation.adaptive {
            return Some(Room { worth: None, plain: 0.0, tokens: left, spare: f64::INFINITY });
        }
        let worth = self.times.worth(sequences)?;
        let (worth, plain) = (Some(worth), worth.saved * sequences as f64);
        if is_alone {
            return Some(Room { worth, plain, tokens: left, spare: f64::INFINITY });
        }
        let target = config.step_time_target.filter(|_| !several_tenants);
        let shares = if self.context.spec.draft_model { SHARES } else { 1.0 };
        let spare = self.times.spare(sequences, target) / shares;
        Some(Room { worth, plain, tokens: left.min(self.times.room(sequences, spare)), spare })
    }

    /// Replaces the proposals for which a draft model is expected to save more time. Each candidate
    /// comes with the number of positions for which its sequence has blocks.
    fn ask_model(
        &self,
        batch: &mut Batch,
        slices: &[(u64, Slice)],
        candidates: Vec<(usize, Candidate)>,
        room: Room,
        proposals: &mut [Proposal],
    ) {
        let Room { worth, plain, mut tokens, spare } = room;
        let chosen =
            match worth {
                Some(worth) => {
                    let passes = self.model.room(candidates.len(), plain, spare);
                    let limited = |(_, candidate): &(usize, Candidate)| Candidate {
                        limit: candidate.limit.min(passes),
                        ..*candidate
                    };
                    self.model.choose(candidates.iter().map(limited).collect(), worth, plain)
                }
                // Every draft is proposed, and those of the other sources come first.
                None => {
                    let without = candidates.iter().filter(|(_, candidate)| candidate.saved == 0.0);
                    let choice = |(_, Candidate { index, limit, .. }): &(usize, Candidate)| {
                        Choice { index: *index, count: *limit, more: f64::INFINITY }
                    };
                    without.map(choice).collect()
                }
            };
        let mut chosen = chosen.into_iter().peekable();
        for (covered, Candidate { index, .. }) in candidates {
            let drafts = batch.get_mut(slices[index].0).and_then(|s| s.drafts.as_deref_mut());
            let Some(drafts) = drafts else { continue };
            let Some(Choice { count, more, .. }) = chosen.next_if(|choice| choice.index == index)
            else {
                drafts.pass_model();
                continue;
            };
            let left = tokens + proposals[index].len();
            let count = count.min(covered).min(left);
            let Some(earned) = drafts.prefer_model(count, more) else { continue };
            tokens = left - count;
            let missing_max = self.model.missing_max(plain, earned);
            proposals[index] = Proposal::Model { count, missing_max };
        }
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

    /// The tokens that the sources propose for a sequence, at most `limit`, and the time in seconds
    /// that they are expected to save. None of them ends its answer, so that only the last token that
    /// is sampled can.
    fn draft(
        &self,
        sequence: &mut Sequence,
        limit: usize,
        worth: Option<Worth>,
        tree: &TreeReader,
    ) -> (Vec<u32>, f64) {
        let Some(sampler) = sequence.sampler.as_deref().filter(|_| limit > 0) else {
            return (Vec::new(), 0.0);
        };
        let speculation = &self.context.config.speculation;
        let new = || Box::new(Drafts::new(speculation, self.model.rate()));
        let drafts = sequence.drafts.get_or_insert_with(new);
        let context = DraftContext {
            tokens: &sequence.tokens,
            prompt_len: sequence.prompt_len,
            prediction: &sequence.options.prediction,
            tree,
            namespace: &sequence.namespace,
            sampler,
        };
        let (mut proposed, saved) = drafts.propose(&context, limit, worth);
        let vocab_size = self.context.spec.vocab_size;
        let ends = |&token: &u32| {
            token as usize >= vocab_size
                || sequence.eos_ids.contains(token)
                || sequence.options.stop_ids.contains(token)
        };
        let end = proposed.iter().position(ends).unwrap_or(proposed.len());
        proposed.truncate(end);
        (proposed, saved)
    }
}
