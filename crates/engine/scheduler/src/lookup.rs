//! [`StoredLookup`]: when a waiting request asks again for stored KV of its prompt.
//!
//! The cached and the stored part of a prompt are looked up before its request is submitted,
//! because reading takes time. Both are hints: while the request waits, the cached part can be
//! evicted without anything being read in its place. So there is a second look-up at admission:
//!
//! 1. The request has locked its match. If that and its stored KV are shorter than what was found
//!    before, the request asks again for stored KV, from the end of the match.
//! 2. While that is read, the request keeps its place in the queue. Later requests are admitted
//!    before it as far as its bound on overtaking permits.
//! 3. When the answer has come, or [`WAIT_MAX`] has passed, the request is tried again. The next
//!    look is compared with what the request has now, so it asks once for each loss.
//! 4. After [`LOOKUPS_MAX`] repetitions it runs with what it has, and computes the rest.

use std::time::{Duration, Instant};

/// Maximum number of repeated look-ups while a request waits.
const LOOKUPS_MAX: u32 = 2;

/// How long a request waits at most for the answer to a repeated look-up. The source has mostly a
/// shorter limit; this one holds if a read never ends, because requests that may no longer overtake
/// this one wait just as long.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(10);

/// The look-ups of a waiting request.
#[derive(Debug)]
pub(crate) struct StoredLookup {
    /// The largest number of leading tokens that was found cached or stored, since the last answer.
    found_max: usize,
    /// Number of repeated look-ups.
    repeated: u32,
    /// Until when the request waits for the answer; `None` if it waits for none.
    until: Option<Instant>,
}

impl StoredLookup {
    /// The first look-up of a prompt has found this number of leading tokens.
    pub(crate) fn new(found: usize) -> StoredLookup {
        StoredLookup { found_max: found, repeated: 0, until: None }
    }

    /// Notes how many tokens were found while the request waits.
    pub(crate) fn note(&mut self, found: usize) {
        self.found_max = self.found_max.max(found);
    }

    /// Whether the request asks again, with `found` tokens of its prompt locked or stored: at least
    /// a block was lost, and it has not asked too often.
    pub(crate) fn is_due(&self, found: usize, block_size: usize) -> bool {
        self.until.is_none()
            && self.repeated < LOOKUPS_MAX
            && found.saturating_add(block_size) <= self.found_max
    }

    /// The request asks again.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.repeated += 1;
        self.until = now.checked_add(WAIT_MAX);
    }

    /// The answer has come, or is not waited for any longer. The request has `found` tokens now.
    pub(crate) fn end(&mut self, found: usize) {
        self.until = None;
        self.found_max = found;
    }

    /// Until when the request waits for an answer; `None` if it waits for none.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a request asks once for each loss of at least a block, and a limited number of times.
    #[test]
    fn a_request_asks_once_for_each_loss() {
        let now = Instant::now();
        let mut lookup = StoredLookup::new(40);
        lookup.note(64);
        lookup.note(48);
        assert_eq!(
            [64, 49, 48, 0].map(|found| lookup.is_due(found, 16)),
            [false, false, true, true]
        );
        lookup.begin(now);
        assert_eq!((lookup.deadline(), lookup.is_due(0, 16)), (Some(now + WAIT_MAX), false));
        // Nothing more was stored, so there is nothing to ask for.
        lookup.end(16);
        assert!(lookup.deadline().is_none() && !lookup.is_due(16, 16));
        assert!(lookup.is_due(0, 16), "the rest was lost too");
        lookup.begin(now);
        lookup.end(64);
        assert!(!lookup.is_due(0, 16), "it has asked twice");
    }
}
