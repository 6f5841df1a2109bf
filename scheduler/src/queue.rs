//! The waiting requests, in order of arrival, with what is known of each.

use std::collections::HashMap;
use std::time::Instant;

use stolon_kvcache::PrefixLease;

use crate::permits::QueuePermit;
use crate::policy::Candidate;
use crate::sequence::Sequence;
use crate::sharing::Follow;

/// A waiting request.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) sequence: Sequence,
    /// Order of arrival; kept over a preemption.
    pub(crate) arrival: u64,
    /// Its place at the limits; a preempted one gave it up when it first ran.
    pub(crate) permit: Option<QueuePermit>,
    /// Tokens cached, as of `version`.
    pub(crate) matched: usize,
    /// The tree's version at the last query; `None` before the first.
    pub(crate) version: Option<u64>,
    /// Cost of later requests admitted before it.
    pub(crate) overtaken: usize,
    /// What `overtaken` never exceeds.
    pub(crate) bound: usize,
    /// Keeps its match from being evicted while others are tried past it.
    pub(crate) match_lock: Option<PrefixLease>,
    /// The running sequence whose blocks it waits for.
    pub(crate) follow: Option<Follow>,
    /// The set of running sequences that was last searched for a leader.
    pub(crate) leaders_seen: Option<u64>,
    /// It has waited in vain for a leader and computes for itself.
    pub(crate) following_disabled: bool,
}

impl Waiting {
    pub(crate) fn new(
        sequence: Sequence,
        arrival: u64,
        bound: usize,
        permit: Option<QueuePermit>,
    ) -> Waiting {
        Waiting {
            sequence,
            arrival,
            permit,
            matched: 0,
            version: None,
            overtaken: 0,
            bound,
            match_lock: None,
            follow: None,
            leaders_seen: None,
            following_disabled: false,
        }
    }

    /// What later requests may still cost that are admitted before it.
    pub(crate) fn slack(&self) -> usize {
        self.bound.saturating_sub(self.overtaken)
    }

    /// Tokens that must be computed before its next one is sampled, as far as known; at least 1.
    pub(crate) fn cost(&self) -> usize {
        self.sequence.tokens.len().saturating_sub(self.matched).max(1)
    }

    /// When it is to be looked at for a timeout.
    fn deadline(&self) -> Option<Instant> {
        let times = &self.sequence.times;
        // One that has run before is no longer in the queue in its caller's eyes.
        let queue = if times.started.is_none() { times.queue_deadline } else { None };
        [queue, times.deadline].into_iter().flatten().min()
    }
}

/// The waiting requests.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    /// In order of arrival.
    entries: Vec<Waiting>,
    next_arrival: u64,
    /// Where the next round of queries goes on.
    query_cursor: usize,
}

impl Queue {
    /// Adds a new request at the end. It may be overtaken by `max_overtake` tokens and as many
    /// again as waited when it came; by none if that is 0.
    pub(crate) fn push(&mut self, sequence: Sequence, permit: QueuePermit, max_overtake: usize) {
        let arrival = self.next_arrival;
        self.next_arrival += 1;
        let bound = match max_overtake {
            0 => 0,
            more => permit.ahead().saturating_add(more),
        };
        self.entries.push(Waiting::new(sequence, arrival, bound, Some(permit)));
    }

    /// Puts a preempted request back to its place by arrival.
    pub(crate) fn put_back(&mut self, waiting: Waiting) {
        let place = self.entries.partition_point(|other| other.arrival < waiting.arrival);
        self.entries.insert(place, waiting);
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

    pub(crate) fn remove(&mut self, index: usize) -> Waiting {
        self.entries.remove(index)
    }

    /// Removes a request by its id.
    pub(crate) fn take(&mut self, id: u64) -> Option<Waiting> {
        let index = self.entries.iter().position(|waiting| waiting.sequence.id == id)?;
        Some(self.entries.remove(index))
    }

    /// Removes those whose time is up, or whose reader is gone.
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

    /// The next moment at which [`Queue::take_overdue`] has something to do.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.entries.iter().filter_map(Waiting::deadline).min()
    }

    /// Charges the cost of an admitted request to all that came before it, but for those whose
    /// own readers hold them back.
    pub(crate) fn charge_overtaking(&mut self, arrival: u64, cost: usize) {
        for waiting in self.entries.iter_mut().take_while(|waiting| waiting.arrival < arrival) {
            if !waiting.sequence.is_paused() {
                waiting.overtaken = waiting.overtaken.saturating_add(cost);
                debug_assert!(waiting.overtaken <= waiting.bound, "the bound on overtaking");
            }
        }
    }

    /// Drops every shield; whether there was one.
    pub(crate) fn drop_match_locks(&mut self) -> bool {
        let mut dropped = false;
        for waiting in &mut self.entries {
            dropped |= waiting.match_lock.take().is_some();
        }
        dropped
    }

    /// What the policy needs to know, beside the prefix_hashes of the `running` sequences.
    pub(crate) fn candidates(&self, running: impl Iterator<Item = u64>) -> Vec<Candidate> {
        let mut prefix_hashes: HashMap<u64, usize> = HashMap::new();
        for prefix_hash in
            running.chain(self.entries.iter().map(|waiting| waiting.sequence.prefix_hash))
        {
            *prefix_hashes.entry(prefix_hash).or_default() += 1;
        }
        let candidate = |waiting: &Waiting| {
            let follows = waiting.follow.is_some() && waiting.slack() > 0;
            let paused = waiting.sequence.is_paused();
            Candidate {
                arrival: waiting.arrival,
                priority: waiting.sequence.priority,
                tokens: waiting.sequence.tokens.len(),
                matched: waiting.matched,
                sharers: prefix_hashes[&waiting.sequence.prefix_hash],
                slack: waiting.slack(),
                bound: waiting.bound,
                ready: !paused && !follows,
                stalled: paused,
            }
        };
        self.entries.iter().map(candidate).collect()
    }

    /// Queries again up to `limit` requests whose match may have changed since the tree had
    /// another version, going round the queue from call to call.
    pub(crate) fn refresh_matches(
        &mut self,
        version: u64,
        limit: usize,
        mut query: impl FnMut(&Sequence) -> usize,
    ) {
        let mut left = limit;
        for step in 0..self.entries.len() {
            let index = (self.query_cursor + step) % self.entries.len();
            let waiting = &mut self.entries[index];
            if waiting.version == Some(version) {
                continue;
            }
            if left == 0 {
                self.query_cursor = index;
                return;
            }
            left -= 1;
            waiting.matched = query(&waiting.sequence);
            waiting.version = Some(version);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::event_channel::event_channel;
    use crate::permits::QueueLimits;
    use crate::request::SequenceRequest;

    fn queue(count: u64) -> Queue {
        let limits = Arc::new(QueueLimits::new(count as usize, usize::MAX));
        let mut queue = Queue::default();
        for id in 0..count {
            let request = SequenceRequest::new(vec![id as u32; 8], 1);
            let sequence = Sequence::new(id, request, 1, 4, event_channel(8).0, Instant::now());
            queue.push(sequence, limits.acquire(8).expect("there is room"), 100);
        }
        queue
    }

    /// Goal: a match is looked up once for each version of the tree and not again, by so many
    /// a round, in turn.
    #[test]
    fn matches_are_looked_up_once_a_version() {
        let mut queue = queue(5);
        let mut round = |version, expected: &[u64]| {
            let mut asked = Vec::new();
            queue.refresh_matches(version, 2, |sequence| {
                asked.push(sequence.id);
                version as usize
            });
            assert_eq!(asked, expected, "version {version}");
        };
        for expected in [&[0, 1][..], &[2, 3], &[4], &[], &[]] {
            round(1, expected);
        }
        // A version that moves at each round leaves nobody out.
        for (version, expected) in [(2, [4, 0]), (3, [1, 2]), (4, [3, 4]), (5, [0, 1])] {
            round(version, &expected);
        }
        let versions: Vec<_> = queue.entries().iter().map(|waiting| waiting.version).collect();
        assert_eq!(versions, [5, 5, 3, 4, 4].map(Some));
    }

    /// Goal: the bound is what waited on arrival and so many tokens beside, and 0 is strictly none.
    #[test]
    fn the_bound_grows_with_what_waits() {
        let bounds = |queue: &Queue| queue.entries().iter().map(|w| w.bound).collect::<Vec<_>>();
        assert_eq!(bounds(&queue(3)), [100, 108, 116]);
        let limits = Arc::new(QueueLimits::new(2, usize::MAX));
        let mut strict = Queue::default();
        let request = SequenceRequest::new(vec![1; 8], 1);
        let sequence = Sequence::new(0, request, 1, 4, event_channel(8).0, Instant::now());
        let _ahead = limits.acquire(50).expect("there is room");
        strict.push(sequence, limits.acquire(8).expect("there is room"), 0);
        assert_eq!(bounds(&strict), [0]);
    }
}
