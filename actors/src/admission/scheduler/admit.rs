//! From waiting to running: what is tried, what it is charged, whom it follows.

use std::sync::Arc;
use std::time::Instant;

use super::ending::end_early;
use super::{Running, Scheduler};
use crate::admission::budget::{self, Capacity};
use crate::admission::queue::Waiting;
use crate::admission::sequence::{Ending, Held, Sequence};
use crate::admission::sharing::{self, Leader};
use crate::admission::{blocks_for, policy};
use crate::error::CoreError;
use crate::memory::{Gone, Memory};
use crate::request::SequenceEvent;

/// Waiting requests whose match is queried again in one round at most.
const QUERIES_A_ROUND: usize = 32;

/// What came of trying to let a request run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    /// It runs.
    Started,
    /// It waits for a running one's blocks.
    Follows,
    /// It was ended.
    Ended,
    /// It does not fit now.
    NoRoom,
}

impl<M: Memory> Scheduler<M> {
    /// After a step: lets go those who waited for blocks that are there now, or in vain.
    pub(super) fn look_after_followers(&mut self) {
        for waiting in self.queue.entries_mut() {
            let Some(follow) = &mut waiting.follow else { continue };
            let leader = self.running.iter().find(|r| r.sequence.id == follow.leader);
            let progress = leader
                .filter(|leader| leader.sequence.end.is_none())
                .map(|leader| (leader.sequence.held.computed, leader.sequence.held.committed()));
            if sharing::keep_waiting(follow, progress) {
                continue;
            }
            match progress {
                Some((_, committed)) if committed >= follow.shared => {
                    waiting.matched = follow.shared;
                }
                Some(_) => waiting.follows_no_more = true,
                // The leader is gone: another may lead, or this one does.
                None => waiting.leaders_seen = None,
            }
            waiting.follow = None;
            waiting.version = None;
            self.try_admission = true;
        }
    }

    /// Lets go those whose leader runs no more: another may lead, or they do.
    fn release_orphans(&mut self) {
        for waiting in self.queue.entries_mut() {
            let Some(follow) = waiting.follow else { continue };
            if !self.running.iter().any(|running| running.sequence.id == follow.leader) {
                waiting.follow = None;
                waiting.leaders_seen = None;
                waiting.version = None;
            }
        }
    }

    /// Lets in what fits, best first, until nothing more does.
    pub(super) async fn admit(&mut self, now: Instant) -> Result<(), Gone> {
        while !self.queue.is_empty() {
            self.release_orphans();
            if self.running.len() >= self.around.config.max_running && !self.yield_paused() {
                break;
            }
            self.refresh_matches();
            let config = Arc::clone(&self.around.config);
            let policy = **self.around.policy.load();
            let candidates = self.queue.candidates(config.max_overtake_tokens);
            let order =
                policy::order(policy, &candidates, config.max_overtake_tokens, config.look_ahead);
            if order.is_empty() {
                break;
            }
            let counts = self.memory.counts().await?;
            let capacity = Capacity { free: counts.free, evictable: counts.evictable };
            let mut outcome = Attempt::NoRoom;
            for index in order {
                outcome = self.try_start(index, capacity, now).await?;
                if outcome != Attempt::NoRoom {
                    break;
                }
            }
            if outcome == Attempt::NoRoom && !self.yield_paused() {
                break;
            }
        }
        Ok(())
    }

    fn refresh_matches(&mut self) {
        if !self.around.config.prefix_caching {
            return;
        }
        let reader = &self.reader;
        self.queue.refresh_matches(reader.tree_version(), QUERIES_A_ROUND, |sequence| {
            if sequence.bypasses_match() {
                0
            } else {
                reader.query_match_len(&sequence.namespace, &sequence.tokens)
            }
        });
    }

    /// Tries to let one waiting request run.
    async fn try_start(
        &mut self,
        index: usize,
        capacity: Capacity,
        now: Instant,
    ) -> Result<Attempt, Gone> {
        if self.follow_a_leader(index) {
            return Ok(Attempt::Follows);
        }
        let caching = self.around.config.prefix_caching;
        let block_size = self.around.spec.block_size;
        let promised = self.promised();
        let alone = self.running.is_empty();
        let hint = self.queue.entries()[index].matched;
        if !alone && !budget::fits(capacity, promised, self.demand(index, hint)) {
            return Ok(Attempt::NoRoom);
        }
        // The hint was good enough; from here on what counts is what is locked.
        let waiting = &mut self.queue.entries_mut()[index];
        let mut lease = None;
        let mut capacity = capacity;
        if caching {
            let tokens = std::mem::take(&mut waiting.sequence.tokens);
            let namespace = waiting.sequence.namespace.clone();
            let limit = if waiting.sequence.bypasses_match() { 0 } else { tokens.len() };
            let acquired = self.memory.acquire(&namespace, tokens, limit).await?;
            let waiting = &mut self.queue.entries_mut()[index];
            waiting.sequence.tokens = acquired.tokens;
            waiting.matched = acquired.lease.len();
            capacity.evictable = acquired.evictable;
            lease = Some(acquired.lease);
        }
        let matched = lease.as_ref().map_or(0, |lease| lease.len());
        let demand = self.demand(index, matched);
        if !alone && !budget::fits(capacity, promised, demand) {
            return Ok(Attempt::NoRoom);
        }
        let mut reserved = None;
        if demand.now > 0 {
            reserved = self.memory.reserve(demand.now).await?;
            if reserved.is_none() {
                return Ok(self.short_of_blocks(index, alone));
            }
        }
        debug_assert_eq!(
            matched / block_size + demand.now,
            blocks_for(block_size, self.queue.entries()[index].sequence.tokens.len())
        );
        let waiting = self.queue.remove(index);
        self.start(waiting, Held { lease, reserved, computed: matched, ..Held::default() }, now);
        Ok(Attempt::Started)
    }

    /// Blocks were counted as available and could not be had. While a step is in flight that
    /// is so until it ends; without one it is a bug, and the request is told rather than kept
    /// waiting for ever.
    fn short_of_blocks(&mut self, index: usize, alone: bool) -> Attempt {
        if !alone || self.in_flight.is_some() {
            self.try_admission = true;
            return Attempt::NoRoom;
        }
        let waiting = self.queue.remove(index);
        tracing::error!(sequence = waiting.sequence.id, "no blocks though nothing runs");
        let reason = "no blocks could be had though nothing runs".to_owned();
        let ending = Ending::Failed(CoreError::Interrupted { reason });
        end_early(waiting.sequence, ending, &self.around.gauges);
        Attempt::Ended
    }

    /// Ties a waiting request to a running one that is computing its prefix, if there is one.
    fn follow_a_leader(&mut self, index: usize) -> bool {
        let config = &self.around.config;
        let block_size = self.around.spec.block_size;
        let waiting = &self.queue.entries()[index];
        let seen = waiting.leaders_seen == Some(self.running_version);
        let patient = waiting.overtaken < config.max_overtake_tokens && !waiting.follows_no_more;
        if !config.prefix_caching || seen || !patient || waiting.sequence.bypasses_match() {
            return false;
        }
        let leaders = self.running.iter().map(|r| &r.sequence).filter(|leader| {
            let to_commit = leader.prompt_len / block_size * block_size;
            leader.held.committed() < to_commit
                && leader.end.is_none()
                && leader.namespace == waiting.sequence.namespace
        });
        let leaders = leaders.map(|leader| Leader {
            id: leader.id,
            tokens: &leader.tokens,
            committed: leader.held.committed(),
        });
        let follow =
            sharing::choose(&waiting.sequence.tokens, waiting.matched, block_size, leaders);
        let waiting = &mut self.queue.entries_mut()[index];
        waiting.leaders_seen = Some(self.running_version);
        waiting.follow = follow;
        if follow.is_some() {
            self.around.gauges.follows.add(1);
        }
        follow.is_some()
    }

    /// A waiting request's demand, if `matched` of its tokens are cached.
    fn demand(&self, index: usize, matched: usize) -> budget::Demand {
        let sequence = &self.queue.entries()[index].sequence;
        budget::demand(
            self.around.spec.block_size,
            sequence.tokens.len(),
            matched,
            self.expected_decode(sequence),
            self.around.config.conservative,
        )
    }

    fn expected_decode(&self, sequence: &Sequence) -> usize {
        if self.around.config.conservative {
            sequence.remaining()
        } else {
            self.forecast.remaining(sequence.max_tokens, sequence.generated())
        }
    }

    /// Blocks that running sequences are expected to take beyond those they hold.
    fn promised(&self) -> usize {
        let block_size = self.around.spec.block_size;
        let conservative = self.around.config.conservative;
        let promise = |running: &Running| {
            let sequence = &running.sequence;
            let tokens = sequence.tokens.len() + self.expected_decode(sequence).saturating_sub(1);
            let shared = sequence.held.committed() / block_size;
            let held = sequence.held.table.len() - if conservative { shared } else { 0 };
            blocks_for(block_size, tokens).saturating_sub(held)
        };
        self.running.iter().map(promise).sum()
    }

    /// Moves a request from waiting to running.
    fn start(&mut self, waiting: Waiting, held: Held, now: Instant) {
        let Waiting { mut sequence, arrival, permit, overtaken, .. } = waiting;
        let matched = held.computed;
        let cost = sequence.tokens.len().saturating_sub(matched).max(1);
        self.queue.note_overtaking(arrival, cost);
        sequence.held = held;
        sequence.held.rebuild_table();
        sequence.held.last_step = self.step;
        sequence.times.started.get_or_insert(now);
        if sequence.cached_tokens.is_none() {
            sequence.cached_tokens = Some(matched);
            let gauges = &self.around.gauges;
            gauges.started.add(1);
            gauges.hits.add(usize::from(matched > 0));
            gauges.prompt_tokens.add(sequence.prompt_len);
            gauges.cached_tokens.add(matched);
            sequence.tell(SequenceEvent::Started { cached_tokens: matched });
        }
        self.running.push(Running { sequence, arrival, overtaken });
        self.running_version += 1;
        self.unsettled = true;
        self.try_admission = true;
        // Counted as running before it is no longer counted as waiting: whoever looks sees it.
        self.around.gauges.running.set(self.running.len());
        drop(permit);
    }
}
