//! What the requests with one API key may occupy together: tokens that run, and tokens that wait.
//!
//! 1. A request's tokens are those of its prompts and the most that its answers may have.
//! 2. It runs if the tokens of all running requests of its key are then within the limit, and
//!    otherwise waits behind those of its key that came before. One that is larger than the limit
//!    runs alone. The requests of other keys do not wait for it.
//! 3. If too many tokens wait already, it is refused with status 429.
//! 4. Its tokens count until its reply has been sent, or its client has disconnected.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::deadline::Deadline;
use super::error::ApiError;

/// What `Retry-After` says to a client whose key has too many waiting tokens.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Limits of one API key, in tokens of prompts and answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyLimits {
    /// Maximum number of tokens of requests that run at the same time, at least 1. Further requests
    /// wait. `None` for no limit.
    pub running_tokens: Option<usize>,
    /// Maximum number of tokens of requests that wait for [`KeyLimits::running_tokens`]. Further
    /// requests are refused, unless none waits. `None` for no limit.
    pub queued_tokens: Option<usize>,
}

/// The use of one API key.
#[derive(Debug)]
pub(super) struct Quota {
    /// The name of the key's client, for errors.
    name: String,
    limits: KeyLimits,
    /// One permit for each token that may run.
    running: Arc<Semaphore>,
    /// Tokens of requests that wait.
    queued: AtomicUsize,
}

/// What a request occupies, until the last clone of this is dropped.
#[derive(Clone, Debug, Default)]
pub(super) struct Held(Arc<Mutex<Option<OwnedSemaphorePermit>>>);

/// Counts the tokens of a waiting request.
struct Waiting<'a> {
    queued: &'a AtomicUsize,
    tokens: usize,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.queued.fetch_sub(self.tokens, Ordering::Relaxed);
    }
}

impl Quota {
    /// The use of a key without requests; `None` if it has no limit.
    pub(super) fn new(name: &str, limits: KeyLimits) -> Option<Arc<Self>> {
        let permits = largest(limits.running_tokens?);
        let running = Arc::new(Semaphore::new(permits));
        Some(Arc::new(Self { name: name.to_owned(), limits, running, queued: AtomicUsize::new(0) }))
    }

    /// Waits until a request with this many tokens may run. `held` then has its tokens.
    pub(super) async fn admit(
        &self,
        tokens: usize,
        deadline: Deadline,
        held: &Held,
    ) -> Result<(), ApiError> {
        let limit = largest(self.limits.running_tokens.unwrap_or(usize::MAX));
        let permits = u32::try_from(tokens.min(limit)).unwrap_or(u32::MAX);
        let permit = match Arc::clone(&self.running).try_acquire_many_owned(permits) {
            Ok(permit) => permit,
            Err(_) => {
                let _waiting = self.queue(tokens)?;
                let acquire = Arc::clone(&self.running).acquire_many_owned(permits);
                let acquired = match deadline.left() {
                    Some(left) => tokio::time::timeout(left, acquire).await,
                    None => Ok(acquire.await),
                };
                let acquired = acquired.map_err(|_| {
                    let waited_for = "waited for earlier requests with the same key";
                    ApiError::timed_out(format!("timed out while the request {waited_for}"))
                })?;
                acquired.map_err(|_| ApiError::internal())?
            }
        };
        *held.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(permit);
        Ok(())
    }

    /// Counts a request as waiting, or refuses it.
    fn queue(&self, tokens: usize) -> Result<Waiting<'_>, ApiError> {
        let limit = self.limits.queued_tokens.unwrap_or(usize::MAX);
        let fits = |queued: usize| {
            let sum = queued.saturating_add(tokens);
            (queued == 0 || sum <= limit).then_some(sum)
        };
        let (order, queued) = (Ordering::Relaxed, &self.queued);
        match queued.fetch_update(order, order, fits) {
            Ok(before) => {
                // What the sum was increased by, also if it is the largest number.
                let tokens = before.saturating_add(tokens) - before;
                Ok(Waiting { queued, tokens })
            }
            Err(queued) => {
                let message = format!(
                    "the key of `{}` has {queued} queued tokens, and max-queued-tokens is {limit}: \
                     expected at most {} more, got {tokens}",
                    self.name,
                    limit.saturating_sub(queued)
                );
                Err(ApiError::key_limit(message, RETRY_AFTER))
            }
        }
    }
}

/// The limit as a number of permits of a semaphore that one request can acquire.
fn largest(tokens: usize) -> usize {
    tokens.clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize))
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn quota(running: usize, queued: Option<usize>) -> Arc<Quota> {
        let limits = KeyLimits { running_tokens: Some(running), queued_tokens: queued };
        Quota::new("ada", limits).expect("limits")
    }

    /// Goal: requests run while their tokens fit, then wait in order, then are refused; what ends
    /// or goes away makes room.
    #[test]
    fn tokens_run_then_wait_then_are_refused() {
        let quota = quota(100, Some(50));
        let admit = |tokens, held: &Held| {
            let (quota, held) = (Arc::clone(&quota), held.clone());
            async move { quota.admit(tokens, Deadline::default(), &held).await }.boxed()
        };
        let mut holds: Vec<Held> = (0..6).map(|_| Held::default()).collect();
        assert_eq!(admit(60, &holds[0]).now_or_never(), Some(Ok(())));
        assert_eq!(admit(40, &holds[1]).now_or_never(), Some(Ok(())));
        let mut large = admit(70, &holds[2]);
        assert!((&mut large).now_or_never().is_none(), "the first one waits, whatever its size");
        let refused = admit(1, &holds[3]).now_or_never().expect("at once").expect_err("refused");
        assert_eq!(refused.status().as_u16(), 429);
        let message = refused.message();
        assert!(message.contains("ada") && message.contains("max-queued-tokens"), "{message}");
        drop(large);
        let mut first = admit(30, &holds[3]);
        let mut second = admit(20, &holds[4]);
        assert!((&mut first).now_or_never().is_none() && (&mut second).now_or_never().is_none());
        assert!(admit(1, &holds[5]).now_or_never().expect("at once").is_err(), "50 are queued");
        holds[1] = Held::default();
        assert_eq!(first.now_or_never(), Some(Ok(())));
        assert_eq!(quota.queued.load(Ordering::Relaxed), 20);
        drop(second);
        assert_eq!(quota.queued.load(Ordering::Relaxed), 0);
    }

    /// Goal: a request that is larger than the limit runs alone, and one without limits at once.
    #[test]
    fn a_large_request_runs_alone() {
        let quota = quota(10, None);
        let (large, small) = (Held::default(), Held::default());
        let admit =
            |tokens, held: &Held| quota.admit(tokens, Deadline::default(), held).now_or_never();
        assert_eq!(admit(usize::MAX, &large), Some(Ok(())));
        assert_eq!(admit(1, &small), None);
        assert_eq!(quota.queued.load(Ordering::Relaxed), 0);
        drop(large);
        assert_eq!(admit(1, &small), Some(Ok(())));
        assert!(Quota::new("ada", KeyLimits::default()).is_none());
    }
}
