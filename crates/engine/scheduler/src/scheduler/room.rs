//! Locks the cached part of a waiting request's prompt before it starts, and decides whether there
//! are enough blocks for it, in addition to the running sequences and to followers that will be
//! admitted before it.

use stolon_kvcache::PrefixMatch;

use super::Scheduler;
use crate::budget::{self, BlockDemand};
use crate::config::AdmissionPolicy;
use crate::memory::{Acquired, ActorStopped, BlockCounts, Memory};
use crate::policy::Candidate;
use crate::queue::Waiting;
use crate::sequence::Sequence;
use crate::{blocks_for, policy};

/// One round of admission: the order is computed once, then requests are tried.
#[derive(Debug)]
pub(super) struct Round {
    /// The admission policy of this round.
    pub(super) policy: AdmissionPolicy,
    /// In order of arrival, with the same indices as the queue.
    pub(super) candidates: Vec<Candidate>,
    /// Maximum cost of each of the first candidates; see [`policy::slacks`].
    pub(super) slacks: Vec<usize>,
}

impl<M: Memory> Scheduler<M> {
    /// Locks the match of the request at the head of the order, which does not fit, so that
    /// requests that are admitted before it cannot evict it. Returns the number of blocks that can
    /// still be evicted.
    pub(super) async fn lock_match(
        &mut self,
        index: usize,
        evictable: usize,
    ) -> Result<usize, ActorStopped> {
        let waiting = &self.queue.entries()[index];
        if waiting.match_lock.is_some() {
            return Ok(evictable);
        }
        self.queue.drop_match_locks();
        let waiting = &self.queue.entries()[index];
        if waiting.matched == 0 {
            return Ok(evictable);
        }
        let Sequence { namespace, tokens, .. } = &waiting.sequence;
        let acquired = self.memory.acquire(namespace, tokens, tokens.len(), None).await?;
        let evictable = acquired.evictable;
        self.queue.entries_mut()[index].match_lock = Some(acquired);
        Ok(evictable)
    }

    /// Locks the cached part of a waiting request's prompt, and records its length.
    pub(super) async fn acquire_match(&mut self, index: usize) -> Result<Acquired, ActorStopped> {
        let has_states = self.free_slots.is_some();
        let sequence = &self.queue.entries()[index].sequence;
        let limit = if sequence.bypasses_match() { 0 } else { sequence.tokens.len() };
        let Sequence { namespace, tokens, options, .. } = sequence;
        let priority = Some(options.priority);
        let acquired = self.memory.acquire(namespace, tokens, limit, priority).await?;
        let cached = acquired.lease.len();
        let resume = match has_states {
            true => acquired.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.len()),
            false => cached,
        };
        let version = self.reader.tree_version();
        self.queue.entries_mut()[index].set_match(PrefixMatch { cached, resume }, version);
        Ok(acquired)
    }

    /// Whether a waiting request fits into `capacity` with the cached part that its last query
    /// found, if `promised` blocks are set aside for followers.
    pub(super) fn fits(&self, index: usize, capacity: BlockCounts, promised: usize) -> bool {
        if !self.context.config.conservative {
            return self.peak(index) + promised <= capacity.available();
        }
        let block_size = self.context.spec.block_size;
        let blocks_max = |sequence: &Sequence| {
            let tokens_max = sequence.prompt_len + sequence.max_tokens;
            blocks_for(block_size, tokens_max.saturating_sub(1))
        };
        let running: usize = self.running.iter().map(|running| blocks_max(&running.sequence)).sum();
        running + blocks_max(&self.queue.entries()[index].sequence) <= self.context.spec.block_count
    }

    /// The maximum number of blocks that the running sequences and a waiting request will hold at
    /// any future time, beyond those they hold now.
    fn peak(&self, index: usize) -> usize {
        let block_size = self.context.spec.block_size;
        let Waiting { sequence, matched, resume, .. } = &self.queue.entries()[index];
        let running = self.running.iter().map(|running| {
            let sequence = &running.sequence;
            (sequence, sequence.held.computed, sequence.held.table.len())
        });
        let all = running.chain([(sequence, *resume, matched / block_size)]);
        // Assumes that prompts are computed one after another, with the tokens of each step that
        // decodes leave.
        let limits = self.step_limits();
        let step = limits.tokens.min(limits.timed).saturating_sub(self.running.len());
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
        let expected = sequence.expected(self.forecast);
        let shared = sequence.prompt_len / self.context.spec.block_size;
        BlockDemand { tokens: sequence.tokens.len(), held, expected, steps: None, shared }
    }

    /// Number of blocks set aside for followers: those that will be admitted before the request at
    /// `index` once their leaders have committed the shared positions.
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
                && !then.held
                && then.cost() <= slack
                && policy::sort_key(round.policy, &then) < key
            {
                let sequence = &self.queue.entries()[other].sequence;
                let demand = self.demand(sequence, follow.shared / block_size);
                promised += budget::peak(block_size, [demand]);
            }
        }
        promised
    }
}
