//! Admission: moves waiting requests to the running ones, and lets them follow leaders.

use std::sync::Arc;
use std::time::Instant;

use stolon_kvcache::{CheckpointLease, PrefixLease, PrefixMatch};

use super::room::Round;
use super::step::unusable_logits;
use super::{Running, Scheduler};
use crate::error::EngineError;
use crate::event::{Event, FinishReason};
use crate::memory::{ActorStopped, BlockCounts, LogitsKey, Memory};
use crate::policy;
use crate::queue::Waiting;
use crate::sequence::{Ending, Held, Sequence};
use crate::sharing::{self, Follow, Leader};
use crate::states::{CheckpointRule, HeldState, Resume, first_message};

/// Maximum number of waiting requests whose match is queried in one round, so that the time of a
/// round does not grow with the queue: 32 full hits of 8,192 tokens take 60 us. With 8, or with all
/// of a thousand waiting requests instead, no figure of the simulated workloads changes by more
/// than its noise, because a request's match is looked up again when it is tried.
const QUERIES_PER_ROUND: usize = 32;

/// The result of trying to admit a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    /// It was admitted and runs now.
    Started,
    /// It stays in the queue as a follower of a running sequence.
    Follows,
    /// It stays in the queue while stored KV is read, because less of it is cached than before.
    Reads,
    /// It ended with an error.
    Ended,
    /// Fewer of its tokens are cached than its last query found, so that admitting it now would
    /// exceed the bound on overtaking of an earlier request.
    ExceedsSlack,
    /// There are not enough blocks for it now.
    NoRoom,
}

impl<M: Memory> Scheduler<M> {
    /// After a step: ends the waiting of followers whose blocks are committed now, or whose leader
    /// has ended or made no progress.
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
                    waiting.lookup.note(follow.shared);
                }
                Some(_) => waiting.following_disabled = true,
                // The leader has ended. Another sequence may lead, or this one computes the prefix.
                None => waiting.leaders_seen = None,
            }
            waiting.follow = None;
            waiting.version = None;
            self.try_admission = true;
        }
    }

    /// Ends the waiting of followers whose leader no longer runs, so that they look for another
    /// leader or become leaders.
    fn detach_orphaned_followers(&mut self) {
        for waiting in self.queue.entries_mut() {
            let Some(follow) = waiting.follow else { continue };
            if !self.running.iter().any(|running| running.sequence.id == follow.leader) {
                waiting.follow = None;
                waiting.leaders_seen = None;
                waiting.version = None;
            }
        }
    }

    /// Admits waiting requests in the order of the policy until no further one fits.
    pub(super) async fn admit(&mut self, now: Instant) -> Result<(), ActorStopped> {
        self.short_of_blocks = false;
        while !self.queue.is_empty() {
            self.detach_orphaned_followers();
            let is_full = self.running.len() >= self.context.config.max_running;
            let has_slot = !is_full || self.preempt_stalled();
            if self.running.is_empty() {
                // A request that runs alone must find all other blocks free or evictable, or held
                // by sessions, which release them for it.
                self.queue.drop_match_locks();
            }
            let shares = self.slot_shares();
            let victim = match has_slot {
                true => None,
                false => self.share_victim(&shares).or_else(|| self.priority_victim()),
            };
            if !has_slot && victim.is_none() {
                break;
            }
            self.refresh_matches();
            let config = Arc::clone(&self.context.config);
            // Then the blocks that a preempted request has written can be evicted.
            self.publish_checkpoints().await?;
            let policy = **self.context.policy.load();
            let running = self.running.iter().map(|running| &running.sequence);
            let candidates = self.queue.candidates(running, &shares);
            let mut order = policy::order(policy, &candidates, config.look_ahead);
            order.retain(|&index| {
                let waiting = &self.queue.entries()[index];
                victim.is_none_or(|victim| victim.yields_to(waiting, &candidates[index]))
            });
            if order.is_empty() {
                break;
            }
            let slacks: Vec<usize> = policy::slacks(&candidates).collect();
            let round = Round { policy, candidates, slacks };
            let mut capacity = self.memory.counts().await?;
            let (mut outcome, mut cost) = (Attempt::NoRoom, 0);
            for (rank, &index) in order.iter().enumerate() {
                cost = round.candidates[index].cost();
                outcome = self.try_start(index, &round, capacity, now).await?;
                if outcome != Attempt::NoRoom {
                    break;
                }
                if rank == 0 && order.len() > 1 {
                    capacity.evictable = self.lock_match(index, capacity.evictable).await?;
                }
            }
            match (outcome, victim) {
                (Attempt::Started, Some(victim)) if self.running.len() > config.max_running => {
                    self.preempt_for(victim, cost);
                }
                (Attempt::NoRoom, _) if self.release_answers() => {}
                (Attempt::NoRoom, None) if self.preempt_stalled() => {}
                (Attempt::NoRoom, _) => break,
                _ => {}
            }
        }
        Ok(())
    }

    fn refresh_matches(&mut self) {
        if !self.context.config.prefix_caching {
            return;
        }
        let reader = &self.reader;
        self.queue.refresh_matches(reader.tree_version(), QUERIES_PER_ROUND, |sequence| {
            if sequence.bypasses_match() {
                PrefixMatch::default()
            } else {
                reader.query_resume(&sequence.namespace, &sequence.tokens)
            }
        });
    }

    /// Tries to admit one waiting request.
    async fn try_start(
        &mut self,
        index: usize,
        round: &Round,
        capacity: BlockCounts,
        now: Instant,
    ) -> Result<Attempt, ActorStopped> {
        if self.follow_a_leader(index) {
            return Ok(Attempt::Follows);
        }
        let block_size = self.context.spec.block_size;
        let promised = self.promised_to_followers(index, round);
        let alone = self.running.is_empty();
        if !alone && !self.fits(index, capacity, promised) {
            self.short_of_blocks = true;
            return Ok(Attempt::NoRoom);
        }
        // The request fits according to the last query, which is only a hint. Lock the actual match
        // and check again.
        let (mut lease, mut checkpoint) = (None, None);
        let mut capacity = capacity;
        if self.context.config.prefix_caching {
            let acquired = self.acquire_match(index).await?;
            capacity.evictable = acquired.evictable;
            (lease, checkpoint) = (Some(acquired.lease), acquired.checkpoint);
        }
        let matched = lease.as_ref().map_or(0, |lease| lease.len());
        if lease.is_some() && self.look_again(index, now) {
            return Ok(Attempt::Reads);
        }
        if self.queue.entries()[index].cost() > round.slacks[index] {
            return Ok(Attempt::ExceedsSlack);
        }
        if !alone && !self.fits(index, capacity, promised) {
            self.short_of_blocks = true;
            return Ok(Attempt::NoRoom);
        }
        let sequence = &self.queue.entries()[index].sequence;
        let needed = self.demand(sequence, matched / block_size).now(block_size);
        let key = self.logits_key(index, lease.as_ref());
        let (mut reserved, mut logits) = (None, None);
        if needed > 0 || key.is_some() {
            (reserved, logits) = self.reserve_and_find(needed, key.clone()).await?;
            while alone && reserved.is_none() && self.give_up(index, &mut checkpoint) {
                (reserved, logits) = self.reserve_and_find(needed, key.clone()).await?;
            }
            if reserved.is_none() {
                return Ok(self.reservation_failed(index, alone));
            }
        }
        if self.queue.entries()[index].cost() > round.slacks[index] {
            // Its cost has grown, because it has released its checkpoint.
            return Ok(Attempt::ExceedsSlack);
        }
        let waiting = self.queue.remove(index);
        self.queue.charge_overtaking(&round.candidates[..=index], waiting.cost());
        let computed = waiting.resume;
        let mut held = Held::new(lease, reserved, computed);
        match self.context.checkpoint_rule() {
            Some(rule) => held.state = begin_state(&waiting, matched, checkpoint, rule),
            None => held.continue_turn(&waiting.sequence),
        }
        if let Some(finished) = self.start(waiting, held, logits, now) {
            self.publish_ending(std::slice::from_ref(&finished)).await?;
            self.finish(finished.0, finished.1, now);
        }
        Ok(Attempt::Started)
    }

    /// The place of the cached logits of the last position of a waiting request whose full blocks
    /// are all cached. None for an embedding, which needs none, and for a request with a logits
    /// processor that is not ready, which must not run on the scheduler's task.
    fn logits_key(&self, index: usize, lease: Option<&PrefixLease>) -> Option<LogitsKey> {
        let sequence = &self.queue.entries()[index].sequence;
        let lease = lease?;
        let &block = lease.blocks().last()?;
        let all_cached = sequence.tokens.len() - lease.len() < self.context.spec.block_size;
        let is_ready = sequence.sampler.as_ref().is_none_or(|sampler| sampler.is_ready());
        // The cached logits are those of the vocabulary only.
        let needs_more = sequence.options.pooling.is_some() || sequence.options.regions;
        if needs_more || !all_cached || !is_ready || self.context.config.logit_cache_bytes == 0 {
            return None;
        }
        let (namespace, tokens) = (sequence.namespace, Arc::clone(&sequence.tokens));
        Some(LogitsKey { block, namespace, tokens })
    }

    /// Releases something that holds blocks while nothing runs, so that the request at `index` can
    /// start: the blocks of sessions first, and its own `checkpoint` last, so that it computes the
    /// positions that the checkpoint covers. Returns false if nothing more can be released.
    fn give_up(&mut self, index: usize, checkpoint: &mut Option<CheckpointLease>) -> bool {
        if self.context.sessions.release_oldest() {
            return true;
        }
        self.queue.entries_mut()[index].resume = 0;
        checkpoint.take().is_some()
    }

    /// Blocks that were counted as available could not be reserved. During a step this is normal,
    /// because evicted blocks become free only when the step ends, and so it is while a save holds
    /// blocks. Otherwise it is a bug, and the request ends with an error instead of waiting
    /// indefinitely.
    fn reservation_failed(&mut self, index: usize, alone: bool) -> Attempt {
        if !alone || self.in_flight.is_some() || !self.saves.is_empty() {
            self.try_admission = true;
            return Attempt::NoRoom;
        }
        let waiting = self.queue.remove(index);
        tracing::error!(sequence = waiting.sequence.id, "no blocks although no request runs");
        let reason = "no blocks could be reserved although no request runs".to_owned();
        let ending = Ending::Failed(EngineError::Audit(reason));
        self.end_early(waiting.sequence, ending);
        Attempt::Ended
    }

    /// Makes a waiting request follow a running one that is computing its prefix, if there is one.
    fn follow_a_leader(&mut self, index: usize) -> bool {
        let waiting = &self.queue.entries()[index];
        if waiting.leaders_seen == Some(self.running_version) || !self.may_follow(waiting) {
            return false;
        }
        let leaders = self.running.iter().map(|running| &running.sequence);
        let follow = self.choose_leader(waiting, leaders);
        let waiting = &mut self.queue.entries_mut()[index];
        waiting.leaders_seen = Some(self.running_version);
        waiting.follow = follow;
        self.context.gauges.follows.add(usize::from(follow.is_some()));
        follow.is_some()
    }

    /// Makes all waiting requests that share the prefix of the newest running sequence follow it.
    fn attach_followers(&mut self) {
        let Some(leader) = self.running.last() else { return };
        let leader = &leader.sequence;
        let mut found = Vec::new();
        for (index, waiting) in self.queue.entries().iter().enumerate() {
            if waiting.follow.is_none() && self.may_follow(waiting) {
                let follow = self.choose_leader(waiting, std::iter::once(leader));
                found.extend(follow.map(|follow| (index, follow)));
            }
        }
        self.context.gauges.follows.add(found.len());
        for (index, follow) in found {
            self.queue.entries_mut()[index].follow = Some(follow);
        }
    }

    /// Chooses the leader for a waiting request. With recurrent states, a follower resumes from a
    /// checkpoint before its last position, which the leader can take only where it has not been
    /// yet.
    fn choose_leader<'a>(
        &self,
        waiting: &Waiting,
        leaders: impl Iterator<Item = &'a Sequence>,
    ) -> Option<Follow> {
        let block_size = self.context.spec.block_size;
        let rule = self.context.checkpoint_rule();
        let tokens = &waiting.sequence.tokens[..];
        let tokens = &tokens[..tokens.len() - usize::from(rule.is_some())];
        let leaders = leaders.filter_map(|leader| {
            let (done, end) = match rule {
                Some(rule) => (leader.passed(), rule.end_of_prompt(leader.prompt_len)),
                None => (leader.held.committed(), leader.prompt_len / block_size * block_size),
            };
            let can_lead = done < end
                && leader.writes_cache()
                && leader.end.is_none()
                && leader.namespace == waiting.sequence.namespace;
            let Sequence { id, prompt_len, .. } = *leader;
            can_lead.then_some(Leader { id, tokens: &leader.tokens, prompt_len, committed: done })
        });
        sharing::choose(tokens, waiting.resume, block_size, leaders)
    }

    /// Whether a waiting request may wait for a leader.
    fn may_follow(&self, waiting: &Waiting) -> bool {
        self.context.config.prefix_caching
            && waiting.slack() > 0
            && !waiting.following_disabled
            && !waiting.sequence.bypasses_match()
    }

    /// Moves a request from waiting to running. If the logits of its last position are cached, its
    /// next token is sampled at once. If it is complete then, returns its id and the reason.
    fn start(
        &mut self,
        waiting: Waiting,
        held: Held,
        logits: Option<Arc<[f32]>>,
        now: Instant,
    ) -> Option<(u64, FinishReason)> {
        let Waiting { mut sequence, arrival, permit, overtaken, bound, .. } = waiting;
        let found = held.computed + sequence.stored_after(held.committed(), held.computed);
        if let Some(share) = &mut sequence.share {
            share.run();
        }
        self.context.gauges.most_overtaken_tokens.raise(overtaken);
        sequence.record.run();
        sequence.held = held;
        sequence.held.rebuild_table();
        sequence.held.last_step = self.step;
        sequence.times.started.get_or_insert(now);
        if sequence.cached_tokens.is_none() {
            sequence.cached_tokens = Some(found);
            let gauges = &self.context.gauges;
            gauges.requests_started.add(1);
            gauges.requests_hit.add(usize::from(found > 0));
            gauges.prompt_tokens.add(sequence.prompt_len);
            gauges.cached_tokens.add(found);
            let again = sequence.held.committed().min(sequence.prompt_len).saturating_sub(found);
            gauges.recomputed_tokens.add(again);
            let prompt_tokens = sequence.prompt_len;
            sequence.send(Event::Started { prompt_tokens, cached_tokens: found });
        }
        let id = sequence.id;
        let mut end = None;
        if let Some((logits, sampler)) = logits.zip(sequence.sampler.as_mut()) {
            self.context.gauges.first_tokens_from_cache.add(1);
            match sampler.sample(&mut logits.to_vec()) {
                Ok(sampled) => {
                    end = sequence.push(sampled.token, sampled.logprob, now);
                }
                Err(failure) => {
                    sequence.end = Some(Ending::Failed(unusable_logits(&failure)));
                }
            }
        }
        self.running.push(Running { sequence, arrival, overtaken, bound, stalled: false });
        self.running_version += 1;
        self.attach_followers();
        self.unsettled = true;
        self.try_admission = true;
        drop(permit);
        end.map(|end| (id, end))
    }
}

/// The recurrent state that a request holds when it starts, with `matched` positions cached.
fn begin_state(
    waiting: &Waiting,
    matched: usize,
    checkpoint: Option<CheckpointLease>,
    rule: CheckpointRule,
) -> HeldState {
    let sequence = &waiting.sequence;
    HeldState {
        resume: checkpoint.map(Resume::Cached),
        first_message: first_message(&sequence.tokens[..sequence.prompt_len], &sequence.eos_ids),
        parted: if matched > waiting.resume + rule.distance { matched } else { 0 },
        ..HeldState::default()
    }
}
