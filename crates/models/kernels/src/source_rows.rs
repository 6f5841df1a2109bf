//! Rows of activations that have not been packed yet.

/// Some columns of successive f32 rows: the input of packing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SourceRows<'a> {
    /// Values from the first column of the first row on. Row `r` begins at `x[r * stride]`.
    pub(crate) x: &'a [f32],
    /// Number of values from a row to the next.
    pub(crate) stride: usize,
    /// Number of columns.
    pub(crate) columns: usize,
    /// Number of rows. It may be less than the size of the group that they are packed into.
    pub(crate) rows: usize,
}

impl<'a> SourceRows<'a> {
    /// The columns of row `index`.
    #[inline(always)]
    pub(crate) fn row(&self, index: usize) -> &'a [f32] {
        &self.x[index * self.stride..][..self.columns]
    }

    /// The rows from `first` on, at most `count`.
    pub(crate) fn rows(&self, first: usize, count: usize) -> SourceRows<'a> {
        SourceRows {
            x: &self.x[first * self.stride..],
            rows: count.min(self.rows - first),
            ..*self
        }
    }
}
