//! The engine's own thread pool: scoped parallel loops with low dispatch latency.
//!
//! The life of a call to [`Threads::for_each`]:
//! 1. The caller stores the call's closure and opens the gate in `state`. It wakes workers that
//!    sleep.
//! 2. Workers enter through the gate. They and the caller take task indexes from one shared
//!    counter.
//! 3. When no index is left to take, the caller closes the gate and waits until the workers that
//!    have entered have left.
//!
//! A worker that wakes up too late finds the gate closed, and the caller does not wait for it. Idle
//! workers spin for a short time before they sleep, because one decoding step is a rapid succession
//! of such calls.
//!
//! **Why not rayon.** `benches/thread_pool.rs` runs the products of a decoding step of one token on
//! both pools by turns, with 2 threads on a 2-core AMD EPYC machine. Rayon is entered once per
//! step, so that all calls come from inside its pool. At real-time priority, that is, with both
//! cores for itself, rayon takes as long as this pool for a model of 135 million parameters (3.4
//! ms), but 1.3 to 1.9 times as long for the demo model (48 instead of 25 to 36 µs), where the
//! calls are most of the time. If other processes keep the cores busy, it takes 1.4 times as long
//! for 135 million parameters, and 1.7 times after a pause of 1 ms, because its threads sleep
//! between the calls of a step and must wait for a core. From outside its pool, each call costs 3
//! µs more (40 µs after a pause), because it is handed to a thread of the pool while the caller
//! sleeps. A worker here spins for up to 100 µs and may displace the caller for that time, if all
//! cores are busy.
//!
//! The orderings are checked by the loom models in `loom_tests/tests/threads.rs`.
#![allow(unsafe_code, reason = "shares a borrowed closure with threads that outlive the borrow")]

mod scratch;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::buffer::Plain;
use crate::sync::{
    Arc, AtomicBool, AtomicU64, AtomicUsize, Builder, Condvar, JoinHandle, Mutex, Ordering,
    UnsafeCell, fence, leave_order, lock, open_order, spin_loop, waits_for_workers, yield_now,
};
use crate::topology::{self, Processors};
use scratch::{Scratch, ScratchPool};

/// How long an idle worker spins before it sleeps.
const SPIN_TIME: Duration = Duration::from_micros(100);
/// How often an idle worker looks at the gate before it looks at the time. Models look once,
/// because each look doubles the number of interleavings.
const POLLS_PER_CLOCK_READ: usize = if cfg!(loom) { 1 } else { 64 };

/// The bit of `state` that says that the gate is open. The bits below it count the workers inside,
/// the bits above it the calls, so that a worker enters each call at most once.
const GATE_OPEN: u64 = 1 << 16;
const WORKERS_INSIDE: u64 = GATE_OPEN - 1;
const CALL_NUMBER_UNIT: u64 = GATE_OPEN << 1;

/// One parallel loop, as the workers see it.
#[derive(Clone, Copy)]
struct ParallelCall {
    /// The caller's closure. Its lifetime is erased. It is used only by the caller and by workers
    /// inside the gate, and `for_each` ends the borrow only after all of them are done.
    task: *const (dyn Fn(usize) + Sync),
    /// The indexes to call it with are `0..task_count`.
    task_count: usize,
}

/// The data that the caller and the workers share.
struct Shared {
    /// The gate: the call's number, whether it is open, and how many workers are inside.
    state: AtomicU64,
    /// The current or last call.
    call: UnsafeCell<Option<ParallelCall>>,
    /// The next task index to take.
    next: AtomicUsize,
    /// True while a caller uses the workers. Other callers meanwhile run their tasks themselves.
    busy: AtomicBool,
    /// True once the pool is dropped.
    stop: AtomicBool,
    /// Number of workers that are asleep or about to sleep.
    sleepers: AtomicUsize,
    /// Held by a worker from its last look at the gate until it sleeps, so that a caller which
    /// locks it before waking cannot wake between the two.
    sleep: Mutex<()>,
    wake: Condvar,
    /// The payload of the first task of the current call that panicked.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// Memory of the tasks.
    scratch: ScratchPool,
}

// SAFETY: `call` is the only field that is not Sync. It is written only by the caller that holds
// `busy`, while the gate is closed and no worker is inside. It is read only by workers inside the
// gate, so no read coincides with a write; the orderings of `state` make the write visible to them.
unsafe impl Sync for Shared {}
// SAFETY: `call` is the only field that is not Send, because of its pointer. The pointer is
// dereferenced only while the `for_each` that stored it has not returned, and what it points to is
// `Sync`.
unsafe impl Send for Shared {}

/// A pool of threads for parallel loops, with recycled scratch memory for their tasks.
///
/// The calling thread takes part in each loop, so `Threads::new(1)` starts no thread. There is no
/// global pool: two engines in one process have separate threads. Dropping the pool joins its
/// threads.
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Threads").field("count", &self.count()).finish_non_exhaustive()
    }
}

impl Threads {
    /// Starts a pool in which `count` threads work, including the caller's; 0 is treated as 1, and
    /// at most 65,536 are used. If the operating system refuses to start a thread, the pool is
    /// smaller; see [`Threads::count`].
    #[must_use]
    pub fn new(count: usize) -> Threads {
        Threads::start(count, None)
    }

    /// As [`Threads::new`], and binds each thread to one processor. The calling thread, and threads
    /// that it starts later, may use all of these processors. The processors that
    /// [`Threads::default_count`] counts are used first. `None` if the process may not use as many
    /// processors, or the system does not bind threads.
    #[must_use]
    pub fn bound(count: usize) -> Option<Threads> {
        let processors = Processors::of_process();
        let numbers = processors.for_threads(count.max(1))?;
        topology::bind(numbers).then(|| Threads::start(count, Some(numbers)))
    }

    /// Starts the threads, each on one of the processors, if these are given.
    fn start(count: usize, processors: Option<&[usize]>) -> Threads {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            call: UnsafeCell::new(None),
            next: AtomicUsize::new(0),
            busy: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            panic: Mutex::new(None),
            scratch: ScratchPool::default(),
        });
        // The gate can count this many workers, plus the thread of the caller.
        let count = count.min(WORKERS_INSIDE as usize + 1);
        let workers = (1..count)
            .map_while(|index| {
                let shared = Arc::clone(&shared);
                let processor = processors.map(|numbers| numbers[index]);
                let run = move || {
                    // If this fails, the thread runs where the caller may run.
                    processor.map(|number| topology::bind(&[number]));
                    work(&shared);
                };
                Builder::new().name(format!("stolon-compute-{index}")).spawn(run).ok()
            })
            .collect();
        Threads { shared, workers }
    }

    /// Number of threads that compute as fast as this process can: one for each performance core
    /// of one socket that it may use by its affinity mask, within its cgroup's CPU quota; at least
    /// 1. Elsewhere than on Linux all processors count.
    #[must_use]
    pub fn default_count() -> usize {
        Processors::of_process().default_count()
    }

    /// Number of threads that work on a call, including the caller's; at least 1.
    #[must_use]
    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task` once with each index in `0..task_count`, in any order, on all threads of the
    /// pool, and returns when all calls have ended. Everything that the tasks wrote is then visible
    /// to the caller.
    ///
    /// A call from inside a task, or while another thread's call runs, executes its tasks one after
    /// the other on the calling thread.
    ///
    /// # Panics
    /// If a task panics: with the payload of the first such task, after all threads have left the
    /// call. Tasks that have not begun by then are skipped.
    pub fn for_each(&self, task_count: usize, task: impl Fn(usize) + Sync) {
        let shared = &*self.shared;
        // Acquire pairs with the Release store to `busy` at the end of an earlier call: the changes
        // of the shared fields by that call happened before.
        if task_count <= 1 || self.workers.is_empty() || shared.busy.swap(true, Ordering::Acquire) {
            (0..task_count).for_each(task);
            return;
        }
        let erased: &(dyn Fn(usize) + Sync) = &task;
        // SAFETY: this changes only the lifetime in the type. The pointer is dereferenced only by
        // this thread and by workers inside the gate. This function neither returns nor unwinds
        // before the gate is closed and all workers have left: `run_tasks` catches the panics of
        // tasks, and nothing else up to there can panic.
        let erased: *const (dyn Fn(usize) + Sync) = unsafe {
            std::mem::transmute::<
                *const (dyn Fn(usize) + Sync + '_),
                *const (dyn Fn(usize) + Sync + 'static),
            >(std::ptr::from_ref(erased))
        };
        let call = ParallelCall { task: erased, task_count };
        // SAFETY: this thread holds `busy`, so no other caller accesses `call`. The gate is closed
        // and no worker is inside, and the Acquire load with which the last call saw that (followed
        // by Release and Acquire of `busy`) orders the workers' reads before this write.
        shared.call.with_mut(|slot| unsafe { *slot = Some(call) });
        // Relaxed: the store that opens the gate publishes it.
        shared.next.store(0, Ordering::Relaxed);
        // Relaxed: only a caller that holds `busy` changes more than the count of workers, which is
        // 0.
        let closed = shared.state.load(Ordering::Relaxed);
        debug_assert_eq!(
            closed & (GATE_OPEN | WORKERS_INSIDE),
            0,
            "the gate is closed between calls"
        );
        let opened = (closed & !(CALL_NUMBER_UNIT - 1)).wrapping_add(CALL_NUMBER_UNIT) | GATE_OPEN;
        // Release pairs with the Acquire of a worker's compare-exchange on entry: it sees `call`
        // and `next`.
        shared.state.store(opened, open_order());
        // Pairs with the SeqCst fence of a worker that is about to sleep: either this thread sees
        // the worker among the sleepers, or the worker sees the open gate. (If both could miss each
        // other, the call would still be complete, but the worker would sleep through it.)
        fence(Ordering::SeqCst);
        // Relaxed: the fence above orders it.
        if shared.sleepers.load(Ordering::Relaxed) > 0 {
            drop(lock(&shared.sleep));
            shared.wake.notify_all();
        }
        run_tasks(shared, call);
        // Relaxed: closing the gate publishes nothing. As a read-modify-write it keeps the Release
        // sequence of the workers that left before.
        shared.state.fetch_and(!GATE_OPEN, Ordering::Relaxed);
        let mut spins = 0_u32;
        // Acquire pairs with the Release of each worker's leaving: this thread sees all that the
        // workers wrote, and their reads of `call` happened before.
        while waits_for_workers() && shared.state.load(Ordering::Acquire) & WORKERS_INSIDE != 0 {
            spins += 1;
            if spins.is_multiple_of(1 << 12) {
                yield_now();
            }
            spin_loop();
        }
        let panic = lock(&shared.panic).take();
        // Release pairs with the Acquire of the next caller's swap.
        shared.busy.store(false, Ordering::Release);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Scratch memory for at least `count` values of type `T`. It has the contents that its last
    /// user left. It returns to the pool when it is dropped.
    pub(super) fn scratch<T: Plain>(&self, count: usize) -> Scratch<'_> {
        self.shared.scratch.take(count * size_of::<T>())
    }

    /// Takes scratch memory of at least `bytes` bytes and returns it at once, for the loom models.
    /// Returns its size.
    #[cfg(loom)]
    pub fn use_scratch(&self, bytes: usize) -> usize {
        self.scratch::<u8>(bytes).slice_mut::<u8>().len()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        // Relaxed: it is enough that a worker that spins sees the value at some time. For a worker
        // that is about to sleep the lock orders it: either the worker has not locked yet and will
        // see the value, or it already waits and gets the notification.
        self.shared.stop.store(true, Ordering::Relaxed);
        drop(lock(&self.shared.sleep));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tasks, so there is nothing to learn from its
            // result.
            let _ = worker.join();
        }
    }
}

/// Takes task indexes of a call and runs the tasks until no index is left.
fn run_tasks(shared: &Shared, call: ParallelCall) {
    // SAFETY: this runs on the thread of the caller before it closes the gate, or on a worker
    // inside the gate. The caller's `for_each` keeps the closure borrowed until the gate is closed
    // and all workers have left.
    let task = unsafe { &*call.task };
    loop {
        // Relaxed: a read-modify-write gives each index to one thread only, with any ordering.
        let index = shared.next.fetch_add(1, Ordering::Relaxed);
        if index >= call.task_count {
            return;
        }
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(index))) {
            // Relaxed: this only makes the other threads stop earlier.
            shared.next.store(call.task_count, Ordering::Relaxed);
            lock(&shared.panic).get_or_insert(payload);
            return;
        }
    }
}

/// The life of a worker: it enters each call once and sleeps in between.
fn work(shared: &Shared) {
    let mut last_call = 0;
    while let Some(number) = wait_for_call(shared, last_call) {
        last_call = number;
        // Relaxed: the compare-exchange below checks the value again.
        let state = shared.state.load(Ordering::Relaxed);
        if state & GATE_OPEN == 0 || state / CALL_NUMBER_UNIT != number {
            continue;
        }
        // Acquire pairs with the Release store that opened the gate. Entries and departures of
        // other workers since then are read-modify-writes and continue its release sequence.
        let entry =
            shared.state.compare_exchange(state, state + 1, Ordering::Acquire, Ordering::Relaxed);
        if entry.is_err() {
            // Another worker entered or left, or the gate was closed. Look at the same call again.
            last_call = number.wrapping_sub(1);
            continue;
        }
        // SAFETY: this worker is inside the gate, so the caller is still in `for_each` and does not
        // write `call` before it has seen this worker leave; its write before opening the gate
        // happened before the entry.
        let call = shared.call.with(|slot| unsafe { *slot });
        if let Some(call) = call {
            run_tasks(shared, call);
        }
        // Release pairs with the Acquire load of the caller that waits for workers to leave.
        shared.state.fetch_sub(1, leave_order());
    }
}

/// Waits for an open call with another number than `last_call` and returns its number; `None` when
/// the pool is dropped.
fn wait_for_call(shared: &Shared, last_call: u64) -> Option<u64> {
    // Relaxed: a worker that enters synchronizes by its compare-exchange.
    let open_call = || {
        let state = shared.state.load(Ordering::Relaxed);
        let number = state / CALL_NUMBER_UNIT;
        (state & GATE_OPEN != 0 && number != last_call).then_some(number)
    };
    let mut spin_end = None;
    loop {
        for _ in 0..POLLS_PER_CLOCK_READ {
            if let Some(number) = open_call() {
                return Some(number);
            }
            // In models this would let other threads run until they wait for this one, so that it
            // would never sleep before a call.
            if !cfg!(loom) {
                spin_loop();
            }
        }
        // Relaxed: see the store in `drop`.
        if shared.stop.load(Ordering::Relaxed) {
            return None;
        }
        // Models do not spin: they have no clock.
        if !cfg!(loom) {
            let now = Instant::now();
            if now < *spin_end.get_or_insert(now + SPIN_TIME) {
                continue;
            }
        }
        let mut guard = lock(&shared.sleep);
        // Relaxed: the fence below orders it before the look at the gate.
        shared.sleepers.fetch_add(1, Ordering::Relaxed);
        // Pairs with the SeqCst fence of a caller that has opened the gate.
        fence(Ordering::SeqCst);
        // Relaxed: `stop` is stored before the dropping thread locks `sleep`.
        while open_call().is_none() && !shared.stop.load(Ordering::Relaxed) {
            guard = shared.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        // Relaxed: a caller that still counts this worker only wakes it unnecessarily.
        shared.sleepers.fetch_sub(1, Ordering::Relaxed);
        drop(guard);
        spin_end = None;
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
