//! Weight matrices, packed for the kernels, and their product with rows of activations.
//!
//! A matrix is packed while it is loaded, some rows at a time, so that the pages of the file can be
//! released meanwhile. After that it is read by every step and never changed. Packed weights take
//! as much memory as in the file (padded to whole panels), and there is no second copy:
//! [`Matrix::row`] unpacks a row where one is needed, for example for tied embeddings.
//!
//! | type | layout | computed in |
//! |---|---|---|
//! | `F32` | `[panel][inner][16]` | f32 |
//! | `F16` | `[panel][inner][16]` | f32, weights are widened |
//! | `Bf16` | `[panel][inner / 2][16][2]`, `inner` padded to 32 | see the crate documentation on precision |
//! | quantized | blocks of 16 rows interleaved, see [`quant`] | integers, see [`int8`] |
#![allow(unsafe_code, reason = "tasks write disjoint blocks of one output")]

mod multiply;
mod pack;
mod partition;

use std::borrow::Cow;

use crate::buffer::{Buffer, SharedMut};
use crate::error::KernelError;
use crate::gemm;
use crate::int8::{self, DotSet};
use crate::lanes::LANES;
use crate::packing::{Packed, Packing};
use crate::path::{Path, PathKind};
use crate::quant;
use crate::tensor_type::TensorType;
use crate::threads::Threads;
use pack::PanelLayout;
pub(crate) use partition::{GemmTask, Partition, TaskShape};

/// The inner dimension of bf16 weights is padded to a multiple of this, the depth of an AMX tile.
const BF16_INNER: usize = 32;

/// A packed weight matrix of logical shape `[out_features, in_features]`.
#[derive(Debug)]
pub struct Matrix {
    dtype: TensorType,
    out_features: usize,
    in_features: usize,
    /// `in_features`, padded as the layout requires.
    padded_inner: usize,
    path: Path,
    dots: DotSet,
    data: Buffer,
}

impl Matrix {
    /// Packs weights.
    ///
    /// `bytes` holds little-endian weights in row-major order, `[out_features, in_features]`.
    /// Quantized weights are GGUF blocks along `in_features`.
    ///
    /// # Errors
    /// * [`KernelError::Empty`] if a dimension is zero.
    /// * [`KernelError::PartialBlock`] if `in_features` is not a multiple of the block length.
    /// * [`KernelError::WrongByteCount`] if `bytes` does not have the size of the shape.
    pub fn pack(
        dtype: TensorType,
        out_features: usize,
        in_features: usize,
        bytes: &[u8],
        path: Path,
    ) -> Result<Matrix, KernelError> {
        let mut matrix = Matrix::zeroed(dtype, out_features, in_features, path)?;
        matrix.fill(&Threads::new(1), 0, dtype, bytes)?;
        if dtype.bytes_of(out_features * in_features) != Some(bytes.len()) {
            return Err(matrix.wrong_bytes(dtype, 0, bytes));
        }
        Ok(matrix)
    }

    /// Creates a matrix of zeroes, which [`Matrix::fill`] then fills.
    ///
    /// # Errors
    /// * [`KernelError::Empty`] if a dimension is zero.
    /// * [`KernelError::PartialBlock`] if `in_features` is not a multiple of the block length.
    pub fn zeroed(
        dtype: TensorType,
        out_features: usize,
        in_features: usize,
        path: Path,
    ) -> Result<Matrix, KernelError> {
        if out_features == 0 || in_features == 0 {
            return Err(KernelError::Empty { out_features, in_features });
        }
        let expected = dtype.block_len();
        if !in_features.is_multiple_of(expected) {
            return Err(KernelError::PartialBlock { dtype, expected, got: in_features });
        }
        let padded_inner = match dtype {
            TensorType::Bf16 => in_features.next_multiple_of(BF16_INNER),
            _ => in_features,
        };
        let panel_bytes = PanelLayout::new(dtype, in_features, padded_inner).panel_bytes;
        let data = Buffer::zeroed::<u8>(out_features.div_ceil(LANES) * panel_bytes);
        let dots = DotSet::of(path);
        Ok(Matrix { dtype, out_features, in_features, padded_inner, path, dots, data })
    }

    /// Packs rows from `first_row` on, in parallel.
    ///
    /// `first_row` is a multiple of [`ROWS_STEP`](Matrix::ROWS_STEP). `bytes` holds whole rows with
    /// weights of type `source`. Their number is a multiple of `ROWS_STEP` too, except at the end
    /// of the matrix. `source` is the type of the matrix. A `Q8_0` matrix also accepts `F32`, `F16`
    /// and `Bf16` rows and quantizes them; a `Bf16` matrix also accepts `F16` rows whose numbers
    /// are bf16 numbers ([`is_bf16`](crate::is_bf16)).
    ///
    /// # Errors
    /// * [`KernelError::WrongByteCount`] if `bytes` does not hold such rows.
    /// * [`KernelError::NotRounded`] if the matrix cannot take weights of type `source`.
    pub fn fill(
        &mut self,
        threads: &Threads,
        first_row: usize,
        source: TensorType,
        bytes: &[u8],
    ) -> Result<(), KernelError> {
        let layout = self.layout();
        let row_bytes = self.in_features / source.block_len() * source.block_bytes();
        let left = self.out_features.saturating_sub(first_row);
        let rows = left.min(bytes.len() / row_bytes);
        let ends = rows == left || rows.is_multiple_of(LANES);
        if rows * row_bytes != bytes.len() || !ends || !first_row.is_multiple_of(LANES) {
            return Err(self.wrong_bytes(source, first_row, bytes));
        }
        let convert: fn(TensorType, &[u8]) -> Cow<'_, [u8]> = match (source, self.dtype) {
            (from, to) if from == to => |_, rows| Cow::Borrowed(rows),
            (TensorType::F16, TensorType::Bf16) => |_, rows| Cow::Owned(quant::to_bf16(rows)),
            (from, TensorType::Q8_0) if !from.is_quantized() => {
                |from, rows| Cow::Owned(quant::round_to_q8_0(from, rows))
            }
            (from, to) => return Err(KernelError::NotRounded { from, to }),
        };
        let first_panel = first_row / LANES;
        let panels = SharedMut::new(self.data.slice_mut::<u8>());
        threads.for_each(rows.div_ceil(LANES), |index| {
            let end = bytes.len().min((index + 1) * LANES * row_bytes);
            let rows = &bytes[index * LANES * row_bytes..end];
            // SAFETY: the first row of the panel is a row of the matrix, so the panel is inside the
            // buffer. Each panel is written by one task only, and `self.data` is borrowed mutably.
            let panel = unsafe {
                let start = panels.get().add((first_panel + index) * layout.panel_bytes);
                std::slice::from_raw_parts_mut(start, layout.panel_bytes)
            };
            layout.pack(&convert(source, rows), panel);
        });
        Ok(())
    }

    /// The error for `bytes` that do not hold the rows from `first_row` on.
    fn wrong_bytes(&self, dtype: TensorType, first_row: usize, bytes: &[u8]) -> KernelError {
        let out_features = self.out_features.saturating_sub(first_row);
        let row_bytes = self.in_features / dtype.block_len() * dtype.block_bytes();
        KernelError::WrongByteCount {
            dtype,
            out_features,
            in_features: self.in_features,
            expected: out_features * row_bytes,
            got: bytes.len(),
        }
    }

    /// Number of rows of a panel, which are packed together.
    pub const ROWS_STEP: usize = LANES;

    /// A copy of the matrix that is multiplied with another dot-product set.
    #[cfg(test)]
    pub(crate) fn with_set(&self, dots: DotSet) -> Matrix {
        let mut data = Buffer::zeroed::<u8>(self.data.byte_len());
        data.slice_mut::<u8>().copy_from_slice(self.data.slice::<u8>());
        Matrix { dots, data, ..*self }
    }

    /// The layout of the panels.
    fn layout(&self) -> PanelLayout {
        PanelLayout::new(self.dtype, self.in_features, self.padded_inner)
    }

    /// Number of output features: rows of the weights.
    #[must_use]
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Number of input features: columns of the weights.
    #[must_use]
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Type of the weights.
    #[must_use]
    pub fn dtype(&self) -> TensorType {
        self.dtype
    }

    /// Number of bytes of the packed weights.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.data.byte_len()
    }

    /// Writes row `index` of the weights to `out`, which holds `in_features` values, as f32.
    ///
    /// # Panics
    /// If `index` is not below `out_features`, or `out` does not hold `in_features` values.
    pub fn row(&self, index: usize, out: &mut [f32]) {
        assert!(
            index < self.out_features,
            "row {index} is out of range: the matrix has {} rows",
            self.out_features
        );
        assert_eq!(out.len(), self.in_features, "out must hold {} values", self.in_features);
        let layout = self.layout();
        let panel = &self.data.slice::<u8>()[index / LANES * layout.panel_bytes..];
        let mut row = vec![0; layout.row_bytes];
        layout.unpack(&panel[..layout.panel_bytes], index % LANES, &mut row);
        quant::widen(self.dtype, &row, out);
    }

    /// `out[r, o] = sum over k of x[r, k] * w[o, k]`.
    ///
    /// `x` has the shape `[rows, in_features]`, `out` has the shape `[rows, out_features]`. The
    /// bits of an element depend only on its row of `x` and its row of weights, not on `rows` or
    /// the number of threads.
    ///
    /// # Panics
    /// If `x` or `out` does not have its shape.
    pub fn matmul(&self, threads: &Threads, x: &[f32], rows: usize, out: &mut [f32]) {
        assert_eq!(x.len(), rows * self.in_features, "x must be [{rows}, {}]", self.in_features);
        assert_eq!(
            out.len(),
            rows * self.out_features,
            "out must be [{rows}, {}]",
            self.out_features
        );
        if rows == 0 {
            return;
        }
        let packing = self.packing(rows);
        let mut memory = threads.scratch::<u8>(packing.bytes(rows));
        let packed = Packed::new(packing, rows, memory.slice_mut::<u8>());
        packed.pack_all(threads, x);
        let shape = TaskShape::of(&[packing]);
        let wanted = threads.count() * Partition::TASKS_PER_THREAD;
        let partition = Partition::new(wanted, rows, self.out_features, &shape);
        let sums = SharedMut::new(out);
        threads.for_each(partition.task_count(), |task| {
            let task = partition.task(task);
            let to = task.first_row * self.out_features + task.first_panel * LANES;
            let to = sums.get().wrapping_add(to);
            // SAFETY: `packed` holds all rows in this matrix's packing, `out` has the shape of the
            // product, and tasks write disjoint rows or features of it.
            unsafe { self.multiply_task(threads, &packed, &task, to, self.out_features) }
        });
    }

    /// Whether products are computed by AMX.
    fn uses_tiles(&self) -> bool {
        self.path.kind() == PathKind::Amx && self.dtype == TensorType::Bf16
    }

    /// Whether products are computed by the dot product instruction of AVX-512 BF16.
    fn uses_dots(&self) -> bool {
        self.path.kind() == PathKind::Avx512Bf16 && self.dtype == TensorType::Bf16
    }

    /// Whether products with this matrix round the activations to bf16.
    #[must_use]
    pub fn rounds_activations(&self) -> bool {
        self.uses_tiles() || self.uses_dots()
    }

    /// The packing of activations that products of `rows` rows with this matrix read.
    pub(crate) fn packing(&self, rows: usize) -> Packing {
        let inner = self.padded_inner;
        if self.dtype.is_quantized() {
            return Packing::Bytes { inner, groups: int8::Groups::new(self.dots, rows) };
        }
        #[cfg(target_arch = "x86_64")]
        if self.uses_tiles() {
            return Packing::Tiles { inner };
        }
        let group_max = gemm::group_max(self.path);
        #[cfg(target_arch = "x86_64")]
        if self.uses_dots() {
            return Packing::Pairs { inner, group_max };
        }
        Packing::Lanes { inner, group_max, path: self.path }
    }
}

#[cfg(test)]
pub(crate) mod tests;
