//! The door: bounds what waits, in the caller's task, before any message is sent.
//!
//! A [`Permit`] stands for one waiting request and its uncached tokens. It travels with the
//! request and is given back by dropping it, when the request begins to run or goes away; so
//! the mailbox behind the door, which has no bound of its own, is bounded too.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::error::CoreError;

/// Shared counts of what waits.
#[derive(Debug)]
pub(crate) struct Door {
    max_requests: usize,
    max_tokens: usize,
    requests: AtomicUsize,
    tokens: AtomicUsize,
    /// Tokens computed a second lately, for the retry hint; 0 while unknown.
    rate: AtomicU64,
}

/// One waiting request's place.
#[derive(Debug)]
pub(crate) struct Permit {
    door: Arc<Door>,
    tokens: usize,
    /// Uncached tokens that waited when it was given.
    ahead: usize,
}

impl Permit {
    /// Uncached tokens of the requests that waited when this one came.
    pub(crate) fn ahead(&self) -> usize {
        self.ahead
    }
}

impl Door {
    pub(crate) fn new(max_requests: usize, max_tokens: usize) -> Door {
        Door {
            max_requests,
            max_tokens,
            requests: AtomicUsize::new(0),
            tokens: AtomicUsize::new(0),
            rate: AtomicU64::new(0),
        }
    }

    /// Takes a place for a request with so many uncached tokens. A request is let in whatever
    /// it needs while nothing else waits.
    pub(crate) fn enter(self: &Arc<Door>, tokens: usize) -> Result<Permit, CoreError> {
        // Each count is raised first and lowered again on refusal: two callers at once can
        // refuse each other, but never both pass beyond a limit. The counts guard no other
        // memory, so relaxed order does.
        let requests = self.requests.fetch_add(1, Ordering::Relaxed);
        let queued = self.tokens.fetch_add(tokens, Ordering::Relaxed);
        let permit = Permit { door: Arc::clone(self), tokens, ahead: queued };
        let full = requests >= self.max_requests
            || (requests > 0 && queued.saturating_add(tokens) > self.max_tokens);
        if full {
            drop(permit);
            return Err(CoreError::Overloaded {
                retry_after: self.retry_after(queued),
                queued_requests: requests,
                queued_tokens: queued,
            });
        }
        Ok(permit)
    }

    /// Requests waiting.
    pub(crate) fn waiting(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }

    /// Tells how fast waiting tokens are worked off.
    pub(crate) fn set_rate(&self, tokens_per_second: f64) {
        self.rate.store(tokens_per_second as u64, Ordering::Relaxed);
    }

    /// Time in which half of what waits will have been computed, from 50 ms to 60 s.
    fn retry_after(&self, queued_tokens: usize) -> Duration {
        let rate = self.rate.load(Ordering::Relaxed);
        if rate == 0 {
            return Duration::from_secs(1);
        }
        let seconds = queued_tokens as f64 / 2.0 / rate as f64;
        Duration::from_secs_f64(seconds.clamp(0.05, 60.0))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.door.requests.fetch_sub(1, Ordering::Relaxed);
        self.door.tokens.fetch_sub(self.tokens, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(result: Result<Permit, CoreError>) -> bool {
        matches!(result, Err(CoreError::Overloaded { .. }))
    }

    #[test]
    fn the_request_limit_holds_and_a_dropped_permit_frees_a_place() {
        let door = Arc::new(Door::new(2, 1000));
        let first = door.enter(1).expect("empty");
        let _second = door.enter(1).expect("one place left");
        assert!(refused(door.enter(1)));
        drop(first);
        assert!(door.enter(1).is_ok());
    }

    #[test]
    fn the_token_limit_counts_uncached_tokens_and_a_refusal_takes_nothing() {
        let door = Arc::new(Door::new(10, 100));
        let _first = door.enter(60).expect("fits");
        for _ in 0..5 {
            assert!(refused(door.enter(41)));
        }
        assert!(door.enter(40).is_ok());
        assert_eq!(door.waiting(), 1);
    }

    #[test]
    fn one_request_is_let_in_whatever_it_needs() {
        let door = Arc::new(Door::new(10, 100));
        let large = door.enter(5000).expect("nothing else waits");
        assert!(refused(door.enter(1)));
        drop(large);
        assert!(door.enter(1).is_ok());
    }

    #[test]
    fn the_retry_hint_follows_the_rate_within_its_bounds() {
        let door = Arc::new(Door::new(1, 100));
        assert_eq!(door.retry_after(100), Duration::from_secs(1));
        door.set_rate(100.0);
        assert_eq!(door.retry_after(1000), Duration::from_secs(5));
        assert_eq!(door.retry_after(0), Duration::from_millis(50));
        assert_eq!(door.retry_after(1_000_000), Duration::from_secs(60));
    }
}
