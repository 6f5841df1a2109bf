//! [`Workers`]: the threads that compute masks, shared fairly by the requests.
//!
//! A worker takes the job of the request on which the least time was spent so far (least attained
//! service). A mask cannot be interrupted, so requests on which more than [`LIGHT`] was spent have
//! separate workers, and one client never has all light workers. So a slow grammar delays other
//! slow grammars and the other requests of its client, and nothing else.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::state::Job;
use crate::bounded::Client;

/// Processor time of its masks above which a request counts as heavy. Most answers need less.
const LIGHT: Duration = Duration::from_millis(200);
/// Size of a worker's stack in bytes. Only the part that is used becomes resident.
const STACK: usize = 64 << 20;

/// Hands jobs to the workers. They end when the last clone is dropped.
#[derive(Clone)]
pub(super) struct Workers(Arc<Queues>);

struct Queues {
    light: Arc<Queue>,
    heavy: Arc<Queue>,
}

/// The jobs of some of the workers.
struct Queue {
    threads: usize,
    jobs: Mutex<Jobs>,
    /// Notified when a job was added or has ended.
    changed: Condvar,
}

#[derive(Default)]
struct Jobs {
    waiting: Vec<Job>,
    /// The clients of the jobs that run.
    running: Vec<Client>,
    /// There will be no further job.
    is_closed: bool,
}

impl Workers {
    /// Starts the threads.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub(super) fn start() -> std::io::Result<Self> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let heavy = Queue::new((cores / 8).clamp(1, 4));
        let light = Queue::new((cores / 4).clamp(2, 8));
        let workers = Self(Arc::new(Queues { light, heavy }));
        let Queues { light, heavy } = &*workers.0;
        Queue::start(heavy, Job::run)?;
        let heavy = Arc::clone(heavy);
        // A request may have become heavy while its job waited.
        Queue::start(light, move |job| match job.spent() > LIGHT {
            true => heavy.add(job),
            false => job.run(),
        })?;
        Ok(workers)
    }

    /// Hands over a job.
    pub(super) fn send(&self, job: Job) {
        let queue = if job.spent() > LIGHT { &self.0.heavy } else { &self.0.light };
        queue.add(job);
    }
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workers").finish_non_exhaustive()
    }
}

impl Drop for Queues {
    fn drop(&mut self) {
        for queue in [&self.light, &self.heavy] {
            queue.lock().is_closed = true;
            queue.changed.notify_all();
        }
    }
}

impl Queue {
    fn new(threads: usize) -> Arc<Queue> {
        Arc::new(Queue { threads, jobs: Mutex::default(), changed: Condvar::new() })
    }

    /// Starts the threads, which call `run` for each job.
    fn start(
        queue: &Arc<Queue>,
        run: impl Fn(Job) + Clone + Send + 'static,
    ) -> std::io::Result<()> {
        for _ in 0..queue.threads {
            let (queue, run) = (Arc::clone(queue), run.clone());
            let work = move || {
                while let Some(job) = queue.next() {
                    let client = job.client().clone();
                    run(job);
                    queue.ended(&client);
                }
            };
            let thread = thread::Builder::new().name("stolon-grammar".to_owned());
            thread.stack_size(STACK).spawn(work)?;
        }
        Ok(())
    }

    fn add(&self, job: Job) {
        self.lock().waiting.push(job);
        self.changed.notify_all();
    }

    /// Waits for a job that may run now. Returns `None` when no further one will come.
    fn next(&self) -> Option<Job> {
        let mut jobs = self.lock();
        loop {
            // Every sequence that needs masks has ended.
            if jobs.is_closed {
                return None;
            }
            if let Some(job) = jobs.take_next(self.threads) {
                return Some(job);
            }
            jobs = self.changed.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Notes that a job of this client has ended.
    fn ended(&self, client: &Client) {
        let mut jobs = self.lock();
        let index = jobs.running.iter().position(|running| running == client);
        index.map(|index| jobs.running.swap_remove(index));
        drop(jobs);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Jobs {
    /// Takes the job of the request on which the least time was spent, among clients that do not
    /// already occupy all but one of the `threads`.
    fn take_next(&mut self, threads: usize) -> Option<Job> {
        let most = (threads - 1).max(1);
        let of_client = |client| self.running.iter().filter(|&running| running == client).count();
        let may_run = |&index: &usize| of_client(self.waiting[index].client()) < most;
        let next = (0..self.waiting.len()).filter(may_run);
        let next = next.min_by_key(|&index| self.waiting[index].spent())?;
        let job = self.waiting.remove(next);
        self.running.push(job.client().clone());
        Some(job)
    }
}
