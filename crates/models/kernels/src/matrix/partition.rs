//! How a product is divided into tasks for the threads.

use crate::lanes::LANES;
use crate::packing::Packing;

/// Maximum number of rows of a task.
const TASK_ROWS_MAX: usize = 256;
/// Maximum number of panels of a task.
const TASK_PANELS_MAX: usize = 32;

/// A division of a product into tasks: chunks of rows, whose tasks share activations, times chunks
/// of panels, whose tasks share weights.
pub(crate) struct Partition {
    /// Number of rows of the product.
    rows: usize,
    /// Number of rows of a task, except those with the last rows.
    row_chunk: usize,
    /// Number of output features of the product.
    out_features: usize,
    /// Number of panels of a task, except those with the last panels.
    panel_chunk: usize,
}

/// The granularity and the maximum size of the tasks of a [`Partition`].
pub(crate) struct TaskShape {
    /// Number of rows of a task: a multiple of the group size of all packings that tasks read or
    /// write.
    pub(crate) row_chunk: usize,
    /// The number of panels of a task is a multiple of this.
    panel_step: usize,
    /// Maximum number of panels of a task.
    panels_max: usize,
}

impl TaskShape {
    /// The shape of tasks that read or write rows in these packings.
    pub(crate) fn of(packings: &[Packing]) -> TaskShape {
        let step = packings.iter().map(|packing| packing.rows_step()).fold(1, common_multiple);
        TaskShape {
            row_chunk: TASK_ROWS_MAX / step * step,
            panel_step: 4,
            panels_max: TASK_PANELS_MAX,
        }
    }

    /// The same shape for tasks that multiply `matrices` matrices and must not divide runs of
    /// `features` output features (the dimension of a head, for example).
    pub(crate) fn with(self, features: usize, matrices: usize) -> TaskShape {
        let least = common_multiple(features, LANES) / LANES;
        let panels_max = TASK_PANELS_MAX / matrices;
        let preferred = common_multiple(self.panel_step, least);
        let panel_step = if preferred <= panels_max { preferred } else { least };
        let panels_max = (panels_max / panel_step * panel_step).max(panel_step);
        TaskShape { panel_step, panels_max, ..self }
    }
}

/// One task of a [`Partition`].
pub(crate) struct GemmTask {
    /// First row.
    pub(crate) first_row: usize,
    /// Number of rows.
    pub(crate) rows: usize,
    /// First panel; its first output feature is `16 * first_panel`.
    pub(crate) first_panel: usize,
    /// Number of output features.
    pub(crate) features: usize,
}

impl Partition {
    /// Number of tasks for each thread that a product alone is divided into.
    pub(crate) const TASKS_PER_THREAD: usize = 8;

    /// Divides a product of `[rows, out_features]` results into about `wanted` tasks of the given
    /// shape; more if these would be too large.
    pub(crate) fn new(
        wanted: usize,
        rows: usize,
        out_features: usize,
        shape: &TaskShape,
    ) -> Partition {
        let panels = out_features.div_ceil(LANES);
        let wanted = wanted.div_ceil(rows.div_ceil(shape.row_chunk));
        let panel_chunk = panels.div_ceil(wanted).next_multiple_of(shape.panel_step);
        let panel_chunk = panel_chunk.min(shape.panels_max);
        Partition { rows, row_chunk: shape.row_chunk, out_features, panel_chunk }
    }

    /// Number of chunks of rows.
    fn row_chunks(&self) -> usize {
        self.rows.div_ceil(self.row_chunk)
    }

    /// Number of tasks.
    pub(crate) fn task_count(&self) -> usize {
        self.row_chunks() * self.out_features.div_ceil(self.panel_chunk * LANES)
    }

    /// Task `index`. Successive tasks share weights.
    pub(crate) fn task(&self, index: usize) -> GemmTask {
        let first_row = index % self.row_chunks() * self.row_chunk;
        let first_panel = index / self.row_chunks() * self.panel_chunk;
        GemmTask {
            first_row,
            rows: self.row_chunk.min(self.rows - first_row),
            first_panel,
            features: (self.panel_chunk * LANES).min(self.out_features - first_panel * LANES),
        }
    }
}

/// The least common multiple.
fn common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}
