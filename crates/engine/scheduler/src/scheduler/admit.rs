//! A round of admission: moves waiting requests to the running ones.

use std::sync::Arc;
use std::time::Instant;

use stolon_kvcache::{CheckpointLease, PrefixLease};

use super::Scheduler;
use super::checkpoints::release_answers;
use super::room::Round;
use crate::error::EngineError;
use crate::event::{Event, FinishReason};
use crate::memory::{ActorStopped, BlockCounts, LogitsKey, Memory};
use crate::policy::Candidate;
use crate::queue::Waiting;
use crate::sequence::{Ending, Held, Sequence, unusable_logits};
use crate::states::{CheckpointRule, HeldState, Resume, first_message};
use crate::tenant::SlotShares;

/// The result of trying to admit a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    /// It was admitted and runs now.
    Started,
    /// It stays in the queue as a follower of a running sequence.
    Follows,
    /// It stays in the queue while stored KV is read, because less of it is cached than before.
    Reads,
    /// It does not wait any longer, or has ended with an error.
    Ended,
    /// Fewer of its tokens are cached than its last query found, so that admitting it now would
    /// exceed the bound on overtaking of an earlier request.
    ExceedsSlack,
    /// There are not enough blocks for it now.
    NoRoom,
}

impl<M: Memory> Scheduler<M> {
    /// Admits waiting requests in the order of the policy until no further one fits.
    pub(super) async fn admit(&mut self, now: Instant) -> Result<(), ActorStopped> {
        let config = Arc::clone(&self.context.config);
        self.admission.begin_round();
        while !self.admission.queue().is_empty() {
            self.admission.detach_orphaned_followers(&self.batch);
            let has_slot = self.batch.len() < config.max_running || self.preempt_stalled();
            if self.batch.is_empty() {
                // A request that runs alone must find all other blocks free or evictable, or held
                // by sessions, which release them for it.
                self.admission.drop_match_locks();
            }
            let shares = self.slot_shares();
            let victim = if has_slot { None } else { self.victim(&shares) };
            if !has_slot && victim.is_none() {
                break;
            }
            self.admission.refresh_matches(&self.blocks);
            // Then the blocks that a preempted request has written can be evicted.
            self.checkpoints.publish(&mut self.blocks, &mut self.transfers).await?;
            let candidates = self.admission.candidates(&self.batch, &shares);
            let round = Round::new(**self.context.policy.load(), candidates);
            let mut order: Vec<&Candidate> = round.order(config.look_ahead).collect();
            order.retain(|candidate| victim.is_none_or(|victim| victim.yields_to(candidate)));
            let mut capacity = match order.is_empty() {
                true => break,
                false => self.blocks.memory().counts().await?,
            };
            let (mut outcome, mut cost) = (Attempt::NoRoom, 0);
            for (rank, candidate) in order.iter().enumerate() {
                cost = candidate.cost();
                outcome = self.try_start(candidate, &round, capacity, now).await?;
                if outcome != Attempt::NoRoom {
                    break;
                }
                if rank == 0 && order.len() > 1 {
                    let locked = self.admission.lock_match(candidate.arrival, &mut self.blocks);
                    capacity.evictable = locked.await?.unwrap_or(capacity.evictable);
                }
            }
            match (outcome, victim) {
                (Attempt::Started, Some(victim)) if self.batch.len() > config.max_running => {
                    self.preempt_for(victim, cost);
                }
                (Attempt::NoRoom, _) if release_answers(&mut self.batch) => {}
                (Attempt::NoRoom, None) if self.preempt_stalled() => {}
                (Attempt::NoRoom, _) => break,
                _ => {}
            }
        }
        Ok(())
    }

    /// The share of the running slots of each tenant.
    fn slot_shares(&self) -> SlotShares {
        let running = self.batch.sequences().map(|sequence| sequence.tenant);
        let waiting = self.admission.queue().entries().iter().map(|w| w.sequence.tenant);
        SlotShares::new(self.context.config.max_running, running, waiting)
    }

    /// Tries to admit one waiting request.
    async fn try_start(
        &mut self,
        candidate: &Candidate,
        round: &Round,
        mut capacity: BlockCounts,
        now: Instant,
    ) -> Result<Attempt, ActorStopped> {
        let arrival = candidate.arrival;
        if self.admission.follow_a_leader(arrival, &self.batch) {
            return Ok(Attempt::Follows);
        }
        let promised = self.promised_to_followers(candidate, round);
        let alone = self.batch.is_empty();
        if let Some(refused) = self.refusal(arrival, usize::MAX, capacity, promised) {
            return Ok(refused);
        }
        // The request fits according to the last query, which is only a hint. Lock the actual match
        // and check again.
        let (mut lease, mut checkpoint) = (None, None);
        if self.context.config.prefix_caching {
            let acquired = self.admission.acquire_match(arrival, &mut self.blocks).await?;
            let Some(acquired) = acquired else { return Ok(Attempt::Ended) };
            capacity.evictable = acquired.evictable;
            (lease, checkpoint) = (Some(acquired.lease), acquired.checkpoint);
        }
        if lease.is_some() && self.admission.look_again(arrival, now) {
            return Ok(Attempt::Reads);
        }
        let slack = round.slack(candidate);
        if let Some(refused) = self.refusal(arrival, slack, capacity, promised) {
            return Ok(refused);
        }
        let block_size = self.context.spec.block_size;
        let matched = lease.as_ref().map_or(0, PrefixLease::len);
        let Some(waiting) = self.admission.queue().get(arrival) else { return Ok(Attempt::Ended) };
        let needed = self.demand(&waiting.sequence, matched / block_size).now(block_size);
        let key = self.logits_key(&waiting.sequence, lease.as_ref());
        let (mut reserved, mut logits) = (None, None);
        if needed > 0 || key.is_some() {
            (reserved, logits) = self.blocks.reserve_and_find(needed, key.clone()).await?;
            while alone && reserved.is_none() && self.give_up(arrival, &mut checkpoint) {
                (reserved, logits) = self.blocks.reserve_and_find(needed, key.clone()).await?;
            }
            if reserved.is_none() {
                return Ok(self.reservation_failed(arrival, alone));
            }
        }
        let earlier = round.earlier(candidate);
        let Some(waiting) = self.admission.take(candidate, earlier, slack) else {
            // Its cost has grown, because it has released its checkpoint.
            return Ok(Attempt::ExceedsSlack);
        };
        let mut held = Held::new(lease, reserved, waiting.resume);
        match self.context.checkpoint_rule() {
            Some(rule) => held.state = begin_state(&waiting, matched, checkpoint, rule),
            None => held.continue_turn(&waiting.sequence),
        }
        if let Some((id, reason)) = self.start(waiting, held, logits, now) {
            self.finish(vec![(id, reason)], now).await?;
        }
        Ok(Attempt::Started)
    }

    /// Why a waiting request cannot start now: its cost is above `slack`, or it does not fit into
    /// `capacity` next to the running sequences, with `promised` blocks set aside for followers.
    fn refusal(
        &mut self,
        arrival: u64,
        slack: usize,
        capacity: BlockCounts,
        promised: usize,
    ) -> Option<Attempt> {
        let Some(waiting) = self.admission.queue().get(arrival) else {
            return Some(Attempt::Ended);
        };
        if waiting.cost() > slack {
            return Some(Attempt::ExceedsSlack);
        }
        if !self.batch.is_empty() && !self.fits(waiting, capacity, promised) {
            self.admission.note_short_of_blocks();
            return Some(Attempt::NoRoom);
        }
        None
    }

    /// The place of the cached logits of the last position of a waiting request whose full blocks
    /// are all cached. None for an embedding, which needs none, and for a request with a logits
    /// processor that is not ready, which must not run on the scheduler's task.
    fn logits_key(&self, sequence: &Sequence, lease: Option<&PrefixLease>) -> Option<LogitsKey> {
        let lease = lease?;
        let &block = lease.blocks().last()?;
        let all_cached = sequence.tokens.len() - lease.len() < self.context.spec.block_size;
        let is_ready = sequence.sampler.as_ref().is_none_or(|sampler| sampler.is_ready());
        // The cached logits are those of the vocabulary only.
        let options = &sequence.options;
        let needs_more = options.pooling.is_some() || options.regions || sequence.is_background;
        if needs_more || !all_cached || !is_ready || self.context.config.logit_cache_bytes == 0 {
            return None;
        }
        let (namespace, tokens) = (sequence.namespace, Arc::clone(&sequence.tokens));
        Some(LogitsKey { block, namespace, tokens })
    }

    /// Releases something that holds blocks while nothing runs, so that a waiting request can start:
    /// the blocks of sessions first, and its own `checkpoint` last, so that it computes the positions
    /// that the checkpoint covers. Returns false if nothing more can be released.
    fn give_up(&mut self, arrival: u64, checkpoint: &mut Option<CheckpointLease>) -> bool {
        if self.is_background(arrival) {
            return false;
        }
        if self.context.sessions.release_oldest() {
            return true;
        }
        self.admission.release_checkpoint(arrival);
        checkpoint.take().is_some()
    }

    /// Blocks that were counted as available could not be reserved. During a step this is normal,
    /// because evicted blocks become free only when the step ends, and so it is while a save holds
    /// blocks. Otherwise it is a bug, and the request ends with an error instead of waiting
    /// indefinitely.
    fn reservation_failed(&mut self, arrival: u64, alone: bool) -> Attempt {
        if !alone || self.has_step() || self.transfers.has_saves() || self.is_background(arrival) {
            self.admission.retry();
            return Attempt::NoRoom;
        }
        if let Some(waiting) = self.admission.remove(arrival) {
            tracing::error!(sequence = waiting.sequence.id, "no blocks although no request runs");
            let reason = "no blocks could be reserved although no request runs".to_owned();
            self.end_early(waiting.sequence, Ending::Failed(EngineError::Audit(reason)));
        }
        Attempt::Ended
    }

    /// Whether a waiting request is a prompt that is computed in the background.
    fn is_background(&self, arrival: u64) -> bool {
        self.admission.queue().get(arrival).is_some_and(|waiting| waiting.sequence.is_background)
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
        let Waiting { mut sequence, place, permit, .. } = waiting;
        let gauges = &self.context.gauges;
        let found = held.computed + sequence.stored_after(held.committed(), held.computed);
        if let Some(share) = &mut sequence.share {
            share.run();
        }
        gauges.most_overtaken_tokens.raise(place.overtaken);
        sequence.record.run();
        sequence.held = held;
        sequence.held.rebuild_table();
        sequence.times.started.get_or_insert(now);
        if sequence.cached_tokens.is_none() {
            sequence.cached_tokens = Some(found);
            if !sequence.is_background {
                let again = sequence.held.committed().min(sequence.prompt_len);
                gauges.requests_started.add(1);
                gauges.requests_hit.add(usize::from(found > 0));
                gauges.prompt_tokens.add(sequence.prompt_len);
                gauges.cached_tokens.add(found);
                gauges.recomputed_tokens.add(again.saturating_sub(found));
            }
            let prompt_tokens = sequence.prompt_len;
            sequence.send(Event::Started { prompt_tokens, cached_tokens: found });
        }
        let id = sequence.id;
        let mut end = None;
        if let Some((logits, sampler)) = logits.zip(sequence.sampler.as_mut()) {
            gauges.first_tokens_from_cache.add(1);
            match sampler.sample(&mut logits.to_vec()) {
                Ok(sampled) => {
                    end = sequence.push(sampled.token, sampled.logprob, now);
                }
                Err(failure) => {
                    sequence.end = Some(Ending::Failed(unusable_logits(&failure)));
                }
            }
        }
        self.batch.start(sequence, place);
        self.admission.attach_followers(&self.batch);
        self.admission.retry();
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
