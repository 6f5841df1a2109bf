//! Whether there are enough blocks for a waiting request, in addition to the running sequences and
//! to followers that will be admitted before it.

use super::Scheduler;
use crate::budget::{self, BlockDemand};
use crate::config::AdmissionPolicy;
use crate::memory::BlockCounts;
use crate::policy::Candidate;
use crate::queue::Waiting;
use crate::sequence::Sequence;
use crate::{blocks_for, policy};

/// One round of admission: the order is computed once, then requests are tried.
#[derive(Debug)]
pub(super) struct Round {
    /// The admission policy of this round.
    policy: AdmissionPolicy,
    /// The requests that waited when the round began, in order of arrival.
    candidates: Vec<Candidate>,
    /// Maximum cost of each of the first candidates; see [`policy::slacks`].
    slacks: Vec<usize>,
}

impl Round {
    pub(super) fn new(policy: AdmissionPolicy, candidates: Vec<Candidate>) -> Round {
        let slacks = policy::slacks(&candidates).collect();
        Round { policy, candidates, slacks }
    }

    /// The candidates to try, at most `look_ahead`, best first.
    pub(super) fn order(&self, look_ahead: usize) -> impl Iterator<Item = &Candidate> {
        let order = policy::order(self.policy, &self.candidates, look_ahead);
        order.into_iter().map(|index| &self.candidates[index])
    }

    fn index(&self, candidate: &Candidate) -> usize {
        self.candidates.partition_point(|other| other.arrival < candidate.arrival)
    }

    /// The maximum cost at which a candidate may be admitted.
    pub(super) fn slack(&self, candidate: &Candidate) -> usize {
        self.slacks.get(self.index(candidate)).copied().unwrap_or(0)
    }

    /// The candidates that have arrived before this one.
    pub(super) fn earlier(&self, candidate: &Candidate) -> &[Candidate] {
        &self.candidates[..self.index(candidate)]
    }
}

impl<M> Scheduler<M> {
    /// Whether a waiting request fits into `capacity` with the cached part that its last query
    /// found, if `promised` blocks are set aside for followers.
    pub(super) fn fits(&self, waiting: &Waiting, capacity: BlockCounts, promised: usize) -> bool {
        if !self.context.config.conservative {
            return self.peak(waiting) + promised <= capacity.available();
        }
        let block_size = self.context.spec.block_size;
        let blocks_max = |sequence: &Sequence| {
            let tokens_max = sequence.prompt_len + sequence.max_tokens;
            blocks_for(block_size, tokens_max.saturating_sub(1))
        };
        let running: usize = self.batch.sequences().map(blocks_max).sum();
        running + blocks_max(&waiting.sequence) <= self.context.spec.block_count
    }

    /// The maximum number of blocks that the running sequences and a waiting request will hold at
    /// any future time, beyond those they hold now.
    fn peak(&self, waiting: &Waiting) -> usize {
        let block_size = self.context.spec.block_size;
        let Waiting { sequence, matched, resume, .. } = waiting;
        let running = self
            .batch
            .sequences()
            .map(|sequence| (sequence, sequence.held.computed, sequence.held.table.len()));
        let all = running.chain([(sequence, *resume, matched / block_size)]);
        // Assumes that prompts are computed one after another, with the tokens of each step that
        // decodes leave.
        let limits = self.estimates.step_limits(self.is_alone());
        let step = limits.tokens.min(limits.timed).saturating_sub(self.batch.len());
        let step = step.max(limits.tokens / 4).max(1);
        let mut pending = 0;
        budget::peak(
            block_size,
            all.map(|(sequence, computed, held)| {
                pending += sequence.tokens.len() - computed;
                let steps = pending.div_ceil(step) + sequence.remaining();
                let steps = (!sequence.is_stalled()).then_some(steps);
                BlockDemand { steps, ..self.demand(sequence, held) }
            }),
        )
    }

    /// The demand of a sequence that holds `held` blocks, with an unknown number of steps.
    pub(super) fn demand(&self, sequence: &Sequence, held: usize) -> BlockDemand {
        let expected = sequence.expected(self.estimates.answers());
        let shared = sequence.prompt_len / self.context.spec.block_size;
        BlockDemand { tokens: sequence.tokens.len(), held, expected, steps: None, shared }
    }

    /// Number of blocks set aside for followers: those that will be admitted before `candidate` once
    /// their leaders have committed the shared positions.
    pub(super) fn promised_to_followers(&self, candidate: &Candidate, round: &Round) -> usize {
        let block_size = self.context.spec.block_size;
        let key = policy::sort_key(round.policy, candidate);
        let mut promised = 0;
        for (other, &slack) in round.candidates.iter().zip(&round.slacks) {
            if other.arrival == candidate.arrival || other.ready || other.stalled || other.held {
                continue;
            }
            let Some(waiting) = self.admission.queue().get(other.arrival) else { continue };
            let Some(follow) = waiting.follow else { continue };
            let then = Candidate { matched: follow.shared, ..*other };
            if then.cost() <= slack && policy::sort_key(round.policy, &then) < key {
                let demand = self.demand(&waiting.sequence, follow.shared / block_size);
                promised += budget::peak(block_size, [demand]);
            }
        }
        promised
    }

    /// Whether no other request decodes or waits.
    pub(super) fn is_alone(&self) -> bool {
        self.batch.len() <= 1 && self.admission.queue().is_empty()
    }
}
