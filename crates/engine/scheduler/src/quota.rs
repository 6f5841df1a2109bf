//! Limits for the tokens of prompts and answers that the requests of one client occupy together.
//!
//! 1. A request counts from its submission until it ends. The number of its tokens is the length of
//!    its prompt plus the maximum length of its answer.
//! 2. It is admitted only if the tokens of all running requests with the same quota stay within
//!    `running_tokens`, or if none of them runs. Until then the scheduler passes over it, and
//!    requests with another quota, or with none, are admitted as if it were not there.
//! 3. It is refused on submission if more than `queued_tokens` tokens would have to wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::error::EngineError;

/// Limits the tokens of all requests that carry a clone of it.
#[derive(Clone, Debug)]
pub struct Quota(Arc<State>);

#[derive(Debug)]
struct State {
    running_tokens: usize,
    queued_tokens: usize,
    /// Tokens of all requests that were submitted and have not ended. The counts guard no other
    /// memory, so relaxed ordering suffices.
    in_flight: AtomicUsize,
    /// Number of requests that were submitted and have not started to run.
    waiting: AtomicUsize,
}

/// Identity of a quota within a process, while a request carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct QuotaId(usize);

/// One request's share of its quota. Dropping it returns the tokens.
#[derive(Debug)]
pub(crate) struct QuotaShare {
    quota: Quota,
    tokens: usize,
    /// Whether the request has not started to run. A preempted request has.
    is_waiting: bool,
}

impl Quota {
    /// A quota that nothing is charged to. `running_tokens` is the maximum number of tokens of
    /// requests that run at the same time; a request with more tokens runs alone. `queued_tokens`
    /// is the maximum number of tokens that wait, `None` for no limit; a request with more tokens
    /// is accepted while no other one waits.
    pub fn new(running_tokens: usize, queued_tokens: Option<usize>) -> Quota {
        Quota(Arc::new(State {
            running_tokens,
            queued_tokens: queued_tokens.unwrap_or(usize::MAX),
            in_flight: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
        }))
    }

    /// Number of tokens of the requests that were submitted and have not ended.
    pub fn tokens_in_flight(&self) -> usize {
        self.0.in_flight.load(Ordering::Relaxed)
    }

    /// Charges a request. `is_checked` is true for only the first of several answers to one prompt,
    /// so that they are accepted or refused together.
    ///
    /// # Errors
    /// [`EngineError::QuotaExceeded`] if too many tokens would wait.
    pub(crate) fn charge(
        &self,
        tokens: usize,
        is_checked: bool,
        retry_after: impl Fn(usize) -> Duration,
    ) -> Result<QuotaShare, EngineError> {
        let State { running_tokens, queued_tokens, .. } = *self.0;
        let limit = running_tokens.saturating_add(queued_tokens);
        // Counted as waiting first and dropped on refusal. Two concurrent callers can refuse each
        // other, but they can never both pass the limit.
        let others_wait = self.0.waiting.fetch_add(1, Ordering::Relaxed) > 0;
        let mut share = QuotaShare { quota: self.clone(), tokens: 0, is_waiting: true };
        let charged = |in_flight: usize| {
            let sum = in_flight.checked_add(tokens)?;
            (!is_checked || !others_wait || sum <= limit).then_some(sum)
        };
        let charged = self.0.in_flight.fetch_update(Ordering::Relaxed, Ordering::Relaxed, charged);
        let refused = |in_flight| EngineError::QuotaExceeded {
            retry_after: retry_after(in_flight),
            tokens_in_flight: in_flight,
            tokens,
            running_tokens,
            queued_tokens,
        };
        charged.map_err(refused)?;
        share.tokens = tokens;
        Ok(share)
    }
}

impl QuotaShare {
    pub(crate) fn id(&self) -> QuotaId {
        QuotaId(Arc::as_ptr(&self.quota.0).addr())
    }

    /// Number of tokens of the request.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Whether the request may run while the running requests with the same quota have `running`
    /// tokens together.
    pub(crate) fn fits(&self, running: usize) -> bool {
        running == 0 || running.saturating_add(self.tokens) <= self.quota.0.running_tokens
    }

    /// The request has started to run.
    pub(crate) fn run(&mut self) {
        if std::mem::take(&mut self.is_waiting) {
            self.quota.0.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for QuotaShare {
    fn drop(&mut self) {
        self.run();
        self.quota.0.in_flight.fetch_sub(self.tokens, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charge(quota: &Quota, tokens: usize) -> Result<QuotaShare, EngineError> {
        quota.charge(tokens, true, |_| Duration::from_secs(1))
    }

    /// Goal: tokens run, then wait, then are refused with numbers; what ends makes room, and a
    /// refusal changes no count.
    #[test]
    fn tokens_beyond_both_limits_are_refused_while_others_wait() {
        let quota = Quota::new(100, Some(50));
        let mut first = charge(&quota, 90).expect("nothing is in flight");
        first.run();
        let second = charge(&quota, 60).expect("just within both limits");
        let refused = charge(&quota, 1).expect_err("one too many");
        let expected = EngineError::QuotaExceeded {
            retry_after: Duration::from_secs(1),
            tokens_in_flight: 150,
            tokens: 1,
            running_tokens: 100,
            queued_tokens: 50,
        };
        assert_eq!(refused, expected);
        assert_eq!(quota.tokens_in_flight(), 150);
        drop(first);
        assert!(charge(&quota, 90).is_ok());
        drop(second);
        assert_eq!(quota.tokens_in_flight(), 0);
    }

    /// Goal: a request of any size is accepted while none waits, and further answers to its prompt
    /// with it.
    #[test]
    fn a_large_request_is_accepted_while_none_waits() {
        let quota = Quota::new(10, Some(0));
        let mut running = charge(&quota, 10).expect("fits");
        running.run();
        let large = charge(&quota, 1000).expect("none waits");
        assert!(charge(&quota, 1).is_err());
        let choice = quota.charge(1000, false, |_| Duration::ZERO).expect("not checked");
        assert!(!large.fits(10) && large.fits(0), "it runs alone");
        drop((running, large, choice));
        assert!(charge(&quota, usize::MAX).is_ok());
        assert_eq!(quota.tokens_in_flight(), 0);
    }
}
