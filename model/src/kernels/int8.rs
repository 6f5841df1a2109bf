//! Products with quantised weights, in integers.
//!
//! The 32 activations that meet a part of 32 weights are rounded to signed bytes with a scale of
//! their own; the products of bytes are added up exactly in i32, and the parts in f32, in
//! ascending order, each by `total = fused(f32(sum) * row_scale, weight_scale, total)` and, where the
//! format has minima, `total = fused(-row_scale * sum_of_bytes, min, total)`. As the integers are exact
//! and every other step is rounded alike everywhere, **all sets of instructions give the same
//! bits**, and so do all numbers of rows.
#![allow(unsafe_code, reason = "tasks write disjoint parts of one output")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: own part")]

mod activations;
mod chunk;
mod dots;
mod format;
mod set;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
pub(super) use activations::rounded;
use activations::{Packed, Rows};
use chunk::ChunkArgs;
pub(super) use set::DotSet;

use super::Threads;
#[cfg(target_arch = "x86_64")]
use super::amx::ROWS as TILE_ROWS;
use super::buffer::SharedMut;
use super::gemm::group_rows;
use super::lanes::LANES;
use super::matrix::Cut;
use super::quant::PART;
use crate::tensor_type::TensorType;

/// Rows from which tiles are faster than dot products.
#[cfg(target_arch = "x86_64")]
const TILES_FROM: usize = 12;

/// A packed quantised matrix.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    pub dtype: TensorType,
    pub in_features: usize,
    pub out_features: usize,
    /// Panels, as [`quant::pack`](super::quant::pack) makes them.
    pub panels: &'a [u8],
}

/// `out[r, o] = sum over k of x[r, k] * w[o, k]`, for `rows` rows; the sizes were checked.
pub(super) fn matmul(
    set: DotSet,
    weights: Weights<'_>,
    threads: &Threads,
    x: &[f32],
    rows: usize,
    out: &mut [f32],
) {
    let inner = weights.in_features;
    let groups = Groups::new(set, rows);
    let mut words = threads.scratch::<u8>(groups.packed_rows() * inner / 4 * groups.word_bytes);
    let mut scales = threads.scratch::<f32>(2 * groups.packed_rows() * inner / PART);
    let words = words.slice_mut::<u8>();
    let (scales, sums) =
        scales.slice_mut::<f32>().split_at_mut(groups.packed_rows() * inner / PART);
    let (to_words, to_scales) = (SharedMut::new(words), SharedMut::new(scales));
    let to_sums = SharedMut::new(sums);
    threads.for_each(rows.div_ceil(groups.size_max), |index| {
        let first = index * groups.size_max;
        let rows = Rows { x, inner, first, size: groups.size(first) };
        let parts = first * inner / PART;
        // SAFETY: groups lie one after the other, each written by its own task.
        unsafe {
            let packed = Packed {
                words: to_words.get().add(first * inner / 4 * groups.word_bytes),
                scales: to_scales.get().add(parts),
                sums: to_sums.get().add(parts),
            };
            groups.pack(rows, packed);
        }
    });
    let (words, scales, sums) = (&*words, &*scales, &*sums);
    let cut = Cut::new(threads, rows, 240, weights.out_features);
    let panel_bytes = inner / weights.dtype.block_len() * weights.dtype.block_bytes() * LANES;
    let out = SharedMut::new(out);
    threads.for_each(cut.task_count(), |task| {
        let part = cut.task(task);
        let parts = part.first_row * inner / PART;
        let to = part.first_row * weights.out_features + part.first_panel * LANES;
        let args = ChunkArgs {
            words: words[part.first_row * inner / 4 * groups.word_bytes..].as_ptr(),
            scales: scales[parts..].as_ptr(),
            sums: sums[parts..].as_ptr(),
            rows: part.rows,
            inner,
            panels: weights.panels[part.first_panel * panel_bytes..].as_ptr(),
            out: out.get().wrapping_add(to),
            out_features: weights.out_features,
            features: part.features,
        };
        groups.chunk(threads, &args, weights.dtype);
    });
}

/// How rows are put together: for tiles where that is faster, for dot products elsewhere.
#[derive(Clone, Copy)]
struct Groups {
    set: DotSet,
    rows: usize,
    tiles: bool,
    /// Rows of every group but perhaps the last; divides [`Cut`]'s chunks.
    size_max: usize,
    /// Bytes of four activations of a row.
    word_bytes: usize,
}

impl Groups {
    fn new(set: DotSet, rows: usize) -> Groups {
        #[cfg(target_arch = "x86_64")]
        if set.has_tiles() && rows >= TILES_FROM {
            return Groups { set, rows, tiles: true, size_max: TILE_ROWS, word_bytes: 4 };
        }
        let (size_max, word_bytes) = (set.group_max(), set.word_bytes());
        Groups { set, rows, tiles: false, size_max, word_bytes }
    }

    /// Rows of the group that begins with row `first`.
    fn size(&self, first: usize) -> usize {
        if self.tiles { self.size_max } else { group_rows(self.rows - first, self.size_max) }
    }

    /// Rows of all groups together.
    fn packed_rows(&self) -> usize {
        let last = (self.rows - 1) / self.size_max * self.size_max;
        last + self.size(last)
    }

    /// # Safety
    /// `packed` has room for the group.
    unsafe fn pack(&self, rows: Rows<'_>, packed: Packed) {
        // SAFETY: the caller's promise; tiles are chosen where the set has them.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if self.tiles {
                return tiles::pack(rows, packed);
            }
            self.set.pack(rows, packed);
        }
    }

    fn chunk(&self, threads: &Threads, args: &ChunkArgs, dtype: TensorType) {
        // SAFETY: `matmul` was given checked sizes and gives each task its own sums; tiles are
        // chosen where the set has them.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if self.tiles {
                let mut spare = threads.scratch::<u8>(tiles::expanded_len(args.inner));
                return tiles::chunk(args, dtype, spare.slice_mut::<u8>().as_mut_ptr());
            }
            let _ = threads;
            self.set.chunk(args, dtype);
        }
    }
}

#[cfg(test)]
mod tests;
