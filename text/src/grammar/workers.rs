//! [`Workers`]: the threads that compute masks, shared fairly by the requests.
//!
//! A worker takes the job of the request on which the least time was spent so far (least attained
//! service). A mask cannot be interrupted, so requests on which more than [`LIGHT`] was spent have
//! separate workers. So a slow grammar delays only other slow ones.

use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::state::Job;

/// Time spent on the masks of a request from which on it counts as heavy. Most answers need less.
const LIGHT: Duration = Duration::from_millis(200);
/// Size of a worker's stack in bytes. Only the part that is used becomes resident.
const STACK: usize = 64 << 20;

/// Hands jobs to the workers. They end when the last clone is dropped.
#[derive(Clone, Debug)]
pub(super) struct Workers {
    light: Sender<Job>,
    heavy: Sender<Job>,
}

/// The jobs of some of the workers.
struct Queue {
    receiver: Receiver<Job>,
    /// Jobs that were received and that no worker has taken.
    waiting: Vec<Job>,
}

impl Workers {
    /// Starts the threads.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub(super) fn start() -> std::io::Result<Self> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let (heavy, jobs) = mpsc::channel();
        start_threads((cores / 8).clamp(1, 4), jobs, Some)?;
        let (light, jobs) = mpsc::channel();
        let to_heavy = heavy.clone();
        // A request may have become heavy while its job waited.
        let forward = move |job: Job| match job.spent() > LIGHT {
            true => to_heavy.send(job).err().map(|unsent| unsent.0),
            false => Some(job),
        };
        start_threads((cores / 4).clamp(1, 8), jobs, forward)?;
        Ok(Self { light, heavy })
    }

    /// Hands over a job.
    pub(super) fn send(&self, job: Job) {
        let queue = if job.spent() > LIGHT { &self.heavy } else { &self.light };
        // The workers run as long as there is a sender.
        let _ = queue.send(job);
    }
}

/// Starts `count` threads that run the jobs for which `keep` returns the job.
fn start_threads(
    count: usize,
    receiver: Receiver<Job>,
    keep: impl Fn(Job) -> Option<Job> + Clone + Send + 'static,
) -> std::io::Result<()> {
    let queue = Arc::new(Mutex::new(Queue { receiver, waiting: Vec::new() }));
    for _ in 0..count {
        let (queue, keep) = (Arc::clone(&queue), keep.clone());
        let work = move || {
            while let Some(job) = next(&queue) {
                keep(job).into_iter().for_each(Job::run);
            }
        };
        thread::Builder::new().name("stolon-grammar".to_owned()).stack_size(STACK).spawn(work)?;
    }
    Ok(())
}

/// Waits for a job. Returns `None` when there will be no further one.
fn next(queue: &Mutex<Queue>) -> Option<Job> {
    let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
    let Queue { receiver, waiting } = &mut *queue;
    if waiting.is_empty() {
        waiting.push(receiver.recv().ok()?);
    }
    waiting.extend(receiver.try_iter());
    let least = (0..waiting.len()).min_by_key(|&index| waiting[index].spent())?;
    Some(waiting.remove(least))
}
