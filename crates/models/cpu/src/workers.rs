//! [`Workers`] runs large work on all threads of the pool, and small work on the calling thread.
//!
//! Waking another thread takes some microseconds, which is longer than a GEMM of a small model. The
//! choice does not influence results: kernels return the same bits on any number of threads.

use std::sync::{Arc, Mutex, PoisonError};

use stolon_kernels::{Matrix, Threads};

/// Minimum number of multiply-adds of a GEMM that runs on all threads.
const PRODUCT_MIN: usize = 1 << 17;
/// Minimum number of elements of a pass over rows that runs on all threads.
const PASS_MIN: usize = 1 << 15;

/// Niceness of the threads that load a model while others compute. They then get about a quarter of the
/// processors if the others keep these busy. With 10, a tenth, steps are hardly faster, and requests
/// wait four times as long for the load.
#[cfg(target_os = "linux")]
const LOAD_NICENESS: i32 = 5;

/// Does work on a thread with a low priority, which the threads that it starts inherit, and waits for
/// the result. Where the system knows only the priority of whole processes, the priority is the usual
/// one.
///
/// # Panics
/// If the work panics, or if the system refuses to start a thread.
pub fn at_low_priority<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let result = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // If it is refused, only speed is lost.
            #[cfg(target_os = "linux")]
            let _ = rustix::process::setpriority_process(None, LOAD_NICENESS);
            work()
        });
        thread.join()
    });
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The thread pool of a backend.
#[derive(Debug)]
pub(crate) struct Workers {
    pool: Threads,
    /// A pool of the calling thread only, for small work.
    alone: Threads,
}

impl Workers {
    /// Creates a pool of `count` threads, including the calling thread.
    pub(crate) fn new(count: usize) -> Self {
        Self { pool: Threads::new(count), alone: Threads::new(1) }
    }

    /// The same with threads that are [bound](Threads::bound) to processors, if that is possible.
    pub(crate) fn bound(count: usize) -> Option<Self> {
        Some(Self { pool: Threads::bound(count)?, alone: Threads::new(1) })
    }

    /// Loads something with as many threads: these, or with `yields` others of a low priority. An
    /// unprivileged thread cannot take its usual priority back, so these end when it is loaded.
    pub(crate) fn load<T: Send>(
        self: &Arc<Self>,
        yields: bool,
        load: impl FnOnce(Arc<Self>) -> T + Send,
    ) -> T {
        match yields {
            false => load(Arc::clone(self)),
            true => at_low_priority(|| load(Arc::new(Self::new(self.count())))),
        }
    }

    /// Number of threads, including the calling thread.
    pub(crate) fn count(&self) -> usize {
        self.pool.count()
    }

    /// All threads.
    pub(crate) fn pool(&self) -> &Threads {
        &self.pool
    }

    /// The threads for GEMMs of `rows` rows with these matrices.
    pub(crate) fn for_products(&self, matrices: &[&Matrix], rows: usize) -> &Threads {
        let weights = matrices.iter().map(|matrix| matrix.out_features() * matrix.in_features());
        self.for_work(rows * weights.sum::<usize>())
    }

    /// The threads for a pass over `rows` rows of `width` elements.
    pub(crate) fn for_pass(&self, rows: usize, width: usize) -> &Threads {
        if rows * width < PASS_MIN { &self.alone } else { &self.pool }
    }

    /// The threads for work of about `multiply_adds` multiply-adds.
    pub(crate) fn for_work(&self, multiply_adds: usize) -> &Threads {
        if multiply_adds < PRODUCT_MIN { &self.alone } else { &self.pool }
    }

    /// Number of rows per part of a pass over `rows` rows of `width` elements; at least 1. If the
    /// pass is too small for several threads, one part has all rows.
    pub(crate) fn chunk_rows(&self, rows: usize, width: usize) -> usize {
        let parts = (rows * width / PASS_MIN * 2).clamp(1, 2 * self.count());
        if self.count() == 1 { rows.max(1) } else { rows.div_ceil(parts).max(1) }
    }

    /// Calls `pass` with each part. It uses all threads if the work of about `multiply_adds`
    /// multiply-adds is large enough.
    pub(crate) fn run_work<P: Send>(
        &self,
        parts: impl ExactSizeIterator<Item = P>,
        multiply_adds: usize,
        pass: impl Fn(P) + Sync,
    ) {
        match multiply_adds < PRODUCT_MIN || self.count() == 1 {
            true => parts.for_each(pass),
            false => self.run(parts, pass),
        }
    }

    /// Calls `pass` with each part, on all threads if there are several parts.
    pub(crate) fn run<P: Send>(
        &self,
        mut parts: impl ExactSizeIterator<Item = P>,
        pass: impl Fn(P) + Sync,
    ) {
        if parts.len() <= 1 {
            if let Some(part) = parts.next() {
                pass(part);
            }
            return;
        }
        let parts: Vec<_> = parts.map(|part| Mutex::new(Some(part))).collect();
        self.pool.for_each(parts.len(), |index| {
            let part = parts[index].lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(part) = part {
                pass(part);
            }
        });
    }
}
