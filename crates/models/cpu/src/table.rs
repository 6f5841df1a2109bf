//! Tables of which only rows are read, by token id: packed, or left in their file.

use stolon_checkpoint::weights::FileTable;
use stolon_kernels::Matrix;

/// A table, `[rows, width]`.
#[derive(Debug)]
pub(crate) enum Table {
    Packed(Matrix),
    File(FileTable),
}

impl Table {
    /// Writes row `index` to `out`. Both kinds have the same values.
    ///
    /// # Panics
    /// If `index` is out of range, or `out` does not have the length of a row.
    pub(crate) fn row(&self, index: usize, out: &mut [f32]) {
        match self {
            Self::Packed(matrix) => matrix.row(index, out),
            Self::File(table) => table.row(index, out),
        }
    }

    /// Size in bytes of the packed matrix; 0 in a file.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Packed(matrix) => matrix.bytes(),
            Self::File(_) => 0,
        }
    }
}
