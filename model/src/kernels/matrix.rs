//! Weights packed for the kernels, and the product with rows of activations.
//!
//! Life: [`Matrix::pack`] at load, from the bytes of the file; read by every step; never changed.
//! Packed weights take the size of the file's (padded to whole panels): there is no second copy,
//! so [`Matrix::row`] unpacks one where a row itself is needed (an embedding that is tied).
//!
//! | type | layout | computed in |
//! |---|---|---|
//! | `F32` | `[panel][in][16]` | f32 |
//! | `F16` | `[panel][in][16]` | f32, weights widened |
//! | `Bf16` | `[panel][in / 2][16][2]`, `in` padded to 32 | see [`kernels`](super) on precision |
//! | quantised | `[panel][block][byte][16]`: the file's blocks, 16 rows side by side | f32 |
#![allow(unsafe_code, reason = "tasks write disjoint parts of one output")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: own part")]

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::buffer::{Buffer, SharedMut};
use super::error::KernelError;
use super::gemm::{self, ChunkArgs};
use super::lanes::LANES;
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
        if out_features == 0 || in_features == 0 {
            return Err(KernelError::Empty { out_features, in_features });
        }
        let (block_len, block_bytes) = (dtype.block_len(), dtype.block_bytes());
        if !in_features.is_multiple_of(block_len) {
            return Err(KernelError::PartialBlock { dtype, expected: block_len, got: in_features });
        }
        let row_bytes = in_features / block_len * block_bytes;
        let expected = out_features.saturating_mul(row_bytes);
        if bytes.len() != expected {
            let got = bytes.len();
            return Err(KernelError::WrongByteCount {
                dtype,
                out_features,
                in_features,
                expected,
                got,
            });
        }
        let padded_inner = match dtype {
            TensorType::Bf16 => in_features.next_multiple_of(BF16_INNER),
            _ => in_features,
        };
        let panels = out_features.div_ceil(LANES);
        let data = match dtype {
            TensorType::F32 => {
                let mut data = Buffer::zeroed::<f32>(panels * padded_inner * LANES);
                let read = |at: usize| {
                    f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
                };
                pack_singles(data.slice_mut(), out_features, in_features, |index| read(4 * index));
                data
            }
            TensorType::F16 => {
                let mut data = Buffer::zeroed::<u16>(panels * padded_inner * LANES);
                let read = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
                pack_singles(data.slice_mut(), out_features, in_features, |index| read(2 * index));
                data
            }
            TensorType::Bf16 => {
                let mut data = Buffer::zeroed::<u16>(panels * padded_inner * LANES);
                pack_pairs(data.slice_mut(), in_features, padded_inner, bytes);
                data
            }
            TensorType::Q8_0 | TensorType::Q4K | TensorType::Q5K | TensorType::Q6K => {
                let mut data = Buffer::zeroed::<u8>(panels * row_bytes * LANES);
                quant::pack(data.slice_mut(), row_bytes, bytes);
                data
            }
        };
        Ok(Matrix { dtype, out_features, in_features, padded_inner, path, data })
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
        self.data.len()
    }

    /// Unpacks row `index` of the weights into `out`, `[in_features]`, widened to f32.
    ///
    /// # Panics
    /// If there is no such row or `out` is of another size.
    pub fn row(&self, index: usize, out: &mut [f32]) {
        assert!(index < self.out_features, "row {index} of {}", self.out_features);
        assert_eq!(out.len(), self.in_features, "a row has {} values", self.in_features);
        let (panel, lane) = (index / LANES, index % LANES);
        let start = panel * self.padded_inner * LANES;
        match self.dtype {
            TensorType::F32 => {
                let panel = &self.data.slice::<f32>()[start..];
                for (k, value) in out.iter_mut().enumerate() {
                    *value = panel[k * LANES + lane];
                }
            }
            TensorType::F16 => {
                let panel = &self.data.slice::<u16>()[start..];
                for (k, value) in out.iter_mut().enumerate() {
                    *value = half::f16::from_bits(panel[k * LANES + lane]).to_f32();
                }
            }
            TensorType::Bf16 => {
                let panel = &self.data.slice::<u16>()[start..];
                for (k, value) in out.iter_mut().enumerate() {
                    let at = (k / 2 * LANES + lane) * 2 + k % 2;
                    *value = half::bf16::from_bits(panel[at]).to_f32();
                }
            }
            TensorType::Q8_0 | TensorType::Q4K | TensorType::Q5K | TensorType::Q6K => {
                let panel = &self.data.slice::<u8>()[panel * self.row_bytes() * LANES..];
                let runs = panel.chunks_exact(LANES).take(self.row_bytes());
                let blocks: Vec<u8> = runs.map(|run| run[lane]).collect();
                quant::dequantise(self.dtype, &blocks, out);
            }
        }
    }

    /// Bytes of a row in the file.
    fn row_bytes(&self) -> usize {
        let (block_len, block_bytes) = (self.dtype.block_len(), self.dtype.block_bytes());
        self.in_features / block_len * block_bytes
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
        #[cfg(target_arch = "x86_64")]
        if self.uses_tiles() {
            return self.matmul_tiles(threads, x, rows, out);
        }
        self.matmul_lanes(threads, x, rows, out);
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

    /// The product in bf16 on AMX tiles.
    #[cfg(target_arch = "x86_64")]
    fn matmul_tiles(&self, threads: &Threads, x: &[f32], rows: usize, out: &mut [f32]) {
        let padded_inner = self.padded_inner;
        let row_tile_len = amx::ROWS * padded_inner;
        let mut packed = threads.scratch::<u16>(amx::packed_len(rows, padded_inner));
        let packed = packed.slice_mut::<u16>();
        let row_tiles = SharedMut::new(packed);
        let pack = |index: usize| {
            // SAFETY: tile `index` of `packed`, which only this task writes; the path has the set.
            unsafe {
                let start = row_tiles.get().add(index * row_tile_len);
                let part = std::slice::from_raw_parts_mut(start, row_tile_len);
                amx::pack_row_tile(x, self.in_features, padded_inner, index, part);
            }
        };
        let tiles = rows.div_ceil(amx::ROWS);
        if tiles <= 2 {
            (0..tiles).for_each(pack);
        } else {
            threads.for_each(tiles, pack);
        }
        let packed = &*packed;
        let weights = self.data.slice::<u16>();
        let cut = Cut::new(threads, rows, 256, self.out_features);
        let sums = SharedMut::new(out);
        threads.for_each(cut.task_count(), |task| {
            let part = cut.task(task);
            let mut waiting = threads.scratch::<f32>(amx::waiting_len(part.rows));
            let args = amx::TileArgs {
                packed: packed[part.first_row * padded_inner..].as_ptr(),
                rows: part.rows,
                padded_inner,
                panels: weights[part.first_panel * LANES * padded_inner..].as_ptr(),
                out: sums
                    .get()
                    .wrapping_add(part.first_row * self.out_features + part.first_panel * LANES),
                out_features: self.out_features,
                features: part.features,
                waiting: waiting.slice_mut::<f32>().as_mut_ptr(),
            };
            // SAFETY: the path proves that AMX may be used; `matmul` has checked all sizes, and
            // tasks write disjoint rows or features.
            unsafe { amx::chunk(&args) }
        });
    }

    /// The product in f32 on lanes.
    fn matmul_lanes(&self, threads: &Threads, x: &[f32], rows: usize, out: &mut [f32]) {
        let group_max = gemm::group_max(self.path);
        let dots = self.uses_dots();
        let padded_inner = if dots { self.padded_inner / 2 } else { self.padded_inner };
        let mut packed = threads.scratch::<f32>(gemm::packed_rows(rows, group_max) * padded_inner);
        let packed = packed.slice_mut::<f32>();
        let groups = SharedMut::new(packed);
        threads.for_each(rows.div_ceil(group_max), |group_index| {
            let first = group_index * group_max;
            let group = gemm::group_rows(rows - first, group_max);
            // SAFETY: groups lie one after the other in `packed`, each written by its task only.
            let part = unsafe {
                let start = groups.get().add(first * padded_inner);
                std::slice::from_raw_parts_mut(start, group * padded_inner)
            };
            if dots {
                gemm::pack_group_pairs(x, self.in_features, first, group, part);
            } else {
                gemm::pack_group(x, self.in_features, padded_inner, first, group, part);
            }
        });
        let packed = &*packed;
        let row_chunk = (240 / group_max * group_max).max(group_max);
        let cut = Cut::new(threads, rows, row_chunk, self.out_features);
        let sums = SharedMut::new(out);
        threads.for_each(cut.task_count(), |task| {
            let part = cut.task(task);
            let args = ChunkArgs {
                packed: packed[part.first_row * padded_inner..].as_ptr(),
                rows: part.rows,
                padded_inner,
                panels: std::ptr::null(),
                panel_count: part.features.div_ceil(LANES),
                // Tasks write disjoint rows or features.
                out: sums
                    .get()
                    .wrapping_add(part.first_row * self.out_features + part.first_panel * LANES),
                out_features: self.out_features,
                features: part.features,
            };
            self.chunk(threads, &args, part.first_panel);
        });
    }

    /// One task of the product: `args` but for the weights, which begin at `first_panel`.
    fn chunk(&self, threads: &Threads, args: &ChunkArgs<u8>, first_panel: usize) {
        let start = first_panel * self.padded_inner * LANES;
        match self.dtype {
            TensorType::F32 => {
                let args = with_panels(args, &self.data.slice::<f32>()[start..]);
                // SAFETY: `matmul` has checked all sizes and gives each task its own sums.
                unsafe { gemm::chunk_f32(self.path, &args) }
            }
            TensorType::F16 => {
                let args = with_panels(args, &self.data.slice::<u16>()[start..]);
                // SAFETY: as above.
                unsafe { gemm::chunk_f16(self.path, &args) }
            }
            #[cfg(target_arch = "x86_64")]
            TensorType::Bf16 if self.uses_dots() => {
                let args = with_panels(args, &self.data.slice::<f32>()[start / 2..]);
                // SAFETY: as above, and the path has the set.
                unsafe { gemm::chunk_bf16_dots(&args) }
            }
            TensorType::Bf16 => {
                let args = with_panels(args, &self.data.slice::<u16>()[start..]);
                // SAFETY: as above.
                unsafe { gemm::chunk_bf16(self.path, &args) }
            }
            TensorType::Q8_0 | TensorType::Q4K | TensorType::Q5K | TensorType::Q6K => {
                let start = first_panel * self.row_bytes() * LANES;
                let args = with_panels(args, &self.data.slice::<u8>()[start..]);
                let mut spare = threads.scratch::<f32>(args.rows * LANES);
                let spare = spare.slice_mut::<f32>().as_mut_ptr();
                // SAFETY: as above; `spare` has 16 values a row.
                unsafe { gemm::chunk_quantised(self.path, &args, self.dtype, spare) }
            }
        }
    }
}

/// How a product is cut into tasks: chunks of rows, which share their activations, times chunks of
/// panels, which share their weights.
struct Cut {
    rows: usize,
    row_chunk: usize,
    out_features: usize,
    panel_chunk: usize,
}

/// One task of a [`Cut`].
struct Part {
    first_row: usize,
    rows: usize,
    first_panel: usize,
    features: usize,
}

impl Cut {
    /// At most `row_chunk` rows a task, at most 32 panels, and some tasks for each thread.
    fn new(threads: &Threads, rows: usize, row_chunk: usize, out_features: usize) -> Cut {
        let panels = out_features.div_ceil(LANES);
        let wanted = (threads.count() * 8).div_ceil(rows.div_ceil(row_chunk));
        let panel_chunk = panels.div_ceil(wanted).next_multiple_of(4).min(32);
        Cut { rows, row_chunk, out_features, panel_chunk }
    }

    fn row_chunks(&self) -> usize {
        self.rows.div_ceil(self.row_chunk)
    }

    fn task_count(&self) -> usize {
        self.row_chunks() * self.out_features.div_ceil(self.panel_chunk * LANES)
    }

    /// Tasks that share weights follow each other.
    fn task(&self, index: usize) -> Part {
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

/// `args` with the weights put in.
fn with_panels<Raw>(args: &ChunkArgs<u8>, panels: &[Raw]) -> ChunkArgs<Raw> {
    ChunkArgs {
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

/// Fills `[panel][in][16]` from a row-major source.
fn pack_singles<T: Copy>(
    packed: &mut [T],
    out_features: usize,
    in_features: usize,
    read: impl Fn(usize) -> T,
) {
    for (index, panel) in packed.chunks_exact_mut(in_features * LANES).enumerate() {
        let live = LANES.min(out_features - index * LANES);
        for lane in 0..live {
            let row = (index * LANES + lane) * in_features;
            for k in 0..in_features {
                panel[k * LANES + lane] = read(row + k);
            }
        }
    }
}

/// Fills `[panel][in / 2][16][2]` from row-major bf16 bytes.
fn pack_pairs(packed: &mut [u16], in_features: usize, padded_inner: usize, bytes: &[u8]) {
    let mut rows = bytes.chunks_exact(2 * in_features);
    for panel in packed.chunks_exact_mut(padded_inner * LANES) {
        for (lane, row) in rows.by_ref().take(LANES).enumerate() {
            for (k, value) in row.chunks_exact(2).enumerate() {
                let at = (k / 2 * LANES + lane) * 2 + k % 2;
                panel[at] = u16::from_le_bytes([value[0], value[1]]);
            }
        }
    }
}

#[cfg(test)]
mod tests;
