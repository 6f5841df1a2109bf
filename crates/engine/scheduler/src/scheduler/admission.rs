//! [`Admission`]: the waiting requests, and when they are tried.
//!
//! A change that may make room for a waiting request calls [`Admission::retry`]. The next round of
//! admission (`admit.rs`) then tries the requests in the order of the policy. Between its steps, it
//! identifies them by their [order of arrival](Place::arrival), because the queue changes while they
//! are tried.

mod following;
mod lookups;

use std::time::Instant;

use stolon_kvcache::PrefixMatch;

use super::batch::Batch;
use super::blocks::Blocks;
use crate::context::EngineContext;
use crate::memory::{Acquired, ActorStopped, Memory};
use crate::permits::QueuePermit;
use crate::policy::{Candidate, Place};
use crate::queue::{Queue, Waiting};
use crate::sequence::Sequence;
use crate::tenant::SlotShares;
use crate::transfer::RepeatedLookup;

/// Maximum number of waiting requests whose match is queried in one round, so that the time of a
/// round does not grow with the queue: 32 full hits of 8,192 tokens take 60 us. With 8, or with all
/// of a thousand waiting requests instead, no figure of the simulated workloads changes by more
/// than its noise, because a request's match is looked up again when it is tried.
const QUERIES_PER_ROUND: usize = 32;

/// The waiting requests. See the module documentation.
#[derive(Debug)]
pub(super) struct Admission {
    context: EngineContext,
    queue: Queue,
    /// Repeated look-ups of stored KV that [`Admission::take_lookups`] has not returned yet.
    lookups: Vec<RepeatedLookup>,
    /// Something has changed that may make it possible to admit a waiting request.
    retry: bool,
    /// Whether a request did not fit into the pool next to the running ones in the last round.
    short_of_blocks: bool,
    /// Whether a waiting or running sequence may have a deadline.
    has_deadlines: bool,
}

impl Admission {
    pub(super) fn new(context: &EngineContext) -> Admission {
        Admission {
            context: context.clone(),
            queue: Queue::default(),
            lookups: Vec::new(),
            retry: false,
            short_of_blocks: false,
            has_deadlines: false,
        }
    }

    /// The waiting requests.
    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    #[cfg(test)]
    pub(super) fn queue_mut(&mut self) -> &mut Queue {
        &mut self.queue
    }

    /// Adds a request.
    pub(super) fn submit(&mut self, sequence: Sequence, permit: Option<QueuePermit>) {
        let times = &sequence.times;
        self.has_deadlines |= times.deadline.is_some() || times.queue_deadline.is_some();
        self.queue.push(sequence, permit, self.context.config.max_overtake_tokens);
        self.retry = true;
    }

    /// Adds a request that was preempted.
    pub(super) fn reinsert(&mut self, sequence: Sequence, place: Place) {
        self.queue.reinsert(sequence, place);
        self.retry = true;
    }

    /// Removes a request.
    pub(super) fn remove(&mut self, arrival: u64) -> Option<Waiting> {
        self.queue.remove(arrival)
    }

    /// Removes a request that is admitted, and charges its cost to the `earlier` ones. `None` if the
    /// cost is above `slack`.
    pub(super) fn take(
        &mut self,
        candidate: &Candidate,
        earlier: &[Candidate],
        slack: usize,
    ) -> Option<Waiting> {
        let waiting = self.queue.get(candidate.arrival)?;
        let cost = waiting.cost();
        if cost > slack {
            return None;
        }
        self.queue.charge_overtaking(earlier, candidate, cost);
        self.queue.remove(candidate.arrival)
    }

    /// Removes the request of the sequence with this id, which its caller has canceled.
    pub(super) fn cancel(&mut self, id: u64) -> Option<Waiting> {
        let arrival = self.queue.of_id(id)?.place.arrival;
        self.retry = true;
        self.queue.remove(arrival)
    }

    /// Removes requests that have timed out or were canceled.
    pub(super) fn take_overdue(&mut self, now: Instant) -> Vec<Waiting> {
        let overdue = self.queue.take_overdue(now);
        self.retry |= !overdue.is_empty();
        overdue
    }

    /// Drops every request, because the engine stops.
    pub(super) fn close(&mut self) {
        self.queue = Queue::default();
    }

    /// Something has changed that may make it possible to admit a waiting request.
    pub(super) fn retry(&mut self) {
        self.retry = true;
    }

    /// Retries if a sequence has been stalled by a slow consumer, because it can be preempted for a
    /// waiting request. There may be no other event that would do it: a stalled sequence takes part
    /// in no step.
    pub(super) fn notice_stalled(&mut self, batch: &mut Batch) {
        if !self.queue.is_empty() {
            self.retry |= batch.notice_stalled();
        }
    }

    /// Whether a round of admission is due.
    pub(super) fn is_due(&self) -> bool {
        self.retry && !self.queue.is_empty()
    }

    /// A round of admission begins.
    pub(super) fn begin_round(&mut self) {
        self.retry = false;
        self.short_of_blocks = false;
    }

    /// A request does not fit into the pool next to the running ones.
    pub(super) fn note_short_of_blocks(&mut self) {
        self.short_of_blocks = true;
    }

    /// Whether a waiting request did not fit into the pool next to the running ones.
    pub(super) fn is_short_of_blocks(&self) -> bool {
        self.short_of_blocks && !self.queue.is_empty()
    }

    /// The time of the next timeout of a waiting or running sequence.
    pub(super) fn next_deadline(&mut self, batch: &Batch) -> Option<Instant> {
        if !self.has_deadlines {
            return None;
        }
        let deadlines = [batch.next_deadline(), self.queue.next_deadline()];
        let next = deadlines.into_iter().flatten().min();
        self.has_deadlines = next.is_some();
        next
    }

    /// Looks up what is cached of requests for which that was not done at this version of the tree.
    pub(super) fn refresh_matches<M: Memory>(&mut self, blocks: &Blocks<M>) {
        if !self.context.config.prefix_caching {
            return;
        }
        let reader = blocks.reader();
        self.queue.refresh_matches(reader.tree_version(), QUERIES_PER_ROUND, |sequence| {
            if sequence.bypasses_match() {
                PrefixMatch::default()
            } else {
                reader.query_resume(&sequence.namespace, &sequence.tokens)
            }
        });
    }

    /// What the policy needs to know about each request.
    pub(super) fn candidates(&self, batch: &Batch, shares: &SlotShares) -> Vec<Candidate> {
        self.queue.candidates(batch.sequences(), shares)
    }

    /// Drops the locks of the matches of waiting requests. Returns whether there was one.
    pub(super) fn drop_match_locks(&mut self) -> bool {
        self.queue.drop_match_locks()
    }

    /// Locks the match of the request at the head of the order, which does not fit, so that
    /// requests that are admitted before it cannot evict it. Returns the number of blocks that can
    /// still be evicted, if that may have changed.
    pub(super) async fn lock_match<M: Memory>(
        &mut self,
        arrival: u64,
        blocks: &mut Blocks<M>,
    ) -> Result<Option<usize>, ActorStopped> {
        if self.queue.get(arrival).is_none_or(|waiting| waiting.match_lock.is_some()) {
            return Ok(None);
        }
        self.queue.drop_match_locks();
        let Some(waiting) = self.queue.get_mut(arrival).filter(|w| w.matched > 0) else {
            return Ok(None);
        };
        let Sequence { namespace, tokens, .. } = &waiting.sequence;
        let acquired = blocks.memory().acquire(namespace, tokens, tokens.len(), None).await?;
        let evictable = acquired.evictable;
        waiting.match_lock = Some(acquired);
        Ok(Some(evictable))
    }

    /// Locks the cached part of a request's prompt, and records its length. `None` if the request
    /// does not wait any longer.
    pub(super) async fn acquire_match<M: Memory>(
        &mut self,
        arrival: u64,
        blocks: &mut Blocks<M>,
    ) -> Result<Option<Acquired>, ActorStopped> {
        let Some(waiting) = self.queue.get_mut(arrival) else { return Ok(None) };
        let sequence = &waiting.sequence;
        let limit = if sequence.bypasses_match() { 0 } else { sequence.tokens.len() };
        let Sequence { namespace, tokens, options, .. } = sequence;
        let priority = Some(options.priority);
        let acquired = blocks.memory().acquire(namespace, tokens, limit, priority).await?;
        let cached = acquired.lease.len();
        let resume = match self.context.spec.state {
            Some(_) => acquired.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.len()),
            None => cached,
        };
        waiting.set_match(PrefixMatch { cached, resume }, blocks.reader().tree_version());
        Ok(Some(acquired))
    }

    /// A request releases the checkpoint of its match, and will compute its whole prompt.
    pub(super) fn release_checkpoint(&mut self, arrival: u64) {
        if let Some(waiting) = self.queue.get_mut(arrival) {
            waiting.resume = 0;
        }
    }

    /// Verifies that no request was overtaken by more than its bound.
    pub(super) fn audit(&self) -> Result<(), String> {
        let exceeds = |waiting: &&Waiting| waiting.place.overtaken > waiting.place.bound;
        let Some(Waiting { sequence, place, .. }) = self.queue.entries().iter().find(exceeds)
        else {
            return Ok(());
        };
        Err(format!(
            "sequence {}: overtaken by {} tokens, expected at most {}",
            sequence.id, place.overtaken, place.bound
        ))
    }
}
