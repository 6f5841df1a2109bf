//! How a product is shared out over the threads.

use crate::kernels::Threads;
use crate::kernels::lanes::LANES;

/// How a product is cut into tasks: chunks of rows, which share their activations, times chunks of
/// panels, which share their weights.
pub(in crate::kernels) struct Cut {
    rows: usize,
    row_chunk: usize,
    out_features: usize,
    panel_chunk: usize,
}

/// One task of a [`Cut`].
pub(in crate::kernels) struct Part {
    pub first_row: usize,
    pub rows: usize,
    pub first_panel: usize,
    pub features: usize,
}

impl Cut {
    /// At most `row_chunk` rows a task, at most 32 panels, and some tasks for each thread.
    pub(in crate::kernels) fn new(
        threads: &Threads,
        rows: usize,
        row_chunk: usize,
        out_features: usize,
    ) -> Cut {
        let panels = out_features.div_ceil(LANES);
        let wanted = (threads.count() * 8).div_ceil(rows.div_ceil(row_chunk));
        let panel_chunk = panels.div_ceil(wanted).next_multiple_of(4).min(32);
        Cut { rows, row_chunk, out_features, panel_chunk }
    }

    fn row_chunks(&self) -> usize {
        self.rows.div_ceil(self.row_chunk)
    }

    pub(in crate::kernels) fn task_count(&self) -> usize {
        self.row_chunks() * self.out_features.div_ceil(self.panel_chunk * LANES)
    }

    /// Tasks that share weights follow each other.
    pub(in crate::kernels) fn task(&self, index: usize) -> Part {
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
