//! Whether there is room for a waiting request, beside what runs and those that will go before it.

use super::Scheduler;
use crate::budget::{self, Capacity, Course};
use crate::config::AdmissionPolicy;
use crate::memory::Memory;
use crate::policy::Candidate;
use crate::sequence::Sequence;
use crate::{blocks_for, policy};

/// One round of trying.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) policy: AdmissionPolicy,
    /// In order of arrival, as the queue is.
    pub(super) candidates: Vec<Candidate>,
    /// What each of the first of them may cost; see [`policy::slacks`].
    pub(super) slacks: Vec<usize>,
}

impl<M: Memory> Scheduler<M> {
    /// Whether a waiting request fits, if `matched` of its tokens are cached and followers were
    /// promised blocks.
    pub(super) fn fits(
        &self,
        index: usize,
        capacity: Capacity,
        promised: usize,
        matched: usize,
    ) -> bool {
        if !self.context.config.conservative {
            return self.peak(index, matched) + promised <= capacity.available();
        }
        let block_size = self.context.spec.block_size;
        let whole = |sequence: &Sequence| {
            let most = sequence.prompt_len + sequence.max_tokens;
            blocks_for(block_size, most.saturating_sub(1))
        };
        let running: usize = self.running.iter().map(|running| whole(&running.sequence)).sum();
        running + whole(&self.queue.entries()[index].sequence) <= self.context.spec.block_count
    }

    /// The most blocks that what runs and a waiting request, of which `matched` tokens are cached,
    /// will have taken at any time to come.
    fn peak(&self, index: usize, matched: usize) -> usize {
        let block_size = self.context.spec.block_size;
        let sequence = &self.queue.entries()[index].sequence;
        let running = self.running.iter().map(|running| {
            let sequence = &running.sequence;
            (sequence, sequence.held.computed, sequence.held.table.len())
        });
        let all = running.chain([(sequence, matched, matched / block_size)]);
        // Prompts are computed in turn, in what decodes leave of each step.
        let config = &self.context.config;
        let step = config.max_batched_tokens.saturating_sub(self.running.len());
        let step = step.max(config.max_batched_tokens / 4).max(1);
        let mut pending = 0;
        budget::peak(
            block_size,
            all.map(|(sequence, computed, held)| {
                pending += sequence.tokens.len() - computed;
                let steps = pending.div_ceil(step) + sequence.remaining();
                let steps = (!sequence.is_paused()).then_some(steps);
                Course { steps, ..self.course(sequence, held) }
            }),
        )
    }

    /// The course of a sequence that holds so many blocks, its end left open.
    pub(super) fn course(&self, sequence: &Sequence, held: usize) -> Course {
        let expected = self.forecast.remaining(sequence.max_tokens, sequence.generated());
        let shared = sequence.prompt_len / self.context.spec.block_size;
        Course { tokens: sequence.tokens.len(), held, expected, steps: None, shared }
    }

    /// Blocks that followers are expected to take, those of them that will go before the request
    /// at `index` once their leaders have committed what they wait for.
    pub(super) fn promised_to_followers(&self, index: usize, round: &Round) -> usize {
        let block_size = self.context.spec.block_size;
        let key = policy::sort_key(round.policy, &round.candidates[index]);
        let mut promised = 0;
        for (other, &slack) in round.slacks.iter().enumerate() {
            let Some(follow) = self.queue.entries()[other].follow else { continue };
            let then = Candidate { matched: follow.shared, ..round.candidates[other] };
            if other != index
                && !then.ready
                && !then.stalled
                && then.cost() <= slack
                && policy::sort_key(round.policy, &then) < key
            {
                let sequence = &self.queue.entries()[other].sequence;
                let course = self.course(sequence, follow.shared / block_size);
                promised += budget::peak(block_size, [course]);
            }
        }
        promised
    }
}
