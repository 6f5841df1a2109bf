//! Weights packed for the kernels, and the product with rows of activations.
//!
//! Life: packed at load from the bytes of the file, a run of rows at a time, so that a file's pages
//! can be given back meanwhile; then read by every step and never changed.
//! Packed weights take the size of the file's (padded to whole panels): there is no second copy,
//! so [`Matrix::row`] unpacks one where a row itself is needed (an embedding that is tied).
//!
//! | type | layout | computed in |
//! |---|---|---|
//! | `F32` | `[panel][in][16]` | f32 |
//! | `F16` | `[panel][in][16]` | f32, weights widened |
//! | `Bf16` | `[panel][in / 2][16][2]`, `in` padded to 32 | see [`kernels`](super) on precision |
//! | quantised | the blocks of 16 rows side by side, see [`quant`] | integers, see [`int8`] |
#![allow(unsafe_code, reason = "tasks write disjoint parts of one output")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: own part")]

mod cut;
mod pack;

pub(super) use cut::{Cut, Part, Shape};
use pack::Layout;

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::buffer::{Buffer, SharedMut};
use super::error::KernelError;
use super::gemm;
use super::int8::{self, DotSet};
use super::lanes::LANES;
use super::operand::{Packed, Packing};
use super::quant;
use super::{Path, PathKind, Threads};
use crate::tensor_type::TensorType;

/// Inner dimension of bf16 weights is padded to a multiple of this: one AMX tile.
const BF16_INNER: usize = 32;

/// A packed weight matrix of logical shape `[out_features, in_features]`.
#[derive(Debug)]
pub struct Matrix {
    dtype: TensorType,
    out_features: usize,
    in_features: usize,
    /// `in_features`, padded as the layout wants it.
    padded_inner: usize,
    path: Path,
    dots: DotSet,
    data: Buffer,
}

impl Matrix {
    /// Packs weights.
    ///
    /// `bytes` are row-major, `[out_features, in_features]`, little-endian, or GGUF blocks along
    /// `in_features`.
    ///
    /// # Errors
    /// [`KernelError`] if the bytes do not fit the shape, or the shape is empty or no whole number
    /// of blocks.
    pub fn pack(
        dtype: TensorType,
        out_features: usize,
        in_features: usize,
        bytes: &[u8],
        path: Path,
    ) -> Result<Matrix, KernelError> {
        let mut matrix = Matrix::zeroed(dtype, out_features, in_features, path)?;
        matrix.fill(&Threads::new(1), 0, dtype, bytes)?;
        if bytes.len() < matrix.layout().row_bytes * out_features {
            return Err(matrix.wrong_bytes(dtype, 0, bytes));
        }
        Ok(matrix)
    }

    /// A matrix of zeroes, to be [filled](Matrix::fill).
    ///
    /// # Errors
    /// [`KernelError`] if the shape is empty or no whole number of blocks.
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
        let panel_bytes = Layout::new(dtype, in_features, padded_inner).panel_bytes;
        let data = Buffer::zeroed::<u8>(out_features.div_ceil(LANES) * panel_bytes);
        let dots = DotSet::of(path);
        Ok(Matrix { dtype, out_features, in_features, padded_inner, path, dots, data })
    }

    /// Packs rows from `first_row` on, a multiple of [`ROWS_STEP`](Matrix::ROWS_STEP): `bytes` are
    /// whole rows of `source`, a multiple of that many but at the matrix's end. A Q8_0 matrix also
    /// takes rows of f32, f16 and bf16, and rounds them.
    ///
    /// # Errors
    /// [`KernelError`] if the bytes are no such rows.
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
        let rounds = source != self.dtype;
        if rounds && (self.dtype != TensorType::Q8_0 || source.block_len() > 1) {
            return Err(KernelError::NotRounded { from: source, to: self.dtype });
        }
        let first_panel = first_row / LANES;
        let panels = SharedMut::new(self.data.slice_mut::<u8>());
        threads.for_each(rows.div_ceil(LANES), |index| {
            let end = bytes.len().min((index + 1) * LANES * row_bytes);
            let rows = &bytes[index * LANES * row_bytes..end];
            // SAFETY: the panel is in the buffer, since its first row is a row of the matrix, and
            // only this task writes it.
            let panel = unsafe {
                let start = panels.get().add((first_panel + index) * layout.panel_bytes);
                std::slice::from_raw_parts_mut(start, layout.panel_bytes)
            };
            if rounds {
                let blocks = quant::round_to_q8_0(source, self.in_features, rows);
                layout.pack(&blocks, panel);
            } else {
                layout.pack(rows, panel);
            }
        });
        Ok(())
    }

    /// Says which bytes were expected from `first_row` on.
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

    /// Rows that are packed together.
    pub const ROWS_STEP: usize = LANES;

    /// The same matrix, multiplied by another set of instructions.
    #[cfg(test)]
    pub(super) fn with_set(&self, dots: DotSet) -> Matrix {
        let mut data = Buffer::zeroed::<u8>(self.data.byte_len());
        data.slice_mut::<u8>().copy_from_slice(self.data.slice::<u8>());
        Matrix { dots, data, ..*self }
    }

    /// How its panels stand in memory.
    fn layout(&self) -> Layout {
        Layout::new(self.dtype, self.in_features, self.padded_inner)
    }

    /// Rows of the weights: values of an output row.
    #[must_use]
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Columns of the weights: values of an input row.
    #[must_use]
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Type of the weights.
    #[must_use]
    pub fn dtype(&self) -> TensorType {
        self.dtype
    }

    /// Bytes the packed weights take.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.data.byte_len()
    }

    /// Unpacks row `index` of the weights into `out`, `[in_features]`, widened to f32.
    ///
    /// # Panics
    /// If there is no such row or `out` is of another size.
    pub fn row(&self, index: usize, out: &mut [f32]) {
        assert!(index < self.out_features, "row {index} of {}", self.out_features);
        assert_eq!(out.len(), self.in_features, "a row has {} values", self.in_features);
        let layout = self.layout();
        let panel = &self.data.slice::<u8>()[index / LANES * layout.panel_bytes..];
        let mut row = vec![0; layout.row_bytes];
        layout.unpack(&panel[..layout.panel_bytes], index % LANES, &mut row);
        quant::widen(self.dtype, &row, out);
    }

    /// `out[r, o] = sum over k of x[r, k] * w[o, k]`.
    ///
    /// `x` is `[rows, in_features]`, `out` is `[rows, out_features]`. An element's bits depend on
    /// its row of `x` and its row of weights alone.
    ///
    /// # Panics
    /// If `x` or `out` is of another size: a bug of the caller.
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
        let cut = Cut::new(threads, rows, self.out_features, &Shape::of(&[packing]));
        let sums = SharedMut::new(out);
        threads.for_each(cut.task_count(), |task| {
            let part = cut.task(task);
            let to = part.first_row * self.out_features + part.first_panel * LANES;
            let to = sums.get().wrapping_add(to);
            // SAFETY: the sizes were checked, and tasks write disjoint rows or features.
            unsafe { self.multiply_part(threads, &packed, &part, to, self.out_features) }
        });
    }

    /// Whether the product runs on AMX tiles.
    fn uses_tiles(&self) -> bool {
        self.path.kind() == PathKind::Amx && self.dtype == TensorType::Bf16
    }

    /// Whether the product runs on dot products of bf16 pairs.
    fn uses_dots(&self) -> bool {
        self.path.kind() == PathKind::Avx512Bf16 && self.dtype == TensorType::Bf16
    }

    /// Whether products with this matrix round the activations to bf16.
    #[must_use]
    pub fn rounds_activations(&self) -> bool {
        self.uses_tiles() || self.uses_dots()
    }

    /// How the kernels read activations, `rows` rows of them together.
    pub(super) fn packing(&self, rows: usize) -> Packing {
        let inner = self.padded_inner;
        if self.dtype.block_len() > 1 {
            return Packing::Bytes { inner, groups: int8::Groups::new(self.dots, rows) };
        }
        #[cfg(target_arch = "x86_64")]
        if self.uses_tiles() {
            return Packing::Tiles { inner };
        }
        let group_max = gemm::group_max(self.path);
        match self.uses_dots() {
            true => Packing::Pairs { inner, group_max },
            false => Packing::Lanes { inner, group_max, path: self.path },
        }
    }

    /// The sums of one part of a product, rows of them `out_row` values apart.
    ///
    /// # Safety
    /// `x` holds the part's rows in this matrix's packing; `out` takes the part's features in each
    /// of its rows, touched by nobody else.
    pub(super) unsafe fn multiply_part(
        &self,
        threads: &Threads,
        x: &Packed,
        part: &Part,
        out: *mut f32,
        out_row: usize,
    ) {
        let (rows, features) = (part.rows, part.features);
        let values = x.values(part.first_row);
        match x.packing() {
            Packing::Bytes { inner, groups } => {
                let args = int8::ChunkArgs {
                    words: values,
                    scales: x.scales(part.first_row),
                    sums: x.sums(part.first_row),
                    rows,
                    inner,
                    panels: self.data.slice::<u8>()[self.panel_start(part, 1)..].as_ptr(),
                    out,
                    out_features: out_row,
                    features,
                };
                // SAFETY: the caller's promise.
                unsafe { groups.chunk(threads, &args, self.dtype) }
            }
            #[cfg(target_arch = "x86_64")]
            Packing::Tiles { inner } => {
                let mut waiting = threads.scratch::<f32>(amx::waiting_len(rows));
                let args = amx::TileArgs {
                    packed: values.cast::<u16>(),
                    rows,
                    padded_inner: inner,
                    panels: self.data.slice::<u16>()[self.panel_start(part, 2)..].as_ptr(),
                    out,
                    out_features: out_row,
                    features,
                    waiting: waiting.slice_mut::<f32>().as_mut_ptr(),
                };
                // SAFETY: the caller's promise; the path proves that AMX may be used.
                unsafe { amx::chunk(&args) }
            }
            Packing::Pairs { inner, .. } => {
                let args = lane_args(values, inner / 2, part, out, out_row);
                // SAFETY: the caller's promise.
                unsafe { self.multiply_lanes(&args, part) }
            }
            Packing::Lanes { inner, .. } => {
                let args = lane_args(values, inner, part, out, out_row);
                // SAFETY: the caller's promise.
                unsafe { self.multiply_lanes(&args, part) }
            }
        }
    }

    /// Where a part's first panel begins, in units of so many bytes.
    fn panel_start(&self, part: &Part, unit: usize) -> usize {
        part.first_panel * self.layout().panel_bytes / unit
    }

    /// The product on lanes: `args` but for the weights.
    ///
    /// # Safety
    /// The pointers of `args` are valid for its sizes; nobody else touches its sums.
    unsafe fn multiply_lanes(&self, args: &gemm::ChunkArgs<u8>, part: &Part) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                TensorType::F32 => {
                    let panels = &self.data.slice::<f32>()[self.panel_start(part, 4)..];
                    gemm::chunk_f32(self.path, &with_panels(args, panels));
                }
                TensorType::F16 => {
                    let panels = &self.data.slice::<u16>()[self.panel_start(part, 2)..];
                    gemm::chunk_f16(self.path, &with_panels(args, panels));
                }
                #[cfg(target_arch = "x86_64")]
                TensorType::Bf16 if self.uses_dots() => {
                    let panels = &self.data.slice::<f32>()[self.panel_start(part, 4)..];
                    gemm::chunk_bf16_dots(&with_panels(args, panels));
                }
                TensorType::Bf16 => {
                    let panels = &self.data.slice::<u16>()[self.panel_start(part, 2)..];
                    gemm::chunk_bf16(self.path, &with_panels(args, panels));
                }
                TensorType::Q8_0 | TensorType::Q4K | TensorType::Q5K | TensorType::Q6K => {
                    unreachable!("quantised weights are multiplied as integers")
                }
            }
        }
    }
}

/// What products on lanes have in common; the weights are put in later.
fn lane_args(
    values: *const u8,
    padded_inner: usize,
    part: &Part,
    out: *mut f32,
    out_row: usize,
) -> gemm::ChunkArgs<u8> {
    gemm::ChunkArgs {
        packed: values.cast::<f32>(),
        rows: part.rows,
        padded_inner,
        panels: std::ptr::null(),
        panel_count: part.features.div_ceil(LANES),
        out,
        out_features: out_row,
        features: part.features,
    }
}

/// `args` with the weights put in.
fn with_panels<Raw>(args: &gemm::ChunkArgs<u8>, panels: &[Raw]) -> gemm::ChunkArgs<Raw> {
    gemm::ChunkArgs {
        packed: args.packed,
        rows: args.rows,
        padded_inner: args.padded_inner,
        panels: panels.as_ptr(),
        panel_count: args.panel_count,
        out: args.out,
        out_features: args.out_features,
        features: args.features,
    }
}

#[cfg(test)]
pub(super) mod tests;
