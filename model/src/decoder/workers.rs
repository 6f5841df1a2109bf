//! Which work is worth a fork: the engine's pool for large work, the calling thread for small.
//!
//! Waking another thread costs some microseconds, more than a small model's whole product. No
//! result depends on the choice: kernels give the same bits on any number of threads.

use std::sync::{Mutex, PoisonError};

use stolon_kernels::{Matrix, Threads};

/// Multiply-adds from which a product is shared out.
const PRODUCT_MIN: usize = 1 << 17;
/// Elements from which a pass over rows is shared out.
const PASS_MIN: usize = 1 << 15;

/// The engine's threads, and none.
#[derive(Debug)]
pub(crate) struct Workers {
    pool: Threads,
    alone: Threads,
}

impl Workers {
    /// Workers on `count` threads, the caller's included.
    pub(crate) fn new(count: usize) -> Self {
        Self { pool: Threads::new(count), alone: Threads::new(1) }
    }

    /// Threads that work together, the caller's included.
    pub(crate) fn count(&self) -> usize {
        self.pool.count()
    }

    /// All threads.
    pub(super) fn pool(&self) -> &Threads {
        &self.pool
    }

    /// The threads for products of `rows` rows with these matrices.
    pub(super) fn for_products(&self, matrices: &[&Matrix], rows: usize) -> &Threads {
        let weights = matrices.iter().map(|matrix| matrix.out_features() * matrix.in_features());
        self.for_work(rows * weights.sum::<usize>())
    }

    /// The threads for a pass over rows.
    pub(super) fn for_pass(&self, rows: usize, width: usize) -> &Threads {
        if rows * width < PASS_MIN { &self.alone } else { &self.pool }
    }

    /// The threads for about so many multiply-adds.
    pub(super) fn for_work(&self, multiply_adds: usize) -> &Threads {
        if multiply_adds < PRODUCT_MIN { &self.alone } else { &self.pool }
    }

    /// Rows a part of a pass should have: all where sharing is not worth it, at least 1.
    pub(super) fn chunk_rows(&self, rows: usize, width: usize) -> usize {
        let parts = (rows * width / PASS_MIN * 2).clamp(1, 2 * self.count());
        if self.count() == 1 { rows.max(1) } else { rows.div_ceil(parts).max(1) }
    }

    /// Calls `pass` with each part, on all threads where there are several.
    pub(super) fn run<P: Send>(
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
