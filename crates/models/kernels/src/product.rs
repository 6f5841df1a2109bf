//! Products of rows with several matrices, with fused epilogues.
//!
//! The tasks of all products of one call are distributed over the threads together. Each product
//! reads one group of rows of the same [`Operands`]. A task computes a block of some rows times
//! some features in scratch memory that stays in the L2 cache. It then runs the [`Epilogue`] of the
//! product (a norm, a rotary embedding, a gate) on each row and passes the rows to the [`Sink`]. So
//! intermediate results are never written to main memory.
//!
//! **Invariant: batch invariance.** As for [`Matrix::matmul`], a result depends only on its row and
//! its weights. An epilogue must preserve that: it may only depend on the row that it is given.
#![allow(unsafe_code, reason = "tasks write disjoint blocks of one output")]

mod accumulate;
mod columns;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::buffer::SharedMut;
use crate::elementwise;
use crate::kv_rows::KvRows;
use crate::lanes::LANES;
use crate::matrix::{GemmTask, Matrix, Partition, TaskShape};
use crate::operand::{Operands, OperandsMut, TaskRanges};
use crate::packing::{COLUMNS_STEP, Packed};
use crate::path::Path;
use crate::source_rows::SourceRows;
use crate::threads::Threads;
pub use accumulate::{Term, accumulate};
pub use columns::ColumnsMut;

/// Number of rows from which the time of epilogues is measured. Reading the clock is too expensive
/// for fewer rows.
const TIMED_ROWS: usize = 64;
/// Number of rows that pass through the epilogue before they go to the sink: whole groups of every
/// packing, and few enough for the L1 cache.
const EPILOGUE_ROWS: usize = 48;

/// Number of tasks per thread that all products of a call together are divided into if there are
/// many of them, so that experts with few rows become few tasks.
const TASKS_PER_THREAD: usize = 32;

/// One product of a call.
pub struct Product<'a> {
    /// Index of the group of rows that is multiplied; 0 if there is one group.
    pub group: usize,
    /// One matrix, or two matrices of the same shape whose results the epilogue combines (gate and
    /// up).
    pub matrices: &'a [&'a Matrix],
    /// Number of features, at least 1, that the epilogue needs together: the dimension of a head,
    /// for example. The features of an epilogue call begin at a multiple of `step`.
    pub step: usize,
    /// Function that is applied to the results of each row.
    pub epilogue: Option<Epilogue<'a>>,
    /// Where the results of the first matrix go after the epilogue.
    pub sink: Sink<'a>,
}

impl std::fmt::Debug for Product<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Product").field("matrices", &self.matrices.len()).finish_non_exhaustive()
    }
}

/// An operation that is applied to the results of a product before they are written.
pub type Epilogue<'a> = &'a dyn Finish;

/// The trait of an [`Epilogue`]. Functions that take [`RowSums`] implement it.
pub trait Finish: Sync {
    /// Is called once for each row of each block, on any thread.
    fn finish(&self, sums: RowSums<'_>);

    /// Is called before the results of the block with these rows and features are computed, so that
    /// the data that [`Self::finish`] reads can be prefetched meanwhile.
    fn prepare(&self, rows: Range<usize>, features: Range<usize>) {
        let _ = (rows, features);
    }
}

impl<F: Fn(RowSums<'_>) + Sync> Finish for F {
    fn finish(&self, sums: RowSums<'_>) {
        self(sums);
    }
}

/// Results of a product for one row and some successive output features.
#[derive(Debug)]
pub struct RowSums<'a> {
    /// Index of the row in its group.
    pub row: usize,
    /// Index of the first output feature. A multiple of [`Product::step`].
    pub feature: usize,
    /// Results of the first matrix. The epilogue changes them in place.
    pub first: &'a mut [f32],
    /// Results of the second matrix, or empty if there is only one.
    pub second: &'a mut [f32],
}

/// Where the results of a product are written.
#[derive(Debug)]
pub enum Sink<'a> {
    /// Overwrites the values of a buffer of shape `[rows, out_features]`.
    Rows(&'a mut [f32]),
    /// Overwrites columns of a buffer. Other products may write its other columns.
    Columns(ColumnsMut<'a>),
    /// Adds the results to the values of a buffer of shape `[rows, out_features]`.
    Add(&'a mut [f32]),
    /// Stores the results in the KV cache.
    Cache(KvRows<'a>),
    /// Packs the results as a group of rows of the next product. The operands must have been
    /// [reset](Operands::reset) for the rows and the readers.
    Operands(OperandsMut<'a>),
}

/// Multiplies groups of the packed rows `x` with the matrices of all products.
///
/// Returns the time that the threads spent in epilogues and sinks, averaged over the threads. It is
/// zero for fewer than 64 rows, for which it is not measured.
///
/// # Panics
/// If `x` was not [reset](Operands::reset) for these matrices, a product does not have one or two
/// matrices of the same shape, or a sink does not have the shape of its product.
pub fn multiply(
    path: Path,
    threads: &Threads,
    x: &Operands,
    products: &mut [Product<'_>],
) -> Duration {
    let tasks_wanted = threads.count() * TASKS_PER_THREAD / products.len().max(1);
    let filled = products.iter_mut().filter(|product| x.group_rows(product.group) > 0);
    let jobs: Vec<Job<'_>> =
        filled.map(|product| Job::new(path, threads, x, product, tasks_wanted)).collect();
    let tasks = TaskRanges::of(jobs.iter().map(|job| job.partition.task_count()));
    let epilogue_nanos = AtomicU64::new(0);
    threads.for_each(tasks.count(), |task| {
        let (job, task) = tasks.locate(task);
        // SAFETY: `for_each` calls each index once, so each task of a job runs once.
        let nanos = unsafe { jobs[job].run(threads, task) };
        // `for_each` returns after all tasks, which orders this addition before the read below.
        epilogue_nanos.fetch_add(nanos, Ordering::Relaxed);
    });
    Duration::from_nanos(epilogue_nanos.into_inner() / threads.count() as u64)
}

/// A product whose tasks can run on the threads.
struct Job<'a> {
    /// Each matrix with the packed rows that it reads.
    matrices: Vec<(&'a Matrix, Packed)>,
    partition: Partition,
    epilogue: Option<Epilogue<'a>>,
    target: Target<'a>,
    /// Whether the time of epilogues is measured.
    timed: bool,
}

/// A [`Sink`] whose disjoint blocks tasks write in parallel. `width` is the number of output
/// features, and `stride` the distance between rows.
enum Target<'a> {
    Rows { to: SharedMut<f32>, stride: usize },
    Add { path: Path, to: SharedMut<f32>, width: usize },
    Cache(&'a KvRows<'a>),
    Operands(&'a [Packed]),
}

impl<'a> Job<'a> {
    fn new(
        path: Path,
        threads: &Threads,
        x: &Operands,
        product: &'a mut Product<'_>,
        tasks_wanted: usize,
    ) -> Job<'a> {
        let group = product.group;
        let matrices: Vec<_> =
            product.matrices.iter().map(|&matrix| (matrix, x.of(group, matrix))).collect();
        let (rows, width) = (x.group_rows(group), product.matrices[0].out_features());
        assert!((1..=2).contains(&matrices.len()), "a product has one or two matrices");
        assert!(
            matrices.iter().all(|(matrix, _)| matrix.out_features() == width),
            "both matrices must have the same shape"
        );
        let mut packings: Vec<_> = matrices.iter().map(|(_, packed)| packed.packing()).collect();
        let mut step = product.step;
        let target = match &mut product.sink {
            Sink::Rows(to) => {
                assert_eq!(to.len(), rows * width, "the sink must be [{rows}, {width}]");
                Target::Rows { to: SharedMut::new(to), stride: width }
            }
            Sink::Columns(columns) => {
                assert_eq!(
                    (columns.rows(), columns.width()),
                    (rows, width),
                    "the sink must have the rows and features of the product"
                );
                columns.target()
            }
            Sink::Add(to) => {
                assert_eq!(to.len(), rows * width, "the sink must be [{rows}, {width}]");
                Target::Add { path, to: SharedMut::new(to), width }
            }
            Sink::Cache(cache) => {
                assert_eq!(
                    (cache.rows(), cache.width()),
                    (rows, width),
                    "the sink must have the rows and features of the product"
                );
                Target::Cache(cache)
            }
            Sink::Operands(operands) => {
                assert_eq!(
                    (operands.rows, operands.width),
                    (rows, width),
                    "the sink must have the rows and features of the product"
                );
                packings.extend(operands.packed.iter().map(Packed::packing));
                step = step.max(1).next_multiple_of(COLUMNS_STEP);
                Target::Operands(&operands.packed)
            }
        };
        let shape = TaskShape::of(&packings).with(step, matrices.len());
        let wanted = tasks_wanted.clamp(1, threads.count() * Partition::TASKS_PER_THREAD);
        let partition = Partition::new(wanted, rows, width, &shape);
        let timed = rows >= TIMED_ROWS;
        Job { matrices, partition, epilogue: product.epilogue, target, timed }
    }

    /// Computes a task; returns the nanoseconds that its epilogue and its sink took.
    ///
    /// # Safety
    /// No other call of this method runs the same task.
    unsafe fn run(&self, threads: &Threads, task: usize) -> u64 {
        let task = self.partition.task(task);
        if let (None, [(matrix, packed)], Target::Rows { to, stride }) =
            (self.epilogue, &self.matrices[..], &self.target)
        {
            let to = to.get().wrapping_add(task.first_row * stride + task.first_panel * LANES);
            // SAFETY: `x.of` returned the rows in the packing of the matrix, `new` has checked the
            // size of the sink, and only this call writes the block of the task.
            unsafe { matrix.multiply_task(threads, packed, &task, to, *stride) }
            return 0;
        }
        let first_feature = task.first_panel * LANES;
        if let Some(epilogue) = self.epilogue {
            let rows = task.first_row..task.first_row + task.rows;
            epilogue.prepare(rows, first_feature..first_feature + task.features);
        }
        let len = task.rows * task.features;
        let mut sums = threads.scratch::<f32>(self.matrices.len() * len);
        let sums = &mut sums.slice_mut::<f32>()[..self.matrices.len() * len];
        for ((matrix, packed), sums) in self.matrices.iter().zip(sums.chunks_exact_mut(len)) {
            // SAFETY: `x.of` returned the rows in the packing of the matrix, and `sums` is scratch
            // memory of this call for `rows * features` values.
            unsafe {
                matrix.multiply_task(threads, packed, &task, sums.as_mut_ptr(), task.features);
            }
        }
        let begun = self.timed.then(Instant::now);
        let (first, second) = sums.split_at_mut(len);
        for row in (0..task.rows).step_by(EPILOGUE_ROWS) {
            let rows = EPILOGUE_ROWS.min(task.rows - row);
            if let Some(epilogue) = self.epilogue {
                for row in row..row + rows {
                    let columns = row * task.features..(row + 1) * task.features;
                    epilogue.finish(RowSums {
                        row: task.first_row + row,
                        feature: first_feature,
                        first: &mut first[columns.clone()],
                        second: second.get_mut(columns).unwrap_or_default(),
                    });
                }
            }
            let block = &first[row * task.features..(row + rows) * task.features];
            // SAFETY: the blocks of tasks are disjoint, and no other call runs this task.
            unsafe { self.target.put(&task, row, rows, block) }
        }
        begun.map_or(0, |begun| u64::try_from(begun.elapsed().as_nanos()).unwrap_or(0))
    }
}

impl Target<'_> {
    /// Writes `rows` rows of a task, from its row `first` on. `block` has the shape
    /// `[rows, features of the task]`.
    ///
    /// # Safety
    /// No other thread accesses these rows and features of the sink.
    unsafe fn put(&self, task: &GemmTask, first: usize, rows: usize, block: &[f32]) {
        let (first_row, column) = (task.first_row + first, task.first_panel * LANES);
        let lines = block.chunks_exact(task.features).enumerate();
        match self {
            Target::Rows { to, stride } => {
                for (row, line) in lines {
                    let to = to.get().wrapping_add((first_row + row) * stride + column);
                    // SAFETY: `Job::new` has checked that the sink has all rows and features, and
                    // no other thread accesses these.
                    unsafe { std::ptr::copy_nonoverlapping(line.as_ptr(), to, line.len()) }
                }
            }
            Target::Add { path, to, width } => {
                for (row, line) in lines {
                    let to = to.get().wrapping_add((first_row + row) * width + column);
                    // SAFETY: `Job::new` has checked that the sink has all rows and features, and
                    // no other thread accesses these.
                    let to = unsafe { std::slice::from_raw_parts_mut(to, line.len()) };
                    elementwise::add(*path, to, line);
                }
            }
            Target::Cache(cache) => {
                for (row, line) in lines {
                    // SAFETY: no other thread writes this row's features, which are whole heads
                    // because `step` is the dimension of a head.
                    unsafe { cache.write(first_row + row, column, line) }
                }
            }
            Target::Operands(packed) => {
                let columns = task.features;
                let source = SourceRows { x: block, stride: columns, columns, rows };
                for packed in *packed {
                    // SAFETY: a block has whole groups of rows and begins at a multiple of
                    // COLUMNS_STEP columns, and no other thread accesses it. The `Operands` are
                    // borrowed mutably by the product.
                    unsafe { packed.pack(first_row, column, source) }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
