//! In-flight prefill sharing (`sharing.rs`): which waiting requests follow a running sequence that
//! is computing their prefix, and until when.

use super::Admission;
use crate::queue::Waiting;
use crate::scheduler::batch::Batch;
use crate::sequence::Sequence;
use crate::sharing::{self, Follow, Leader};

impl Admission {
    /// After a step: ends the waiting of followers whose blocks are committed now, or whose leader
    /// has ended or made no progress.
    pub(in crate::scheduler) fn update_followers(&mut self, batch: &Batch) {
        for waiting in self.queue.entries_mut() {
            let Some(follow) = &mut waiting.follow else { continue };
            let leader = batch.get(follow.leader).filter(|leader| leader.end.is_none());
            let progress = leader.map(|leader| (leader.held.computed, leader.held.committed()));
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
            self.retry = true;
        }
    }

    /// Ends the waiting of followers whose leader no longer runs, so that they look for another
    /// leader or become leaders.
    pub(in crate::scheduler) fn detach_orphaned_followers(&mut self, batch: &Batch) {
        for waiting in self.queue.entries_mut() {
            if waiting.follow.is_some_and(|follow| batch.get(follow.leader).is_none()) {
                waiting.follow = None;
                waiting.leaders_seen = None;
                waiting.version = None;
            }
        }
    }

    /// Makes a waiting request follow a running one that is computing its prefix, if there is one.
    pub(in crate::scheduler) fn follow_a_leader(&mut self, arrival: u64, batch: &Batch) -> bool {
        let Some(waiting) = self.queue.get(arrival) else { return false };
        if waiting.leaders_seen == Some(batch.version()) || !self.may_follow(waiting) {
            return false;
        }
        let follow = self.choose_leader(waiting, batch.sequences());
        let Some(waiting) = self.queue.get_mut(arrival) else { return false };
        waiting.leaders_seen = Some(batch.version());
        waiting.follow = follow;
        self.context.gauges.follows.add(usize::from(follow.is_some()));
        follow.is_some()
    }

    /// Makes all waiting requests that share the prefix of the newest running sequence follow it.
    pub(in crate::scheduler) fn attach_followers(&mut self, batch: &Batch) {
        let Some(leader) = batch.sequences().next_back() else { return };
        let mut found = Vec::new();
        for waiting in self.queue.entries() {
            if waiting.follow.is_none() && self.may_follow(waiting) {
                let follow = self.choose_leader(waiting, std::iter::once(leader));
                found.extend(follow.map(|follow| (waiting.place.arrival, follow)));
            }
        }
        self.context.gauges.follows.add(found.len());
        for (arrival, follow) in found {
            if let Some(waiting) = self.queue.get_mut(arrival) {
                waiting.follow = Some(follow);
            }
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
            && waiting.place.slack() > 0
            && !waiting.following_disabled
            && !waiting.sequence.bypasses_match()
    }
}
