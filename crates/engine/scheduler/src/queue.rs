//! The admission queue: waiting requests in order of arrival, with the data that is kept about
//! each.

use std::collections::HashMap;
use std::time::Instant;

use stolon_kvcache::PrefixMatch;

use crate::lookup::StoredLookup;
use crate::memory::Acquired;
use crate::permits::QueuePermit;
use crate::policy::{Candidate, Place};
use crate::quota::QuotaId;
use crate::sequence::Sequence;
use crate::sharing::Follow;
use crate::tenant::SlotShares;

/// Number of tokens whose load costs as much as computing one. Copying KV from memory takes less
/// than a hundredth of the time of computing it, for every model that was measured.
const LOADS_PER_COMPUTED: usize = 64;

/// A waiting request.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) sequence: Sequence,
    pub(crate) place: Place,
    /// Its queue permit. A preempted request has none, because it returned it when it first ran.
    pub(crate) permit: Option<QueuePermit>,
    /// Number of its tokens that were cached at `version` of the tree.
    pub(crate) matched: usize,
    /// Number of the `matched` tokens that do not have to be computed: all, unless the model has a
    /// recurrent state.
    pub(crate) resume: usize,
    /// The tree's version at the last query; `None` if `matched` must be queried.
    pub(crate) version: Option<u64>,
    /// Locks its match while the scheduler looks further down the queue, so that the match is not
    /// evicted.
    pub(crate) match_lock: Option<Acquired>,
    /// The leader whose blocks it waits for.
    pub(crate) follow: Option<Follow>,
    /// The version of the set of running sequences that was last searched for a leader.
    pub(crate) leaders_seen: Option<u64>,
    /// It waited for a leader that made no progress, and will compute its whole prompt itself.
    pub(crate) following_disabled: bool,
    /// The look-ups of stored KV of its prompt.
    pub(crate) lookup: StoredLookup,
}

impl Waiting {
    pub(crate) fn new(sequence: Sequence, place: Place, permit: Option<QueuePermit>) -> Waiting {
        let lookup = StoredLookup::new(sequence.found.max(sequence.stored_end()));
        Waiting {
            sequence,
            place,
            permit,
            matched: 0,
            resume: 0,
            version: None,
            match_lock: None,
            follow: None,
            leaders_seen: None,
            following_disabled: false,
            lookup,
        }
    }

    /// The cached part of its prompt, according to the last query.
    pub(crate) fn found_match(&self) -> PrefixMatch {
        PrefixMatch { cached: self.matched, resume: self.resume }
    }

    /// Sets the cached part of its prompt at this version of the tree.
    pub(crate) fn set_match(&mut self, found: PrefixMatch, version: u64) {
        (self.matched, self.resume) = (found.cached, found.resume);
        self.version = Some(version);
        self.lookup.note(self.covered());
    }

    /// Number of its leading tokens that do not have to be computed, because they are cached or can
    /// be loaded.
    pub(crate) fn covered(&self) -> usize {
        self.resume + self.stored()
    }

    /// Number of tokens to compute before the next one can be sampled, at least 1, plus the cost of
    /// encoding its images, according to the last query.
    pub(crate) fn cost(&self) -> usize {
        self.work().saturating_sub(self.found()).max(1)
    }

    /// Number of its tokens, plus the cost of encoding its images unless all of these are cached.
    fn work(&self) -> usize {
        let images = &self.sequence.images;
        let encoding = if images.ends_within(self.covered()) { 0 } else { self.sequence.encoding };
        self.sequence.tokens.len() + encoding
    }

    /// Number of its tokens that do not have to be computed, because they are cached or can be
    /// loaded. A load is not free, so it counts as a part of the tokens that it saves.
    fn found(&self) -> usize {
        let stored = self.stored();
        self.resume + stored - stored.div_ceil(LOADS_PER_COMPUTED)
    }

    /// Number of positions after those from which it resumes that stored KV saves.
    fn stored(&self) -> usize {
        self.sequence.stored_after(self.matched, self.resume)
    }

    /// When it times out.
    fn deadline(&self) -> Option<Instant> {
        let times = &self.sequence.times;
        // A preempted request has left the queue from its caller's point of view, so its queue
        // timeout no longer applies.
        let queue = if times.started.is_none() { times.queue_deadline } else { None };
        [queue, times.deadline].into_iter().flatten().min()
    }

    /// When it times out or does not wait for stored KV any longer, whichever is first.
    fn next_deadline(&self) -> Option<Instant> {
        [self.deadline(), self.lookup.deadline()].into_iter().flatten().min()
    }
}

/// The waiting requests. [`Place::arrival`] identifies each of them.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    /// In order of arrival.
    entries: Vec<Waiting>,
    next_arrival: u64,
    /// The first request, or the next later one, whose match the next round of queries looks up.
    next_query: u64,
}

impl Queue {
    /// Adds a new request at the end, with a bound on overtaking as [`Place::new`] says.
    pub(crate) fn push(
        &mut self,
        sequence: Sequence,
        permit: Option<QueuePermit>,
        max_overtake: usize,
    ) {
        let ahead = permit.as_ref().map_or(0, QueuePermit::ahead);
        let place = Place::new(self.next_arrival, ahead, max_overtake);
        self.next_arrival += 1;
        self.entries.push(Waiting::new(sequence, place, permit));
    }

    /// Inserts a preempted request at its place in the order of arrival.
    pub(crate) fn reinsert(&mut self, sequence: Sequence, place: Place) {
        let index = self.first_from(place.arrival);
        self.entries.insert(index, Waiting::new(sequence, place, None));
    }

    /// Index of the first request that has arrived as this one or later.
    fn first_from(&self, arrival: u64) -> usize {
        self.entries.partition_point(|waiting| waiting.place.arrival < arrival)
    }

    fn index(&self, arrival: u64) -> Option<usize> {
        self.entries.binary_search_by_key(&arrival, |waiting| waiting.place.arrival).ok()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn entries(&self) -> &[Waiting] {
        &self.entries
    }

    pub(crate) fn entries_mut(&mut self) -> &mut [Waiting] {
        &mut self.entries
    }

    pub(crate) fn get(&self, arrival: u64) -> Option<&Waiting> {
        self.index(arrival).map(|index| &self.entries[index])
    }

    pub(crate) fn get_mut(&mut self, arrival: u64) -> Option<&mut Waiting> {
        self.index(arrival).map(|index| &mut self.entries[index])
    }

    pub(crate) fn remove(&mut self, arrival: u64) -> Option<Waiting> {
        self.index(arrival).map(|index| self.entries.remove(index))
    }

    /// The request whose sequence has this id.
    pub(crate) fn of_id(&mut self, id: u64) -> Option<&mut Waiting> {
        self.entries.iter_mut().find(|waiting| waiting.sequence.id == id)
    }

    /// Removes requests that have timed out or were canceled.
    pub(crate) fn take_overdue(&mut self, now: Instant) -> Vec<Waiting> {
        let mut overdue = Vec::new();
        let mut index = 0;
        while index < self.entries.len() {
            let waiting = &self.entries[index];
            let late = waiting.deadline().is_some_and(|deadline| deadline <= now);
            if late || waiting.sequence.end.is_some() {
                overdue.push(self.entries.remove(index));
            } else {
                index += 1;
            }
        }
        overdue
    }

    /// The time of the next timeout.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.entries.iter().filter_map(Waiting::next_deadline).min()
    }

    /// Charges the cost of a request that is admitted to the earlier ones, `earlier`, whose bounds
    /// on overtaking count for it.
    pub(crate) fn charge_overtaking(
        &mut self,
        earlier: &[Candidate],
        admitted: &Candidate,
        cost: usize,
    ) {
        for candidate in earlier.iter().filter(|candidate| candidate.binds(admitted)) {
            let Some(Waiting { place, .. }) = self.get_mut(candidate.arrival) else { continue };
            place.overtake(cost);
            debug_assert!(place.overtaken <= place.bound, "the bound on overtaking");
        }
    }

    /// Drops every match lock. Returns whether there was one.
    pub(crate) fn drop_match_locks(&mut self) -> bool {
        let mut dropped = false;
        for waiting in &mut self.entries {
            dropped |= waiting.match_lock.take().is_some();
        }
        dropped
    }

    /// What the policy needs to know about each waiting request. `running` yields the running
    /// sequences.
    pub(crate) fn candidates<'a>(
        &'a self,
        running: impl Iterator<Item = &'a Sequence> + Clone,
        shares: &SlotShares,
    ) -> Vec<Candidate> {
        let mut counts_by_prefix: HashMap<u64, usize> = HashMap::new();
        let waiting = self.entries.iter().map(|waiting| &waiting.sequence);
        for sequence in running.clone().chain(waiting) {
            *counts_by_prefix.entry(sequence.prefix_hash).or_default() += 1;
        }
        let mut tokens_by_quota: HashMap<QuotaId, usize> = HashMap::new();
        for share in running.filter_map(|sequence| sequence.share.as_ref()) {
            let sum = tokens_by_quota.entry(share.id()).or_default();
            *sum = sum.saturating_add(share.tokens());
        }
        let candidate = |waiting: &Waiting| {
            let follows = waiting.follow.is_some() && waiting.place.slack() > 0;
            let reads = waiting.lookup.deadline().is_some();
            let stalled = waiting.sequence.is_stalled();
            let held = waiting.sequence.share.as_ref().is_some_and(|share| {
                !share.fits(tokens_by_quota.get(&share.id()).copied().unwrap_or(0))
            });
            Candidate {
                arrival: waiting.place.arrival,
                class: waiting.sequence.options.priority,
                tenant: waiting.sequence.tenant,
                has_share: shares.is_reached(waiting.sequence.tenant),
                tokens: waiting.work(),
                matched: waiting.found(),
                prefix_sharers: counts_by_prefix[&waiting.sequence.prefix_hash],
                slack: waiting.place.slack(),
                bound: waiting.place.bound,
                quota: waiting.sequence.quota_id(),
                held,
                ready: !stalled && !follows && !held && !reads,
                stalled,
            }
        };
        self.entries.iter().map(candidate).collect()
    }

    /// Queries the match of up to `limit` requests that were last queried at another version of the
    /// tree. Each call continues where the previous one stopped.
    pub(crate) fn refresh_matches(
        &mut self,
        version: u64,
        limit: usize,
        mut query: impl FnMut(&Sequence) -> PrefixMatch,
    ) {
        let mut left = limit;
        let first = self.first_from(self.next_query);
        let (before, from) = self.entries.split_at_mut(first);
        for waiting in from.iter_mut().chain(before) {
            if waiting.version == Some(version) {
                continue;
            }
            if left == 0 {
                self.next_query = waiting.place.arrival;
                return;
            }
            left -= 1;
            waiting.set_match(query(&waiting.sequence), version);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use bytes::Bytes;
    use stolon_kvcache::Namespace;

    use super::*;
    use crate::event_channel::event_channel;
    use crate::memory::acquire;
    use crate::permits::QueueLimits;
    use crate::request::SequenceRequest;
    use crate::request_counts::RequestRecord;
    use crate::sequence::Terms;
    use crate::transfer::StoredKv;

    pub(crate) fn sequence(id: u64) -> Sequence {
        let request = SequenceRequest::new(vec![id as u32; 8], 1);
        let terms = Terms { max_tokens: 1, block_size: 4, ..Terms::default() };
        let record = RequestRecord::new(&Arc::default(), tracing::Span::none()).expect("open");
        Sequence::new(id, request, terms, record, event_channel(8).0, Instant::now())
    }

    fn queue(count: u64) -> Queue {
        let limits = Arc::new(QueueLimits::new(count as usize, usize::MAX, 1));
        let mut queue = Queue::default();
        for id in 0..count {
            let sequence = sequence(id);
            queue.push(sequence, limits.acquire(None, 8, 0).ok(), 100);
        }
        queue
    }

    /// Goal: the match of each request is queried once per version of the tree, with a limited
    /// number of queries per round, and no request is left out.
    #[test]
    fn matches_are_queried_once_per_version() {
        let mut queue = queue(5);
        let mut round = |version, expected: &[u64]| {
            let mut queried = Vec::new();
            queue.refresh_matches(version, 2, |sequence| {
                queried.push(sequence.id);
                PrefixMatch::default()
            });
            assert_eq!(queried, expected, "version {version}");
        };
        for expected in [&[0, 1][..], &[2, 3], &[4], &[], &[]] {
            round(1, expected);
        }
        // No request is left out even if the version changes in each round.
        for (version, expected) in [(2, [4, 0]), (3, [1, 2]), (4, [3, 4]), (5, [0, 1])] {
            round(version, &expected);
        }
        let versions: Vec<_> = queue.entries().iter().map(|waiting| waiting.version).collect();
        assert_eq!(versions, [5, 5, 3, 4, 4].map(Some));
    }

    /// Goal: the bound on overtaking is the number of tokens waiting on arrival plus the configured
    /// number, and 0 if that is configured as 0.
    #[test]
    fn the_overtaking_bound_includes_the_tokens_that_wait_on_arrival() {
        let bounds =
            |queue: &Queue| queue.entries().iter().map(|w| w.place.bound).collect::<Vec<_>>();
        assert_eq!(bounds(&queue(3)), [100, 108, 116]);
        let limits = Arc::new(QueueLimits::new(2, usize::MAX, 1));
        let mut strict = Queue::default();
        let sequence = sequence(0);
        let _ahead = limits.acquire(None, 50, 0).expect("there is room");
        strict.push(sequence, limits.acquire(None, 8, 0).ok(), 0);
        assert_eq!(bounds(&strict), [0]);
    }

    /// Goal: a request that was preempted has left the queue for its caller: its queue timeout no
    /// longer applies, its other timeout does.
    #[test]
    fn a_preempted_request_has_no_queue_timeout() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let mut queue = queue(1);
        let times = &mut queue.entries_mut()[0].sequence.times;
        (times.queue_deadline, times.deadline) = (Some(now + second), Some(now + 3 * second));
        assert_eq!(queue.next_deadline(), Some(now + second));
        queue.entries_mut()[0].sequence.times.started = Some(now);
        assert_eq!(queue.next_deadline(), Some(now + 3 * second));
        assert!(queue.take_overdue(now + 2 * second).is_empty());
        assert_eq!(queue.take_overdue(now + 3 * second).len(), 1);
    }

    /// Goal: whether a lock was dropped is reported, because only then there may be more room.
    #[test]
    fn dropped_match_locks_are_reported() {
        let (mut writer, _reader) = stolon_kvcache::prefix_tree(4).expect("a block size");
        let mut queue = queue(2);
        assert!(!queue.drop_match_locks());
        let acquired = acquire(&mut writer, &Namespace::default(), &[1; 8], None);
        queue.entries_mut()[0].match_lock = Some(acquired);
        assert!(queue.drop_match_locks() && !queue.drop_match_locks());
    }

    /// Goal: a policy learns how many requests, running and waiting, begin with the same block, and
    /// that a load saves most of the tokens that it loads, but not all.
    #[test]
    fn candidates_describe_what_a_request_costs() {
        let mut queue = queue(2);
        let running = [sequence(1), sequence(1), sequence(7)];
        let shares = SlotShares::new(8, std::iter::empty(), std::iter::empty());
        let sharers = |queue: &Queue| -> Vec<usize> {
            let candidates = queue.candidates(running.iter(), &shares);
            candidates.iter().map(|candidate| candidate.prefix_sharers).collect()
        };
        assert_eq!(sharers(&queue), [1, 3]);
        let mut stored = sequence(2);
        stored.tokens = Arc::new(vec![2; 401]);
        stored.prompt_len = 401;
        stored.stored = Some(StoredKv::new(4, 1, vec![Bytes::new(); 99]));
        let waiting = &mut queue.entries_mut()[0];
        waiting.sequence = stored;
        (waiting.matched, waiting.resume) = (4, 4);
        // Blocks 1 to 99 are stored: 396 tokens, which cost as much as 7 that are computed.
        let candidate = &queue.candidates(running.iter(), &shares)[0];
        assert_eq!((candidate.matched, queue.entries()[0].cost()), (4 + 396 - 7, 1 + 7));
    }
}
