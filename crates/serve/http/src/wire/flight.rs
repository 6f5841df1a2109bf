//! Joins concurrent calls of one expensive operation.

use std::sync::{Mutex, PoisonError};

use futures::FutureExt;
use futures::future::{BoxFuture, Shared, WeakShared};

/// An operation that runs at most once at a time. Callers that arrive while it runs share its
/// result. It is canceled when all of them have been dropped.
pub(crate) struct SingleFlight<T: Clone>(Mutex<Option<WeakShared<BoxFuture<'static, T>>>>);

impl<T: Clone> SingleFlight<T> {
    /// No operation runs.
    pub(crate) fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// The result of the running operation, or of a new one.
    pub(crate) fn run(
        &self,
        start: impl FnOnce() -> BoxFuture<'static, T>,
    ) -> Shared<BoxFuture<'static, T>> {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match running.as_ref().and_then(WeakShared::upgrade) {
            Some(shared) if shared.peek().is_none() => shared,
            _ => {
                let shared = start().shared();
                *running = shared.downgrade();
                shared
            }
        }
    }
}

impl<T: Clone> std::fmt::Debug for SingleFlight<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SingleFlight").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::future::join3;

    use super::*;

    /// Goal: callers that arrive while the operation runs share it; a caller that arrives later
    /// starts it anew.
    #[tokio::test]
    async fn concurrent_callers_share_one_operation() {
        let flight = SingleFlight::new();
        let started = AtomicUsize::new(0);
        let run = || {
            flight.run(|| {
                let number = started.fetch_add(1, Ordering::Relaxed);
                async move {
                    tokio::task::yield_now().await;
                    number
                }
                .boxed()
            })
        };
        assert_eq!(join3(run(), run(), run()).await, (0, 0, 0));
        assert_eq!(run().await, 1);
        drop(run());
        assert_eq!(run().await, 3, "one without a waiting caller is canceled");
    }
}
