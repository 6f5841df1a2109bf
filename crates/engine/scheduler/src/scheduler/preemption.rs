//! Preemption: running sequences that lose their blocks and their place in the batch to another
//! request, and wait again.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::Scheduler;
use super::batch::{Batch, Running};
use crate::memory::Memory;
use crate::policy::Candidate;
use crate::queue::{Queue, Waiting};
use crate::tenant::{SlotShares, TenantId};

/// A running sequence that is preempted if a waiting request starts in its place.
#[derive(Clone, Copy, Debug)]
pub(super) enum Victim {
    /// The sequence with this id, whose tenant has more slots than its share.
    OfShare(u64),
    /// A sequence with a smaller priority than a request of its tenant.
    OfPriority {
        /// The sequence's id.
        id: u64,
        /// The tenant that it belongs to.
        tenant: TenantId,
        /// Its priority.
        class: i32,
        /// Total cost, in tokens, of later requests that may still be admitted before it.
        slack: usize,
    },
}

impl Victim {
    /// Whether it is preempted for this request.
    pub(super) fn yields_to(self, candidate: &Candidate) -> bool {
        match self {
            Victim::OfShare(_) => !candidate.has_share,
            Victim::OfPriority { tenant, class, slack, .. } => {
                candidate.tenant == tenant && candidate.class > class && candidate.cost() <= slack
            }
        }
    }

    fn id(self) -> u64 {
        let (Victim::OfShare(id) | Victim::OfPriority { id, .. }) = self;
        id
    }
}

impl<M: Memory> Scheduler<M> {
    /// Preempts a sequence: releases its blocks and puts it back into the queue. Its full blocks
    /// are in the tree and may still be cached when it runs again.
    pub(super) fn preempt(&mut self, id: u64) {
        let Some(running) = self.batch.remove(id) else { return };
        let place = running.place();
        let mut sequence = running.sequence;
        tracing::debug!(
            target: "stolon",
            parent: &sequence.record.span,
            sequence = sequence.id,
            computed_tokens = sequence.held.computed,
            "request preempted"
        );
        self.checkpoints.keep_answer(&mut sequence);
        sequence.found = sequence.held.committed().min(sequence.prompt_len);
        sequence.release_blocks();
        sequence.record.wait();
        self.admission.reinsert(sequence, place);
    }

    /// Preempts the youngest sequence that is stalled by a slow consumer. Returns false if there is
    /// none.
    pub(super) fn preempt_stalled(&mut self) -> bool {
        let is_stalled = |running: &&Running| {
            let sequence = &running.sequence;
            !sequence.in_step && !sequence.is_sampling && sequence.is_stalled()
        };
        let stalled = self.batch.running().filter(is_stalled);
        let Some(youngest) = stalled.max_by_key(|running| running.place().arrival) else {
            return false;
        };
        let id = youngest.sequence.id;
        self.context.gauges.preemptions_stalled.add(1);
        self.preempt(id);
        true
    }

    /// The sequence to preempt if a waiting request starts to run although no slot is free.
    pub(super) fn victim(&mut self, shares: &SlotShares) -> Option<Victim> {
        let (batch, queue) = (&self.batch, self.admission.queue());
        let by_share = victim_of_share(batch, queue, shares, self.context.config.prefix_caching);
        let victims = [by_share, victim_of_priority(batch, queue)];
        for victim in victims.into_iter().flatten() {
            if self.batch.get(victim.id()).is_some_and(|sequence| !sequence.in_step) {
                return Some(victim);
            }
            // The step reads its blocks. Admission is tried again when it has ended.
            self.admission.retry();
        }
        None
    }

    /// Preempts a sequence for one that has started in its place, with `cost` tokens to compute.
    pub(super) fn preempt_for(&mut self, victim: Victim, cost: usize) {
        if self.batch.get(victim.id()).is_none() {
            return;
        }
        match victim {
            Victim::OfShare(_) => self.context.gauges.preemptions_for_share.add(1),
            Victim::OfPriority { id, .. } => {
                self.context.gauges.preemptions_for_priority.add(1);
                self.batch.overtake(id, cost);
            }
        }
        self.preempt(victim.id());
    }
}

/// The sequence that yields to a request of a tenant below its share: the youngest one of the tenant
/// with the most slots, preferably one whose computed positions stay in the cache (`caches`). `None`
/// if no tenant exceeds its share.
fn victim_of_share(
    batch: &Batch,
    queue: &Queue,
    shares: &SlotShares,
    caches: bool,
) -> Option<Victim> {
    let below_share = |waiting: &Waiting| !shares.is_reached(waiting.sequence.tenant);
    if !queue.entries().iter().any(below_share) {
        return None;
    }
    let rank = |running: &&Running| {
        let sequence = &running.sequence;
        let keeps = caches && sequence.writes_cache() && !sequence.bypasses_match();
        (shares.running(sequence.tenant), keeps, running.place().arrival)
    };
    let yields = |running: &&Running| {
        let sequence = &running.sequence;
        shares.is_exceeded(sequence.tenant) && !sequence.is_sampling
    };
    let victim = batch.running().filter(yields).max_by_key(rank)?;
    Some(Victim::OfShare(victim.sequence.id))
}

/// The sequence that yields to a request of the same tenant with a larger priority: the youngest one
/// of the smallest priority. `None` if none waits, or if the bound on overtaking protects the
/// sequence.
fn victim_of_priority(batch: &Batch, queue: &Queue) -> Option<Victim> {
    let mut largest: HashMap<TenantId, i32> = HashMap::new();
    for Waiting { sequence, .. } in queue.entries() {
        let class = largest.entry(sequence.tenant).or_insert(i32::MIN);
        *class = (*class).max(sequence.options.priority);
    }
    let yields = |running: &&Running| {
        let sequence = &running.sequence;
        let larger = largest.get(&sequence.tenant).copied().unwrap_or(i32::MIN);
        let is_smaller = sequence.options.priority < larger;
        is_smaller && running.place().slack() > 0 && !sequence.is_sampling
    };
    let rank =
        |running: &&Running| (Reverse(running.sequence.options.priority), running.place().arrival);
    let victim = batch.running().filter(yields).max_by_key(rank)?;
    let sequence = &victim.sequence;
    Some(Victim::OfPriority {
        id: sequence.id,
        tenant: sequence.tenant,
        class: sequence.options.priority,
        slack: victim.place().slack(),
    })
}
