//! The blocks of running sequences: committed when full, reserved when needed, and released by
//! preemption when an older sequence needs them.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use super::{Running, Scheduler};
use crate::blocks_for;
use crate::memory::{ActorStopped, CommitItem, Committed, Memory};
use crate::policy::Candidate;
use crate::preempt::{self, Holder};
use crate::queue::Waiting;
use crate::tenant::{SlotShares, TenantId};
use crate::transfer::SaveRequest;

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
    pub(super) fn yields_to(self, waiting: &Waiting, candidate: &Candidate) -> bool {
        match self {
            Victim::OfShare(_) => !candidate.has_share,
            Victim::OfPriority { tenant, class, slack, .. } => {
                waiting.sequence.tenant == tenant
                    && candidate.class > class
                    && candidate.cost() <= slack
            }
        }
    }
}

impl<M: Memory> Scheduler<M> {
    /// Adds the full blocks of the running sequences to the tree, except for those that write
    /// nothing to it.
    pub(super) async fn commit(&mut self) -> Result<(), ActorStopped> {
        if !self.context.config.prefix_caching {
            return Ok(());
        }
        let block_size = self.context.spec.block_size;
        let mut indices = Vec::new();
        let mut items = Vec::new();
        for (index, running) in self.running.iter_mut().enumerate() {
            let sequence = &mut running.sequence;
            if !sequence.writes_cache() {
                continue;
            }
            let full = (!sequence.in_step).then(|| sequence.held.take_full(block_size)).flatten();
            let Some((len, lease, reserved)) = full else { continue };
            indices.push(index);
            items.push(CommitItem { tokens: Arc::clone(&sequence.tokens), len, lease, reserved });
        }
        if items.is_empty() {
            return Ok(());
        }
        let before: Vec<usize> = items.iter().map(|item| item.lease.len()).collect();
        let committed = self.memory.commit(items).await?;
        let mut saves = Vec::new();
        for ((index, committed), before) in indices.into_iter().zip(committed).zip(before) {
            let Committed { lease, reserved } = committed;
            self.running[index].sequence.held.committed_blocks(lease, reserved);
            saves.extend(self.wanted_save(index, before / block_size));
        }
        for save in saves {
            self.save(save).await?;
        }
        Ok(())
    }

    /// The save that the sink requests for a running sequence, which has committed its blocks from
    /// `first` on.
    fn wanted_save(&self, index: usize, first: usize) -> Option<SaveRequest> {
        let sink = self.context.config.kv_sink.as_ref()?;
        let sequence = &self.running[index].sequence;
        let committed = first..sequence.held.committed() / self.context.spec.block_size;
        let priority = sequence.options.priority;
        sink.wanted(&sequence.namespace, &sequence.tokens, committed, priority)
    }

    /// Reserves the blocks that the next positions of running sequences need. If there are not
    /// enough, sessions release theirs, and then the youngest sequences are preempted.
    pub(super) async fn grow(&mut self) -> Result<(), ActorStopped> {
        let block_size = self.context.spec.block_size;
        let short = |running: &Running| {
            let sequence = &running.sequence;
            let needed = blocks_for(block_size, sequence.tokens.len());
            needed.saturating_sub(sequence.held.table.len())
        };
        let mut growing: Vec<(u64, usize)> = Vec::new();
        for running in &self.running {
            if short(running) > 0 && !running.sequence.is_stalled() {
                growing.push((running.sequence.id, short(running)));
            }
        }
        if growing.is_empty() {
            return Ok(());
        }
        let total: usize = growing.iter().map(|(_, count)| count).sum();
        let mut reserved = self.reserve(total).await?;
        if reserved.is_none() && self.queue.drop_match_locks() {
            reserved = self.reserve(total).await?;
        }
        if reserved.is_none() && self.release_answers() {
            reserved = self.reserve(total).await?;
        }
        while reserved.is_none() && self.context.sessions.release_oldest() {
            reserved = self.reserve(total).await?;
        }
        if let Some(mut blocks) = reserved {
            for (id, count) in growing {
                let share = blocks.split(count);
                let running = self.running.iter_mut().find(|r| r.sequence.id == id);
                if let Some(running) = running {
                    running.sequence.held.add_reserved(share);
                }
            }
            return Ok(());
        }
        self.grow_one_by_one(growing.into_iter().map(|(id, _)| id).collect()).await
    }

    /// Reserves one block for each sequence, oldest first, when there are not enough for all. The
    /// youngest sequences are preempted to free blocks.
    async fn grow_one_by_one(&mut self, mut growing: Vec<u64>) -> Result<(), ActorStopped> {
        let arrival = |running: &[Running], id: u64| {
            running.iter().find(|r| r.sequence.id == id).map(|r| r.arrival)
        };
        growing.sort_by_key(|&id| arrival(&self.running, id));
        for id in growing {
            while let Some(index) = self.running.iter().position(|r| r.sequence.id == id) {
                if let Some(block) = self.reserve(1).await? {
                    self.running[index].sequence.held.add_reserved(block);
                    break;
                }
                let holders: Vec<Holder> = self.running.iter().map(Running::holder).collect();
                match preempt::victim(&holders) {
                    Some(victim) => {
                        self.forecast.preempted();
                        self.context.gauges.preemptions_for_blocks.add(1);
                        self.preempt(victim);
                    }
                    None => break,
                }
            }
        }
        Ok(())
    }

    /// Preempts a sequence: releases its blocks and puts it back into the queue. Its full blocks
    /// are in the tree and may still be cached when it runs again.
    pub(super) fn preempt(&mut self, index: usize) {
        let Running { mut sequence, arrival, overtaken, bound, .. } = self.running.remove(index);
        tracing::debug!(
            target: "stolon",
            parent: &sequence.record.span,
            sequence = sequence.id,
            computed_tokens = sequence.held.computed,
            "request preempted"
        );
        Self::keep_answer(&mut self.written, &mut sequence);
        sequence.found = sequence.held.committed().min(sequence.prompt_len);
        sequence.release_blocks();
        sequence.record.wait();
        let mut waiting = Waiting::new(sequence, arrival, bound, None);
        waiting.overtaken = overtaken;
        self.queue.reinsert(waiting);
        self.try_admission = true;
    }

    /// Preempts the youngest sequence that is stalled by a slow consumer. Returns false if there is
    /// none.
    pub(super) fn preempt_stalled(&mut self) -> bool {
        let is_free = |r: &Running| !r.sequence.in_step && !r.sequence.is_sampling;
        let stalled = |r: &Running| is_free(r) && r.sequence.is_stalled();
        let youngest = (0..self.running.len())
            .filter(|&index| stalled(&self.running[index]))
            .max_by_key(|&index| self.running[index].arrival);
        match youngest {
            Some(index) => {
                self.context.gauges.preemptions_stalled.add(1);
                self.preempt(index);
                true
            }
            None => false,
        }
    }

    /// The share of the running slots of each tenant.
    pub(super) fn slot_shares(&self) -> SlotShares {
        let running = self.running.iter().map(|r| r.sequence.tenant);
        let waiting = self.queue.entries().iter().map(|waiting| waiting.sequence.tenant);
        SlotShares::new(self.context.config.max_running, running, waiting)
    }

    /// The id of the sequence to preempt if a request of a tenant below its share starts to run
    /// although no slot is free: the youngest one of the tenant with the most slots, preferably one
    /// whose computed positions stay in the cache. `None` if no tenant exceeds its share.
    pub(super) fn share_victim(&mut self, shares: &SlotShares) -> Option<Victim> {
        let below_share = |waiting: &Waiting| !shares.is_reached(waiting.sequence.tenant);
        if !self.queue.entries().iter().any(below_share) {
            return None;
        }
        let caches = self.context.config.prefix_caching;
        let rank = |r: &&Running| {
            let sequence = &r.sequence;
            let keeps = caches && sequence.writes_cache() && !sequence.bypasses_match();
            (shares.running(sequence.tenant), keeps, r.arrival)
        };
        let exceeds = |r: &&Running| shares.is_exceeded(r.sequence.tenant);
        let victims = self.running.iter().filter(|r| exceeds(r) && !r.sequence.is_sampling);
        let victim = victims.max_by_key(rank)?;
        if victim.sequence.in_step {
            // The step reads its blocks. Admission is tried again when it has ended.
            self.try_admission = true;
            return None;
        }
        Some(Victim::OfShare(victim.sequence.id))
    }

    /// The sequence to preempt if a request of the same tenant with a larger priority starts to run
    /// although no slot is free: the youngest one of the smallest priority. `None` if none waits, or
    /// if the bound on overtaking protects the sequence.
    pub(super) fn priority_victim(&mut self) -> Option<Victim> {
        let mut largest: HashMap<TenantId, i32> = HashMap::new();
        for Waiting { sequence, .. } in self.queue.entries() {
            let class = largest.entry(sequence.tenant).or_insert(i32::MIN);
            *class = (*class).max(sequence.options.priority);
        }
        let yields = |r: &&Running| {
            let sequence = &r.sequence;
            let larger = largest.get(&sequence.tenant).copied().unwrap_or(i32::MIN);
            sequence.options.priority < larger && r.overtaken < r.bound && !sequence.is_sampling
        };
        let rank = |r: &&Running| (Reverse(r.sequence.options.priority), r.arrival);
        let victim = self.running.iter().filter(yields).max_by_key(rank)?;
        let sequence = &victim.sequence;
        if sequence.in_step {
            // As in `share_victim`: admission is tried again when the step has ended.
            self.try_admission = true;
            return None;
        }
        Some(Victim::OfPriority {
            id: sequence.id,
            tenant: sequence.tenant,
            class: sequence.options.priority,
            slack: victim.bound - victim.overtaken,
        })
    }

    /// Preempts a sequence for one that has started in its place, with `cost` tokens to compute.
    pub(super) fn preempt_for(&mut self, victim: Victim, cost: usize) {
        let (Victim::OfShare(id) | Victim::OfPriority { id, .. }) = victim;
        let Some(index) = self.running.iter().position(|r| r.sequence.id == id) else { return };
        match victim {
            Victim::OfShare(_) => self.context.gauges.preemptions_for_share.add(1),
            Victim::OfPriority { .. } => {
                self.context.gauges.preemptions_for_priority.add(1);
                let running = &mut self.running[index];
                running.overtaken = running.overtaken.saturating_add(cost);
            }
        }
        self.preempt(index);
    }
}
