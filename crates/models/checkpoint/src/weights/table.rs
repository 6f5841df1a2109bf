//! The rows of a matrix that stays in its file.

use std::ops::Range;
use std::sync::Arc;

use super::{TensorType, Weights};
use crate::config::{TensorRole, TensorSpec};
use crate::mmap::Bytes;
use crate::weight_type::WeightType;

/// A matrix whose rows are read from the memory-mapped file. The file must not be changed meanwhile.
#[derive(Debug)]
pub struct FileTable {
    bytes: Arc<Bytes>,
    range: Range<usize>,
    dtype: TensorType,
    row_bytes: usize,
}

impl FileTable {
    /// Writes row `index` to `out` in f32: the values that a [`Matrix`](stolon_kernels::Matrix) of
    /// the same type has.
    ///
    /// # Panics
    /// If `index` is not below the number of rows, or `out` does not have the length of a row.
    pub fn row(&self, index: usize, out: &mut [f32]) {
        let rows = &self.bytes[self.range.clone()];
        stolon_kernels::widen(self.dtype, &rows[index * self.row_bytes..][..self.row_bytes], out);
    }

    /// Tells the system that rows are read at random, so that it does not read what follows them.
    pub fn expect_random_reads(&self) {
        self.bytes.expect_random_reads(self.range.clone());
    }
}

impl Weights {
    /// Whether the tensor `spec` can stay in its file: only rows of it are read, the file has them in
    /// their form and order, and `weight_type` keeps their type.
    #[must_use]
    pub fn can_stay_in_file(&self, spec: &TensorSpec, weight_type: WeightType) -> bool {
        let Some(stored) = self.tensors.get(&spec.name) else { return false };
        let is_table = spec.role == TensorRole::Table && stored.shape == spec.shape;
        let is_kept = |dtype: &TensorType| weight_type.of(spec, *dtype) == *dtype;
        let is_buffer = matches!(*self.regions[stored.region].bytes, Bytes::Owned(_));
        is_table && !is_buffer && stored.is_plain() && stored.dtype.as_ref().is_ok_and(is_kept)
    }

    /// The table `spec`, if it [can stay in its file](Self::can_stay_in_file).
    #[must_use]
    pub fn file_table(&self, spec: &TensorSpec, weight_type: WeightType) -> Option<FileTable> {
        let stored = self.tensors.get(&spec.name)?;
        let bytes = &self.regions[stored.region].bytes;
        if !self.can_stay_in_file(spec, weight_type) || stored.range.end > bytes.len() {
            return None;
        }
        let (dtype, range) = (*stored.dtype.as_ref().ok()?, stored.range.clone());
        let row_bytes = range.len().checked_div(spec.shape[0])?;
        Some(FileTable { bytes: Arc::clone(bytes), range, dtype, row_bytes })
    }
}
