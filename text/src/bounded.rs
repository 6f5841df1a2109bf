//! Runs code that a file controls, such as a chat template, on a separate thread: with a stack of
//! known size, with a deadline, and with panics caught.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Size of the stack in bytes. It is reserved, but only the part that is used becomes resident.
const STACK: usize = 256 << 20;

/// Maximum number of threads of one [`Bounded`] that may be running past their deadline.
const MAX_OVERDUE: usize = 4;

/// Runs jobs for one file. A thread cannot be ended from outside, so one that misses its deadline
/// keeps running. Further jobs are refused while too many such threads are running.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bounded {
    overdue: Arc<AtomicUsize>,
}

/// Why a job has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Stopped {
    #[error("expected a result within {} s", .0.as_secs())]
    Deadline(Duration),
    #[error("{MAX_OVERDUE} earlier calls have missed their deadline and are still running")]
    TooManyOverdue,
    #[error("panicked: {0}")]
    Panicked(String),
    #[error("cannot start a thread: {0}")]
    NoThread(String),
}

impl Bounded {
    /// Runs `job` on a new thread and waits for at most `limit`.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        limit: Duration,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Stopped> {
        if self.overdue.load(Ordering::Relaxed) >= MAX_OVERDUE {
            return Err(Stopped::TooManyOverdue);
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        let spawned = thread::Builder::new().stack_size(STACK).spawn(move || {
            let result = catch(job);
            // The receiver is gone if the deadline has passed.
            let _ = sender.send(result);
        });
        let thread = spawned.map_err(|error| Stopped::NoThread(error.to_string()))?;
        match receiver.recv_timeout(limit) {
            Ok(result) => {
                // It has nothing left to do but to free its own storage.
                let _ = thread.join();
                result
            }
            Err(_) => {
                self.overdue.fetch_add(1, Ordering::Relaxed);
                let overdue = Arc::clone(&self.overdue);
                // Waits without a deadline, so that the count falls when the thread ends.
                let waiter = thread::Builder::new().stack_size(64 << 10).spawn(move || {
                    let _ = thread.join();
                    overdue.fetch_sub(1, Ordering::Relaxed);
                });
                drop(waiter);
                Err(Stopped::Deadline(limit))
            }
        }
    }
}

thread_local! {
    /// Whether [`catch`] is running on this thread.
    static CATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic on this thread would become an error of the file or the request that has caused
/// it. A program's panic hook needs to print nothing then.
#[must_use]
pub fn panics_become_errors() -> bool {
    CATCHING.get()
}

/// Runs `job` on this thread and turns a panic into an error.
pub(crate) fn catch<T>(job: impl FnOnce() -> T) -> Result<T, Stopped> {
    let outer = CATCHING.replace(true);
    let result = catch_unwind(AssertUnwindSafe(job));
    CATCHING.set(outer);
    result.map_err(|panic| {
        let text = panic
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| panic.downcast_ref::<String>().cloned());
        Stopped::Panicked(text.unwrap_or_else(|| "no message".to_owned()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a job that hangs does not block its caller, and at most four of them run at a time.
    #[test]
    fn jobs_that_hang_are_left_behind_and_counted() {
        let bounded = Bounded::default();
        let (release, wait) = std::sync::mpsc::channel::<()>();
        let wait = Arc::new(std::sync::Mutex::new(wait));
        let limit = Duration::from_millis(10);
        for _ in 0..MAX_OVERDUE {
            let wait = Arc::clone(&wait);
            let hanging = move || wait.lock().map(|wait| wait.recv().is_ok()).unwrap_or(false);
            assert_eq!(bounded.run(limit, hanging), Err(Stopped::Deadline(limit)));
        }
        assert_eq!(bounded.run(limit, || 1), Err(Stopped::TooManyOverdue));
        drop(release);
        while bounded.overdue.load(Ordering::Relaxed) > 0 {
            thread::yield_now();
        }
        assert_eq!(bounded.run(Duration::from_secs(60), || 1), Ok(1));
    }

    /// Goal: a panic is an error with the panic's message.
    #[test]
    fn panics_are_errors() {
        let job = || -> u32 { panic!("no {}", "way") };
        let error = Bounded::default().run(Duration::from_secs(60), job);
        assert_eq!(error, Err(Stopped::Panicked("no way".to_owned())));
    }

    /// Goal: a panic hook can tell panics that become errors from others.
    #[test]
    fn a_hook_can_tell_caught_panics() {
        assert!(!panics_become_errors());
        let inner = || catch(|| (catch(|| ()).is_ok(), panics_become_errors()));
        assert_eq!(catch(inner), Ok(Ok((true, true))));
        let _ = catch(|| panic!("caught"));
        assert!(!panics_become_errors());
    }
}
