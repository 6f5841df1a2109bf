//! From waiting to running: what is tried, what it is charged, whom it follows.

use std::sync::Arc;
use std::time::Instant;

use stolon_kvcache::PrefixLease;

use super::ending::end_early;
use super::room::Round;
use super::{Running, Scheduler};
use crate::budget::Capacity;
use crate::error::EngineError;
use crate::event::Event;
use crate::memory::{ActorStopped, Memory};
use crate::policy;
use crate::queue::Waiting;
use crate::sequence::{Ending, Held, Sequence};
use crate::sharing::{self, Leader};

/// Waiting requests whose match is queried again in one round at most, so that a round's time does
/// not grow with the queue: 32 full hits of 8,192 tokens take 60 us. Looking up eight or all of
/// a thousand waiting ones instead changes no figure of the simulated workloads by more than
/// their noise, since a request's match is looked up anew when its turn has come.
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
    /// Less of it is cached than was thought, and it would push an earlier one past its bound.
    Costlier,
    /// It does not fit now.
    NoRoom,
}

impl<M: Memory> Scheduler<M> {
    /// After a step: lets go those who waited for blocks that are there now, or in vain.
    pub(super) fn update_followers(&mut self) {
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
                Some(_) => waiting.following_disabled = true,
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
    pub(super) async fn admit(&mut self, now: Instant) -> Result<(), ActorStopped> {
        while !self.queue.is_empty() {
            if self.running.is_empty() {
                // What runs alone is to find every other block free or evictable.
                self.queue.drop_match_locks();
            }
            self.release_orphans();
            if self.running.len() >= self.context.config.max_running && !self.yield_paused() {
                break;
            }
            self.refresh_matches();
            let config = Arc::clone(&self.context.config);
            let policy = **self.context.policy.load();
            let candidates =
                self.queue.candidates(self.running.iter().map(|r| r.sequence.prefix_hash));
            let order = policy::order(policy, &candidates, config.look_ahead);
            if order.is_empty() {
                break;
            }
            let slacks: Vec<usize> = policy::slacks(&candidates).collect();
            let round = Round { policy, candidates, slacks };
            let counts = self.memory.counts().await?;
            let mut capacity = Capacity { free: counts.free, evictable: counts.evictable };
            let mut outcome = Attempt::NoRoom;
            for (rank, &index) in order.iter().enumerate() {
                outcome = self.try_start(index, &round, capacity, now).await?;
                if outcome != Attempt::NoRoom {
                    break;
                }
                if rank == 0 && order.len() > 1 {
                    capacity.evictable = self.lock_match(index, capacity.evictable).await?;
                }
            }
            if outcome == Attempt::NoRoom && !self.yield_paused() {
                break;
            }
        }
        Ok(())
    }

    fn refresh_matches(&mut self) {
        if !self.context.config.prefix_caching {
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

    /// Locks what is cached of the request that is next but does not fit, so that those tried
    /// past it do not evict it. Returns the blocks that can be evicted then.
    async fn lock_match(&mut self, index: usize, evictable: usize) -> Result<usize, ActorStopped> {
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
        let acquired = self.memory.acquire(namespace, tokens, waiting.matched).await?;
        self.queue.entries_mut()[index].match_lock = Some(acquired.lease);
        Ok(acquired.evictable)
    }

    /// Tries to let one waiting request run.
    async fn try_start(
        &mut self,
        index: usize,
        round: &Round,
        capacity: Capacity,
        now: Instant,
    ) -> Result<Attempt, ActorStopped> {
        if self.follow_a_leader(index) {
            return Ok(Attempt::Follows);
        }
        let caching = self.context.config.prefix_caching;
        let block_size = self.context.spec.block_size;
        let promised = self.promised_to_followers(index, round);
        let alone = self.running.is_empty();
        let hint = self.queue.entries()[index].matched;
        if !alone && !self.fits(index, capacity, promised, hint) {
            return Ok(Attempt::NoRoom);
        }
        // The hint was good enough; from here on what counts is what is locked.
        let mut lease = None;
        let mut capacity = capacity;
        if caching {
            let sequence = &self.queue.entries()[index].sequence;
            let limit = if sequence.bypasses_match() { 0 } else { sequence.tokens.len() };
            let Sequence { namespace, tokens, .. } = sequence;
            let acquired = self.memory.acquire(namespace, tokens, limit).await?;
            let waiting = &mut self.queue.entries_mut()[index];
            waiting.matched = acquired.lease.len();
            waiting.version = Some(self.reader.tree_version());
            capacity.evictable = acquired.evictable;
            lease = Some(acquired.lease);
        }
        let matched = lease.as_ref().map_or(0, |lease| lease.len());
        if self.queue.entries()[index].cost() > round.slacks[index] {
            return Ok(Attempt::Costlier);
        }
        if !alone && !self.fits(index, capacity, promised, matched) {
            return Ok(Attempt::NoRoom);
        }
        let sequence = &self.queue.entries()[index].sequence;
        let now_needed = self.course(sequence, matched / block_size).now(block_size);
        let mut reserved = None;
        if now_needed > 0 {
            reserved = self.memory.reserve(now_needed).await?;
            if reserved.is_none() {
                return Ok(self.short_of_blocks(index, alone));
            }
        }
        let row = self.find_logits(index, lease.as_ref()).await?;
        let waiting = self.queue.remove(index);
        let held = Held { lease, reserved, computed: matched, ..Held::default() };
        self.start(waiting, held, row, now);
        Ok(Attempt::Started)
    }

    /// The last row of logits of a waiting request of which every whole block is cached, if it
    /// was kept.
    async fn find_logits(
        &mut self,
        index: usize,
        lease: Option<&PrefixLease>,
    ) -> Result<Option<Arc<[f32]>>, ActorStopped> {
        let sequence = &self.queue.entries()[index].sequence;
        let Some((lease, &block)) = lease.and_then(|l| Some((l, l.blocks().last()?))) else {
            return Ok(None);
        };
        let whole = sequence.tokens.len() - lease.len() < self.context.spec.block_size;
        if !whole || self.context.config.logit_cache_bytes == 0 {
            return Ok(None);
        }
        self.memory.find_logits(block, &sequence.namespace, &sequence.tokens).await
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
        let ending = Ending::Failed(EngineError::Interrupted { reason });
        end_early(waiting.sequence, ending, &self.context.gauges);
        Attempt::Ended
    }

    /// Ties a waiting request to a running one that is computing its prefix, if there is one.
    fn follow_a_leader(&mut self, index: usize) -> bool {
        let waiting = &self.queue.entries()[index];
        if waiting.leaders_seen == Some(self.running_version) || !self.may_follow(waiting) {
            return false;
        }
        let block_size = self.context.spec.block_size;
        let leaders = self.running.iter().map(|running| &running.sequence);
        let leaders = leaders.filter_map(|leader| leads(leader, waiting, block_size));
        let follow =
            sharing::choose(&waiting.sequence.tokens, waiting.matched, block_size, leaders);
        let waiting = &mut self.queue.entries_mut()[index];
        waiting.leaders_seen = Some(self.running_version);
        waiting.follow = follow;
        self.context.gauges.follows.add(usize::from(follow.is_some()));
        follow.is_some()
    }

    /// Ties to the sequence that has just begun to run all that wait and will share its prefix.
    fn attach_followers(&mut self) {
        let Some(leader) = self.running.last() else { return };
        let leader = &leader.sequence;
        let block_size = self.context.spec.block_size;
        let mut found = Vec::new();
        for (index, waiting) in self.queue.entries().iter().enumerate() {
            if waiting.follow.is_none() && self.may_follow(waiting) {
                let leaders = leads(leader, waiting, block_size).into_iter();
                let tokens = &waiting.sequence.tokens;
                let follow = sharing::choose(tokens, waiting.matched, block_size, leaders);
                found.extend(follow.map(|follow| (index, follow)));
            }
        }
        self.context.gauges.follows.add(found.len());
        for (index, follow) in found {
            self.queue.entries_mut()[index].follow = Some(follow);
        }
    }

    /// Whether a waiting request may wait for a leader.
    fn may_follow(&self, waiting: &Waiting) -> bool {
        self.context.config.prefix_caching
            && waiting.slack() > 0
            && !waiting.following_disabled
            && !waiting.sequence.bypasses_match()
    }

    /// Moves a request from waiting to running. With its last row of logits at hand its next
    /// token is sampled at once.
    fn start(&mut self, waiting: Waiting, held: Held, row: Option<Arc<[f32]>>, now: Instant) {
        let cost = waiting.cost();
        let Waiting { mut sequence, arrival, permit, overtaken, bound, .. } = waiting;
        let matched = held.computed;
        self.queue.charge_overtaking(arrival, cost);
        self.context.gauges.most_overtaken_tokens.raise(overtaken);
        sequence.held = held;
        sequence.held.rebuild_table();
        sequence.held.last_step = self.step;
        sequence.times.started.get_or_insert(now);
        if sequence.cached_tokens.is_none() {
            sequence.cached_tokens = Some(matched);
            let gauges = &self.context.gauges;
            gauges.requests_started.add(1);
            gauges.requests_hit.add(usize::from(matched > 0));
            gauges.prompt_tokens.add(sequence.prompt_len);
            gauges.cached_tokens.add(matched);
            let prompt_tokens = sequence.prompt_len;
            sequence.send(Event::Started { prompt_tokens, cached_tokens: matched });
        }
        let id = sequence.id;
        let mut end = None;
        if let Some((row, sampler)) = row.zip(sequence.sampler.as_mut()) {
            self.context.gauges.first_tokens_from_cache.add(1);
            match sampler.sample(&mut row.to_vec()) {
                Ok(sampled) => {
                    self.context.gauges.completion_tokens.add(1);
                    end = sequence.push(sampled.token, sampled.logprob, now);
                }
                Err(failure) => {
                    let reason = format!("sampling: {failure}");
                    sequence.end = Some(Ending::Failed(EngineError::Interrupted { reason }));
                }
            }
        }
        self.running.push(Running { sequence, arrival, overtaken, bound });
        self.running_version += 1;
        self.attach_followers();
        self.unsettled = true;
        self.try_admission = true;
        // Counted as running before it is no longer counted as waiting: whoever looks sees it.
        self.context.gauges.running.set(self.running.len());
        drop(permit);
        if let Some(end) = end {
            self.finish(id, end, now);
        }
    }
}

/// A running sequence as a leader of a waiting one: while it has prompt blocks to commit.
fn leads<'a>(leader: &'a Sequence, waiting: &Waiting, block_size: usize) -> Option<Leader<'a>> {
    let to_commit = leader.prompt_len / block_size * block_size;
    let committed = leader.held.committed();
    let may = committed < to_commit
        && leader.end.is_none()
        && leader.namespace == waiting.sequence.namespace;
    may.then_some(Leader {
        id: leader.id,
        tokens: &leader.tokens,
        prompt_len: leader.prompt_len,
        committed,
    })
}
