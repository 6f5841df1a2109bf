//! Products of rows with several matrices, and what is done to the sums while they are near.
//!
//! All products of one call read the same rows and are shared out over the threads together, as
//! blocks: some rows times some features. A block's sums go to memory of the task that stays in the second
//! cache; the task then finishes them row by row (a norm, a rotation, a gate function) and hands them to
//! the product's [`Sink`]. So sums are neither written to memory nor read from it before they are what is wanted.
//!
//! **Batch invariance** holds as for [`Matrix::matmul`]: a value depends on its row and its weights alone,
//! and whoever finishes must keep to that.
#![allow(unsafe_code, reason = "tasks write disjoint blocks of one output")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: own block")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::buffer::SharedMut;
use super::kv_rows::KvRows;
use super::lanes::LANES;
use super::matrix::{Cut, Part, Shape};
use super::operand::{COLUMNS_STEP, Operands, Packed, Source};
use super::{Matrix, Path, Threads, elementwise};

/// Rows from which the time of finishing is taken: below, reading the clock costs more than it tells.
const TIMED_ROWS: usize = 64;
/// Rows that are finished before they go to the sink: whole groups of every packing, few enough for
/// the nearest cache.
const FINISHED_ROWS: usize = 48;

/// One product of a call.
pub struct Product<'a> {
    /// What the rows are multiplied with: one matrix, or two of one shape whose sums are finished
    /// together.
    pub matrices: &'a [&'a Matrix],
    /// Features that are finished together (a head's), beginning with the first.
    pub step: usize,
    /// What is done to the sums, if anything.
    pub finish: Option<Finish<'a>>,
    /// Where what the first matrix's sums became goes.
    pub sink: Sink<'a>,
}

impl std::fmt::Debug for Product<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Product").field("matrices", &self.matrices.len()).finish_non_exhaustive()
    }
}

/// Called once with each row of each block.
pub type Finish<'a> = &'a (dyn Fn(Sums<'_>) + Sync);

/// Sums of one row.
#[derive(Debug)]
pub struct Sums<'a> {
    /// The row.
    pub row: usize,
    /// The feature that the first sum is of.
    pub feature: usize,
    /// Sums of the first matrix, to be finished in place.
    pub first: &'a mut [f32],
    /// Of the second, if there is one.
    pub second: &'a mut [f32],
}

/// Where finished sums go.
#[derive(Debug)]
pub enum Sink<'a> {
    /// They are written: `[rows, out_features]`.
    Rows(&'a mut [f32]),
    /// They are added: `[rows, out_features]`.
    Add(&'a mut [f32]),
    /// Into the cache.
    Cache(KvRows<'a>),
    /// Packed, as the rows of the next product. To be [reset](Operands::reset) before.
    Operands(&'a mut Operands),
}

/// Multiplies the packed rows with all matrices; returns the time that the threads spent finishing and
/// writing, each thread's share of it on average (zero for few rows, where it is not taken).
///
/// # Panics
/// If the rows were not packed for these matrices, or a sink is of another size than its product.
pub fn multiply(
    path: Path,
    threads: &Threads,
    x: &Operands,
    products: &mut [Product<'_>],
) -> Duration {
    if x.rows() == 0 {
        return Duration::ZERO;
    }
    let jobs: Vec<Job<'_>> =
        products.iter_mut().map(|product| Job::new(path, threads, x, product)).collect();
    let finishing = AtomicU64::new(0);
    threads.for_each(jobs.iter().map(|job| job.cut.task_count()).sum(), |mut task| {
        for job in &jobs {
            let count = job.cut.task_count();
            if task < count {
                // SAFETY: each task computes its own block, once.
                let nanos = unsafe { job.run(threads, task) };
                finishing.fetch_add(nanos, Ordering::Relaxed);
                return;
            }
            task -= count;
        }
    });
    Duration::from_nanos(finishing.into_inner() / threads.count() as u64)
}

/// A product, ready to be shared out.
struct Job<'a> {
    /// Each matrix with the rows as it reads them.
    matrices: Vec<(&'a Matrix, Packed)>,
    cut: Cut,
    finish: Option<Finish<'a>>,
    target: Target<'a>,
    timed: bool,
}

/// A [`Sink`] that tasks share.
enum Target<'a> {
    Rows { to: SharedMut<f32>, width: usize },
    Add { path: Path, to: SharedMut<f32>, width: usize },
    Cache(&'a KvRows<'a>),
    Operands(Vec<Packed>),
}

impl<'a> Job<'a> {
    fn new(path: Path, threads: &Threads, x: &Operands, product: &'a mut Product<'_>) -> Job<'a> {
        let matrices: Vec<_> =
            product.matrices.iter().map(|&matrix| (matrix, x.of(matrix))).collect();
        let (rows, width) = (x.rows(), product.matrices[0].out_features());
        assert!((1..=2).contains(&matrices.len()), "one or two matrices");
        assert!(matrices.iter().all(|(matrix, _)| matrix.out_features() == width), "one shape");
        let mut packings: Vec<_> = matrices.iter().map(|(_, packed)| packed.packing()).collect();
        let mut step = product.step;
        let target = match &mut product.sink {
            Sink::Rows(to) => {
                assert_eq!(to.len(), rows * width, "the sink must be [{rows}, {width}]");
                Target::Rows { to: SharedMut::new(to), width }
            }
            Sink::Add(to) => {
                assert_eq!(to.len(), rows * width, "the sink must be [{rows}, {width}]");
                Target::Add { path, to: SharedMut::new(to), width }
            }
            Sink::Cache(cache) => {
                assert_eq!((cache.rows(), cache.width()), (rows, width), "the sink's rows");
                Target::Cache(cache)
            }
            Sink::Operands(operands) => {
                assert_eq!((operands.rows(), operands.width()), (rows, width), "the sink's rows");
                let packed: Vec<Packed> = operands.packed().collect();
                packings.extend(packed.iter().map(Packed::packing));
                step = step.max(1).next_multiple_of(COLUMNS_STEP);
                Target::Operands(packed)
            }
        };
        let shape = Shape::of(&packings).with(step, matrices.len());
        let cut = Cut::new(threads, rows, width, &shape);
        let timed = rows >= TIMED_ROWS;
        Job { matrices, cut, finish: product.finish, target, timed }
    }

    /// Computes a block; returns the nanoseconds that finishing took.
    ///
    /// # Safety
    /// No other call has this task.
    unsafe fn run(&self, threads: &Threads, task: usize) -> u64 {
        let part = self.cut.task(task);
        if let (None, [(matrix, packed)], Target::Rows { to, width }) =
            (self.finish, &self.matrices[..], &self.target)
        {
            let to = to.get().wrapping_add(part.first_row * width + part.first_panel * LANES);
            // SAFETY: `new` has checked the sizes, and blocks of tasks are disjoint.
            unsafe { matrix.multiply_part(threads, packed, &part, to, *width) }
            return 0;
        }
        let len = part.rows * part.features;
        let mut sums = threads.scratch::<f32>(self.matrices.len() * len);
        let sums = &mut sums.slice_mut::<f32>()[..self.matrices.len() * len];
        for ((matrix, packed), sums) in self.matrices.iter().zip(sums.chunks_exact_mut(len)) {
            // SAFETY: `new` has checked the sizes; the sums are this task's own.
            unsafe {
                matrix.multiply_part(threads, packed, &part, sums.as_mut_ptr(), part.features);
            }
        }
        let begun = self.timed.then(Instant::now);
        let (first, second) = sums.split_at_mut(len);
        for row in (0..part.rows).step_by(FINISHED_ROWS) {
            let rows = FINISHED_ROWS.min(part.rows - row);
            if let Some(finish) = self.finish {
                for row in row..row + rows {
                    let columns = row * part.features..(row + 1) * part.features;
                    finish(Sums {
                        row: part.first_row + row,
                        feature: part.first_panel * LANES,
                        first: &mut first[columns.clone()],
                        second: second.get_mut(columns).unwrap_or_default(),
                    });
                }
            }
            let block = &first[row * part.features..(row + rows) * part.features];
            // SAFETY: the caller's promise: blocks of tasks are disjoint.
            unsafe { self.target.put(&part, row, rows, block) }
        }
        begun.map_or(0, |begun| u64::try_from(begun.elapsed().as_nanos()).unwrap_or(0))
    }
}

impl Target<'_> {
    /// Takes finished rows of a block, from its row `first` on.
    ///
    /// # Safety
    /// Nobody else writes these rows' features at the same time.
    unsafe fn put(&self, part: &Part, first: usize, rows: usize, block: &[f32]) {
        let (first_row, column) = (part.first_row + first, part.first_panel * LANES);
        let lines = block.chunks_exact(part.features).enumerate();
        match self {
            Target::Rows { to, width } => {
                for (row, line) in lines {
                    let to = to.get().wrapping_add((first_row + row) * width + column);
                    // SAFETY: the row's features are in the output, and this task's alone.
                    unsafe { std::ptr::copy_nonoverlapping(line.as_ptr(), to, line.len()) }
                }
            }
            Target::Add { path, to, width } => {
                for (row, line) in lines {
                    let to = to.get().wrapping_add((first_row + row) * width + column);
                    // SAFETY: as above.
                    let to = unsafe { std::slice::from_raw_parts_mut(to, line.len()) };
                    elementwise::add(*path, to, line);
                }
            }
            Target::Cache(cache) => {
                for (row, line) in lines {
                    // SAFETY: as above: blocks have whole heads.
                    unsafe { cache.write(first_row + row, column, line) }
                }
            }
            Target::Operands(packed) => {
                let columns = part.features;
                let source = Source { x: block, stride: columns, columns, rows };
                for packed in packed {
                    // SAFETY: as above: blocks have whole groups and whole steps of columns.
                    unsafe { packed.pack(first_row, column, source) }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
