//! Runs code that a file or a client controls, such as a chat template, on a separate thread: with
//! a stack of known size, with a limit on its work, and with panics caught.
//!
//! 1. [`Bounded::run`] starts the thread and measures its processor time.
//! 2. At the limit it tells the job to stop. Jobs ask [`is_told_to_stop`], or are told by the hooks
//!    that they have passed to `on_stop`.
//! 3. A job that has not ended soon after that is left behind. Each client has at most one such
//!    thread, and at most [`MAX_OVERDUE`] run at a time.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::Busy;
use crate::processor_time::ProcessorTime;

/// Size of the stack in bytes. It is reserved, but only the part that is used becomes resident.
const STACK: usize = 256 << 20;

/// Maximum number of threads of one [`Bounded`] that may be left behind.
const MAX_OVERDUE: usize = 4;

/// Time that a request waits for its job, which may get little processor time or none. Most clients
/// wait longer for an answer.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(60);

/// Processor time in which a job has to end after it was told to, and half the time by the clock.
const GRACE: Duration = Duration::from_secs(1);

/// Runs jobs for one file. A thread cannot be ended from outside, so one that does not stop when it
/// is told to keeps running. Further jobs are refused while too many such threads are running.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bounded {
    /// The clients of threads that were left behind.
    overdue: Arc<Mutex<Vec<Client>>>,
}

/// The client of a request; `None` if it is not known.
pub(crate) type Client = Option<Arc<str>>;

/// Why a job has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Stopped {
    /// It needs more work than permitted.
    #[error("expected a result within {} s of processor time", .0.as_secs())]
    TooMuchWork(Duration),
    /// The machine was too busy.
    #[error(transparent)]
    Busy(#[from] Busy),
    /// It panicked.
    #[error("panicked: {0}")]
    Panicked(String),
}

impl Bounded {
    /// Runs a client's `job` on a new thread, which may use `work` of processor time, and waits for
    /// it for `wait`.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        client: &Client,
        work: Duration,
        wait: Duration,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Stopped> {
        self.check_overdue(client)?;
        let (clock_sender, clock) = mpsc::sync_channel(1);
        let (sender, result) = mpsc::sync_channel(1);
        let stop = Stop::default();
        let of_job = stop.clone();
        let spawned = thread::Builder::new().stack_size(STACK).spawn(move || {
            // The receivers are gone if the thread was left behind.
            let _ = clock_sender.send(ProcessorTime::of_this_thread());
            let _ = sender.send(of_job.during(|| catch(job)));
        });
        let no_thread = |error: &dyn std::fmt::Display| Busy::new(format!("no thread: {error}"));
        let thread = spawned.map_err(|error| no_thread(&error))?;
        let clock = clock.recv().map_err(|error| no_thread(&error))?;
        let limits = Limits { work, wait, begun: Instant::now() };
        match limits.receive(&result, &clock) {
            Received::Result(result) => {
                // It has nothing left to do but to free its own storage.
                let _ = thread.join();
                result
            }
            Received::Late(reason) => {
                stop.now();
                let after = clock.spent() + GRACE;
                let grace = Limits { work: after, wait: 2 * GRACE, begun: Instant::now() };
                match grace.receive(&result, &clock) {
                    Received::Result(_) => drop(thread.join()),
                    Received::Late(_) => self.leave_behind(thread, client.clone()),
                }
                Err(reason)
            }
        }
    }

    /// Refuses a job while one of its client was left behind, or too many of all clients.
    fn check_overdue(&self, client: &Client) -> Result<(), Busy> {
        let overdue = lock(&self.overdue);
        if client.is_some() && overdue.contains(client) {
            return Err(Busy::new("earlier work of this client has not ended yet"));
        }
        match overdue.len() >= MAX_OVERDUE {
            true => Err(Busy::new("earlier work has not ended yet")),
            false => Ok(()),
        }
    }

    /// Counts the thread as overdue until it ends.
    fn leave_behind(&self, thread: thread::JoinHandle<()>, client: Client) {
        lock(&self.overdue).push(client.clone());
        let overdue = Arc::clone(&self.overdue);
        let waiter = thread::Builder::new().stack_size(64 << 10).spawn(move || {
            let _ = thread.join();
            let mut overdue = lock(&overdue);
            let ended = overdue.iter().position(|other| *other == client);
            ended.map(|ended| overdue.swap_remove(ended));
        });
        drop(waiter);
    }
}

/// How long a job may take.
struct Limits {
    /// Processor time.
    work: Duration,
    /// Time since `begun`.
    wait: Duration,
    begun: Instant,
}

enum Received<T> {
    Result(T),
    Late(Stopped),
}

impl Limits {
    fn receive<T>(&self, result: &mpsc::Receiver<T>, clock: &ProcessorTime) -> Received<T> {
        loop {
            let (work, wait) = (
                self.work.saturating_sub(clock.spent()),
                self.wait.saturating_sub(self.begun.elapsed()),
            );
            // The clock of a thread that has ended stands still.
            match result.recv_timeout(work.min(wait).max(Duration::from_millis(5))) {
                Ok(result) => return Received::Result(result),
                Err(_) if work.is_zero() => {
                    return Received::Late(Stopped::TooMuchWork(self.work));
                }
                Err(_) if wait.is_zero() => {
                    let reason = format!("some work was not done after {} s", self.wait.as_secs());
                    return Received::Late(Busy::new(reason).into());
                }
                Err(_) => {}
            }
        }
    }
}

/// Tells a job to stop.
#[derive(Clone, Default)]
struct Stop(Arc<StopState>);

#[derive(Default)]
struct StopState {
    /// It guards no other memory, so all accesses are relaxed.
    is_set: AtomicBool,
    /// Called when the job has to stop.
    hooks: Mutex<Vec<Hook>>,
}

type Hook = Box<dyn Fn() + Send>;

thread_local! {
    /// The state of the job on this thread.
    static STOP: RefCell<Option<Stop>> = const { RefCell::new(None) };
}

impl Stop {
    /// Runs a job that can be told to stop.
    fn during<T>(self, job: impl FnOnce() -> T) -> T {
        STOP.set(Some(self));
        let result = job();
        STOP.take();
        result
    }

    fn now(&self) {
        let hooks = lock(&self.0.hooks);
        self.0.is_set.store(true, Ordering::Relaxed);
        hooks.iter().for_each(|hook| hook());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it is locked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the job on this thread is at its limit and should end as soon as it can.
pub(crate) fn is_told_to_stop() -> bool {
    STOP.with_borrow(|stop| stop.as_ref().is_some_and(|stop| stop.0.is_set.load(Ordering::Relaxed)))
}

/// Calls `hook` when the job on this thread has to stop; now, if that was before.
#[cfg(any(test, feature = "grammar"))]
pub(crate) fn on_stop(hook: impl Fn() + Send + 'static) {
    STOP.with_borrow(|stop| {
        let Some(stop) = stop else { return };
        let mut hooks = lock(&stop.0.hooks);
        // `now` sets it while it holds the lock.
        match stop.0.is_set.load(Ordering::Relaxed) {
            true => hook(),
            false => hooks.push(Box::new(hook)),
        }
    });
}

thread_local! {
    /// Whether [`catch`] is running on this thread.
    static CATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic on this thread would become an error of the file or the request that has caused
/// it. In this case a program's panic hook does not have to print anything.
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

    const LONG: Duration = Duration::from_secs(600);

    /// Goal: a job that does not stop does not block its caller, its client has no other job
    /// meanwhile, at most four of them run at a time, and the next client's error does not blame
    /// its own request.
    #[test]
    fn jobs_that_hang_are_left_behind_and_counted() {
        let bounded = Bounded::default();
        let (release, wait) = mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        let named = |name: &str| -> Client { Some(name.into()) };
        let clients = [named("a"), named("b"), None, None];
        let is_busy = |client: &Client| {
            matches!(bounded.run(client, LONG, LONG, || 1), Err(Stopped::Busy(_)))
        };
        let hang = |client: &Client| {
            let wait = Arc::clone(&wait);
            let hanging = move || lock(&wait).recv().is_ok();
            let late = bounded.run(client, LONG, Duration::from_millis(10), hanging);
            assert!(matches!(late, Err(Stopped::Busy(_))), "{late:?}");
        };
        thread::scope(|scope| {
            clients[1..].iter().for_each(|client| drop(scope.spawn(|| hang(client))));
        });
        assert!(is_busy(&named("b")) && !is_busy(&named("a")) && !is_busy(&None));
        hang(&clients[0]);
        assert_eq!(lock(&bounded.overdue).len(), MAX_OVERDUE);
        assert!(is_busy(&named("c")) && is_busy(&None));
        drop(release);
        while !lock(&bounded.overdue).is_empty() {
            thread::yield_now();
        }
        assert_eq!(bounded.run(&clients[0], LONG, LONG, || 1), Ok(1));
    }

    /// Goal: the limit is one of processor time. A job that waits is not at its limit, and one that
    /// computes forever is stopped, whether it asks or is told.
    #[cfg(target_os = "linux")]
    #[test]
    fn only_work_counts_and_late_work_is_stopped() {
        let bounded = Bounded::default();
        let limit = Duration::from_millis(50);
        let waiting = move || thread::sleep(4 * limit);
        assert_eq!(bounded.run(&None, limit, LONG, waiting), Ok(()));
        let asking = || while !is_told_to_stop() {};
        let told = || {
            let flag = Arc::new(AtomicBool::new(false));
            let hook = Arc::clone(&flag);
            on_stop(move || hook.store(true, Ordering::Relaxed));
            while !flag.load(Ordering::Relaxed) {}
        };
        assert_eq!(bounded.run(&None, limit, LONG, asking), Err(Stopped::TooMuchWork(limit)));
        assert_eq!(bounded.run(&None, limit, LONG, told), Err(Stopped::TooMuchWork(limit)));
        assert!(lock(&bounded.overdue).is_empty(), "both have ended");
        assert!(!is_told_to_stop());
    }

    /// Goal: a panic is an error with the panic's message.
    #[test]
    fn panics_are_errors() {
        let job = || -> u32 { panic!("no {}", "way") };
        let error = Bounded::default().run(&None, LONG, LONG, job);
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
