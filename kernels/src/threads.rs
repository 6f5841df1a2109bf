//! The engine's own pool of threads: scoped parallel loops with little delay.
//!
//! Life of a call to [`Threads::for_each`]:
//! 1. The caller writes the job and opens the gate (`state`), waking workers that sleep.
//! 2. Workers enter through the gate; they and the caller take tasks from one counter.
//! 3. The caller, once no task is left to take, shuts the gate and waits for those inside.
//!
//! A worker that wakes too late finds the gate shut and is not waited for. Idle workers spin for a
//! short while, since a step is a close run of such calls, and then sleep.
#![allow(unsafe_code, reason = "shares a borrowed closure with threads that outlive the borrow")]

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::buffer::{Buffer, Plain};

/// How long an idle worker spins before it sleeps.
const SPIN: Duration = Duration::from_micros(100);
/// Most scratch buffers kept for the next call.
const SCRATCH_COUNT_MAX: usize = 64;

/// Gate bit of `state`: workers may enter. Below it the count of workers inside, above it the
/// number of the job, so that a worker enters a job once.
const OPEN: u64 = 1 << 16;
const INSIDE: u64 = OPEN - 1;
const JOB: u64 = OPEN << 1;

/// One parallel loop, as the workers see it.
#[derive(Clone, Copy)]
struct Job {
    /// The caller's closure. Its lifetime is erased; the gate keeps it from being used too late.
    task: *const (dyn Fn(usize) + Sync),
    task_count: usize,
}

struct Shared {
    state: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    /// The next task to take.
    next: AtomicUsize,
    /// Held by the one caller whose job runs; others run theirs inline.
    busy: AtomicBool,
    stop: AtomicBool,
    /// Workers asleep or about to sleep.
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
    /// The first panic of a task in the job that runs.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    scratch: Mutex<Vec<Buffer>>,
}

// SAFETY: `job` is the only part that is not Sync. It is written by the caller that holds `busy`
// while the gate is shut and nobody is inside, and read by workers inside the gate only.
unsafe impl Sync for Shared {}
// SAFETY: the job's pointer is used only while the caller of `for_each` waits.
unsafe impl Send for Shared {}

/// A pool of threads. The thread that calls takes part, so `Threads::new(1)` starts none.
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Threads").field("count", &self.count()).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds one of these locks can leave its data half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Threads {
    /// A pool in which `count` threads work, the caller's included; 0 counts as 1. If the system
    /// refuses threads the pool is smaller: see [`Threads::count`].
    #[must_use]
    pub fn new(count: usize) -> Threads {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            next: AtomicUsize::new(0),
            busy: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            panic: Mutex::new(None),
            scratch: Mutex::new(Vec::new()),
        });
        let workers = (1..count)
            .map_while(|index| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("stolon-compute-{index}"))
                    .spawn(move || work(&shared))
                    .ok()
            })
            .collect();
        Threads { shared, workers }
    }

    /// How many processors this process may run on (its affinity mask and its cgroup's quota).
    #[must_use]
    pub fn default_count() -> usize {
        std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
    }

    /// Threads that work on a call, the caller's included; at least 1.
    #[must_use]
    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task` with each of `0..task_count`, in any order, on all threads of the pool; returns
    /// when all have ended. A call from within a task, or while another thread's call runs, does
    /// its tasks one after the other on the calling thread.
    ///
    /// # Panics
    /// If a task panics: with that task's payload, after all threads have left the call. Tasks not
    /// yet begun by then are skipped.
    pub fn for_each(&self, task_count: usize, task: impl Fn(usize) + Sync) {
        let shared = &*self.shared;
        if task_count <= 1 || self.workers.is_empty() || shared.busy.swap(true, Ordering::Acquire) {
            (0..task_count).for_each(task);
            return;
        }
        let erased: &(dyn Fn(usize) + Sync) = &task;
        // SAFETY: this only erases the lifetime. Workers use the pointer inside the gate only, and
        // this function does not return or unwind before the gate is shut and they have all left.
        let erased: *const (dyn Fn(usize) + Sync) = unsafe {
            std::mem::transmute::<
                *const (dyn Fn(usize) + Sync + '_),
                *const (dyn Fn(usize) + Sync + 'static),
            >(std::ptr::from_ref(erased))
        };
        let job = Job { task: erased, task_count };
        // SAFETY: we hold `busy` and the gate is shut with nobody inside: no one else looks.
        unsafe { *shared.job.get() = Some(job) };
        shared.next.store(0, Ordering::Relaxed);
        let closed = shared.state.load(Ordering::Relaxed);
        debug_assert_eq!(closed & (OPEN | INSIDE), 0, "the gate is shut between jobs");
        let opened = (closed & !(JOB - 1)).wrapping_add(JOB) | OPEN;
        // Release pairs with the Acquire of a worker's entry: it sees the job and the counter.
        shared.state.store(opened, Ordering::Release);
        // Pairs with the fence of a worker about to sleep: one of the two sees the other.
        fence(Ordering::SeqCst);
        if shared.sleepers.load(Ordering::Relaxed) > 0 {
            drop(lock(&shared.lock));
            shared.wake.notify_all();
        }
        run_tasks(shared, job);
        shared.state.fetch_and(!OPEN, Ordering::Relaxed);
        let mut spins = 0_u32;
        // Acquire pairs with the Release of a worker's leaving: we see all it wrote.
        while shared.state.load(Ordering::Acquire) & INSIDE != 0 {
            spins += 1;
            if spins.is_multiple_of(1 << 12) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        let panic = lock(&shared.panic).take();
        // Release pairs with the Acquire of the next caller's swap.
        shared.busy.store(false, Ordering::Release);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Scratch memory of at least `count` `T`s, with whatever the last user left in it. It goes
    /// back to the pool when dropped.
    pub(super) fn scratch<T: Plain>(&self, count: usize) -> Scratch<'_> {
        let bytes = count * size_of::<T>();
        let mut kept = lock(&self.shared.scratch);
        // The smallest that fits, so that small requests do not take the large buffers.
        let fitting = (0..kept.len())
            .filter(|&index| kept[index].byte_len() >= bytes)
            .min_by_key(|&index| kept[index].byte_len());
        let buffer = match fitting {
            Some(index) => kept.swap_remove(index),
            None => {
                // Room for a new one: the smallest kept one has just shown to be too small.
                if kept.len() >= SCRATCH_COUNT_MAX / 2
                    && let Some(index) = (0..kept.len()).min_by_key(|&index| kept[index].byte_len())
                {
                    kept.swap_remove(index);
                }
                drop(kept);
                Buffer::zeroed::<u8>(bytes.next_multiple_of(4096))
            }
        };
        Scratch { buffer: Some(buffer), pool: &self.shared.scratch }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(lock(&self.shared.lock));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches its tasks' panics, so there is nothing to learn from its result.
            let _ = worker.join();
        }
    }
}

/// Scratch memory lent by the pool.
pub(super) struct Scratch<'a> {
    buffer: Option<Buffer>,
    pool: &'a Mutex<Vec<Buffer>>,
}

impl Scratch<'_> {
    pub(super) fn slice_mut<T: Plain>(&mut self) -> &mut [T] {
        self.buffer.as_mut().map_or(&mut [], Buffer::slice_mut)
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        let mut kept = lock(self.pool);
        if kept.len() < SCRATCH_COUNT_MAX {
            kept.extend(self.buffer.take());
        }
    }
}

/// Takes tasks until none is left.
fn run_tasks(shared: &Shared, job: Job) {
    // SAFETY: we are the caller, or inside the gate: the closure is borrowed until all have left.
    let task = unsafe { &*job.task };
    loop {
        let index = shared.next.fetch_add(1, Ordering::Relaxed);
        if index >= job.task_count {
            return;
        }
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(index))) {
            shared.next.store(job.task_count, Ordering::Relaxed);
            lock(&shared.panic).get_or_insert(payload);
            return;
        }
    }
}

/// A worker's life: enter each job once, sleep between.
fn work(shared: &Shared) {
    let mut last_job = 0;
    while let Some(job_number) = wait_for_job(shared, last_job) {
        last_job = job_number;
        let state = shared.state.load(Ordering::Relaxed);
        if state & OPEN == 0 || state / JOB != job_number {
            continue;
        }
        // Acquire pairs with the Release that opened the gate.
        let entry =
            shared.state.compare_exchange(state, state + 1, Ordering::Acquire, Ordering::Relaxed);
        if entry.is_err() {
            // Another worker came or left, or the gate was shut: look again at the same job.
            last_job = job_number.wrapping_sub(1);
            continue;
        }
        // SAFETY: inside the gate nobody writes the job.
        let job = unsafe { *shared.job.get() };
        if let Some(job) = job {
            run_tasks(shared, job);
        }
        // Release pairs with the caller's Acquire while it waits for us.
        shared.state.fetch_sub(1, Ordering::Release);
    }
}

/// The number of an open job other than `last_job`; `None` when the pool ends.
fn wait_for_job(shared: &Shared, last_job: u64) -> Option<u64> {
    let open_job = || {
        let state = shared.state.load(Ordering::Relaxed);
        (state & OPEN != 0 && state / JOB != last_job).then_some(state / JOB)
    };
    let mut spin_end = None;
    loop {
        for _ in 0..64 {
            if let Some(job) = open_job() {
                return Some(job);
            }
            std::hint::spin_loop();
        }
        if shared.stop.load(Ordering::Relaxed) {
            return None;
        }
        let now = Instant::now();
        if now < *spin_end.get_or_insert(now + SPIN) {
            continue;
        }
        let mut guard = lock(&shared.lock);
        shared.sleepers.fetch_add(1, Ordering::Relaxed);
        // Pairs with the fence of a caller that has opened the gate.
        fence(Ordering::SeqCst);
        while open_job().is_none() && !shared.stop.load(Ordering::SeqCst) {
            guard = shared.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        shared.sleepers.fetch_sub(1, Ordering::Relaxed);
        drop(guard);
        spin_end = None;
    }
}

#[cfg(test)]
mod tests;
