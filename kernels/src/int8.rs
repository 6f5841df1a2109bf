//! Products with quantised weights, in integers.
//!
//! The 32 activations that meet a part of 32 weights are rounded to signed bytes with a scale of
//! their own; the products of bytes are added up exactly in i32, and the parts in f32, in
//! ascending order, each by `total = fused(f32(sum) * row_scale, weight_scale, total)` and, where the
//! format has minima, `total = fused(-row_scale * sum_of_bytes, min, total)`. As the integers are exact
//! and every other step is rounded alike everywhere, **all sets of instructions give the same
//! bits**, and so do all numbers of rows.
#![allow(unsafe_code, reason = "runs the chosen set's kernels")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: the caller's")]

mod activations;
mod chunk;
mod dots;
mod format;
#[cfg(target_arch = "aarch64")]
mod neon;
mod set;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
pub(super) use activations::rounded;
pub(super) use activations::{PackedGroup, Rows};
pub(super) use chunk::ChunkArgs;
pub(super) use set::DotSet;

use super::Threads;
#[cfg(target_arch = "x86_64")]
use super::amx::ROWS as TILE_ROWS;
use super::gemm::group_rows;
use crate::tensor_type::TensorType;

/// Rows from which tiles are faster than dot products.
#[cfg(target_arch = "x86_64")]
const TILES_FROM: usize = 12;

/// How rows are put together: for tiles where that is faster, for dot products elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Groups {
    set: DotSet,
    tiles: bool,
}

impl Groups {
    /// For `rows` rows together.
    pub(super) fn new(set: DotSet, rows: usize) -> Groups {
        #[cfg(target_arch = "x86_64")]
        let tiles = set.has_tiles() && rows >= TILES_FROM;
        #[cfg(not(target_arch = "x86_64"))]
        let (tiles, _) = (false, rows);
        Groups { set, tiles }
    }

    /// Rows of every group but perhaps the last.
    pub(super) fn size_max(self) -> usize {
        #[cfg(target_arch = "x86_64")]
        if self.tiles {
            return TILE_ROWS;
        }
        self.set.group_max()
    }

    /// Rows of the next group when `left` are left.
    pub(super) fn size(self, left: usize) -> usize {
        if self.tiles { self.size_max() } else { group_rows(left, self.size_max()) }
    }

    /// Bytes of four activations of a row.
    pub(super) fn word_bytes(self) -> usize {
        if self.tiles { 4 } else { self.set.word_bytes() }
    }

    /// Packs a part of a group's columns.
    ///
    /// # Safety
    /// `to` has room for it.
    pub(super) unsafe fn pack(self, rows: Rows<'_>, to: PackedGroup) {
        // SAFETY: the caller's promise; tiles are chosen where the set has them.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if self.tiles {
                return tiles::pack(rows, to);
            }
            self.set.pack(rows, to);
        }
    }

    /// `out[r, o] = sum over k of x[r, k] * w[o, k]` for the rows and features of a task.
    ///
    /// # Safety
    /// The pointers of `args` are valid for its sizes, the rows packed by these groups, and what is
    /// written is touched by nobody else.
    pub(super) unsafe fn chunk(self, threads: &Threads, args: &ChunkArgs, dtype: TensorType) {
        // SAFETY: the caller's promise; tiles are chosen where the set has them.
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
