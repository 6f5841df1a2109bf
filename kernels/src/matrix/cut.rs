//! How a product is shared out over the threads.

use crate::Threads;
use crate::lanes::LANES;
use crate::operand::Packing;

/// Most rows of a task.
const ROWS_MAX: usize = 256;
/// Most panels of a task.
const PANELS_MAX: usize = 32;

/// How a product is cut into tasks: chunks of rows, which share their activations, times chunks of
/// panels, which share their weights.
pub(crate) struct Cut {
    rows: usize,
    row_chunk: usize,
    out_features: usize,
    panel_chunk: usize,
}

/// What tasks must be whole multiples of, and how large they may be.
pub(crate) struct Shape {
    /// Most rows, a multiple of every group that is read or packed.
    row_chunk: usize,
    /// Panels that stay together.
    panel_step: usize,
    panels_max: usize,
}

impl Shape {
    /// Of tasks that read or pack rows in these packings.
    pub(crate) fn of(packings: &[Packing]) -> Shape {
        let step = packings.iter().map(|packing| packing.rows_step()).fold(1, common_multiple);
        Shape { row_chunk: ROWS_MAX / step * step, panel_step: 4, panels_max: PANELS_MAX }
    }

    /// With so many features that must stay together, and several matrices multiplied in one task.
    pub(crate) fn with(self, features: usize, matrices: usize) -> Shape {
        let least = common_multiple(features, LANES) / LANES;
        let panels_max = PANELS_MAX / matrices;
        let preferred = common_multiple(self.panel_step, least);
        let panel_step = if preferred <= panels_max { preferred } else { least };
        let panels_max = (panels_max / panel_step * panel_step).max(panel_step);
        Shape { panel_step, panels_max, ..self }
    }
}

/// One task of a [`Cut`].
pub(crate) struct Part {
    pub first_row: usize,
    pub rows: usize,
    pub first_panel: usize,
    pub features: usize,
}

impl Cut {
    /// Tasks of that shape, some for each thread.
    pub(crate) fn new(threads: &Threads, rows: usize, out_features: usize, shape: &Shape) -> Cut {
        let panels = out_features.div_ceil(LANES);
        let wanted = (threads.count() * 8).div_ceil(rows.div_ceil(shape.row_chunk));
        let panel_chunk = panels.div_ceil(wanted).next_multiple_of(shape.panel_step);
        let panel_chunk = panel_chunk.min(shape.panels_max);
        Cut { rows, row_chunk: shape.row_chunk, out_features, panel_chunk }
    }

    fn row_chunks(&self) -> usize {
        self.rows.div_ceil(self.row_chunk)
    }

    pub(crate) fn task_count(&self) -> usize {
        self.row_chunks() * self.out_features.div_ceil(self.panel_chunk * LANES)
    }

    /// Tasks that share weights follow each other.
    pub(crate) fn task(&self, index: usize) -> Part {
        let first_row = index % self.row_chunks() * self.row_chunk;
        let first_panel = index / self.row_chunks() * self.panel_chunk;
        Part {
            first_row,
            rows: self.row_chunk.min(self.rows - first_row),
            first_panel,
            features: (self.panel_chunk * LANES).min(self.out_features - first_panel * LANES),
        }
    }
}

/// The least number that both divide.
fn common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}
