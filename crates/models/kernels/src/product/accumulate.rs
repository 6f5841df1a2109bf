//! Products of groups of rows whose results are added to rows of a common output: the down
//! projections of a mixture of experts.
//!
//! Threads divide the output features. A task computes its features for all groups, one after the
//! other, and adds each result to its row. So the terms of an element of the output are added in
//! the order of the groups with any number of threads, without memory for intermediate results
//! of all groups.
#![allow(unsafe_code, reason = "tasks write disjoint blocks of one output")]

use super::{Epilogue, RowSums};
use crate::buffer::SharedMut;
use crate::elementwise;
use crate::lanes::LANES;
use crate::matrix::{GemmTask, Matrix, Partition, TaskShape};
use crate::operand::Operands;
use crate::packing::Packed;
use crate::path::Path;
use crate::threads::Threads;

/// The product of one group of rows with a matrix.
pub struct Term<'a> {
    /// The matrix. The matrices of all terms have the same number of output features.
    pub matrix: &'a Matrix,
    /// Function that is applied to the results of each row before they are added.
    pub epilogue: Epilogue<'a>,
    /// For each row of the group, the index of the row of the output that its result is added to.
    /// No index occurs twice.
    pub rows: &'a [u32],
}

impl std::fmt::Debug for Term<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Term").field("rows", &self.rows).finish_non_exhaustive()
    }
}

/// Multiplies group `i` of the packed rows `x` with the matrix of term `i`, and adds the results to
/// rows of `out`, which has the shape `[rows, out_features]`, in the order of the terms.
///
/// # Panics
/// If the number of groups or their numbers of rows differ from those of `terms`, `x` was not
/// [reset](Operands::reset) for the matrices, these differ in their output features, or a row index
/// is out of range.
pub fn accumulate(
    path: Path,
    threads: &Threads,
    x: &Operands,
    terms: &[Term<'_>],
    out: &mut [f32],
) {
    let Some(first) = terms.first() else { return };
    let width = first.matrix.out_features();
    assert_eq!(x.group_count(), terms.len(), "there must be one term for each group");
    for (group, term) in terms.iter().enumerate() {
        assert_eq!(term.rows.len(), x.group_rows(group), "term {group} must have its group's rows");
        assert_eq!(term.matrix.out_features(), width, "all terms must have the same features");
        let end = term.rows.iter().max().map_or(0, |row| *row as usize + 1);
        assert!(end * width <= out.len(), "out must have at least {end} rows of {width} values");
    }
    let packed: Vec<Packed> =
        terms.iter().enumerate().map(|(group, term)| x.of(group, term.matrix)).collect();
    let packings: Vec<_> = packed.iter().map(Packed::packing).collect();
    let shape = TaskShape::of(&packings);
    let wanted = threads.count() * Partition::TASKS_PER_THREAD;
    // Each task has some features and all rows.
    let features = Partition::new(wanted, 1, width, &shape);
    let out = SharedMut::new(out);
    threads.for_each(features.task_count(), |task| {
        let columns = features.task(task);
        for (term, packed) in terms.iter().zip(&packed) {
            for first_row in (0..term.rows.len()).step_by(shape.row_chunk) {
                let rows = shape.row_chunk.min(term.rows.len() - first_row);
                let task = GemmTask { first_row, rows, ..columns };
                let feature = task.first_panel * LANES;
                let features = feature..feature + task.features;
                term.epilogue.prepare(first_row..first_row + rows, features);
                let len = task.rows * task.features;
                let mut sums = threads.scratch::<f32>(len);
                let sums = &mut sums.slice_mut::<f32>()[..len];
                // SAFETY: `x.of` returned the rows in the packing of the matrix, and `sums` is
                // scratch memory of this call for `rows * features` values.
                unsafe {
                    let to = sums.as_mut_ptr();
                    term.matrix.multiply_task(threads, packed, &task, to, task.features);
                }
                for (row, first) in sums.chunks_exact_mut(task.features).enumerate() {
                    let row = task.first_row + row;
                    term.epilogue.finish(RowSums { row, feature, first, second: &mut [] });
                    let start = term.rows[row] as usize * width + feature;
                    // SAFETY: the row is within `out`, as asserted above, and no other task has
                    // these features.
                    let to = unsafe {
                        let to = out.get().add(start);
                        std::slice::from_raw_parts_mut(to, first.len())
                    };
                    elementwise::add(path, to, first);
                }
            }
        }
    });
}
