//! GEMM with quantized weights, in integers, as ggml does it.
//!
//! Weights are divided into sub-blocks of 32 along the inner dimension. The 32 activations of a row
//! that meet a sub-block are quantized to signed bytes with one scale for the 32. The products of
//! bytes are added exactly in i32. Sub-blocks are added in f32 in ascending order, each by
//! `total = fma(f32(sum) * row_scale, weight_scale, total)` and, if the format has minima,
//! `total = fma(-row_scale * sum_of_bytes, min, total)`. Some formats have two scales and minima
//! for a sub-block: one for each half of it, which are added one after the other.
//!
//! **Invariant:** the integers are exact and all other operations are rounded in the same way on
//! every instruction set. So all instruction sets, and all batch sizes, give the same bits.
#![allow(unsafe_code, reason = "runs kernels of the detected dot-product set")]

mod activations;
mod chunk;
mod dots;
#[cfg(target_arch = "aarch64")]
mod neon;
mod set;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
pub(super) use activations::rounded;
pub(super) use activations::{GroupRows, PackedGroup, SUMS};
pub(super) use chunk::Int8Chunk;
pub(super) use set::DotSet;

#[cfg(target_arch = "x86_64")]
use crate::amx::tile::AMX_TILE_ROWS as TILE_ROWS;
use crate::gemm::group_rows;
use crate::tensor_type::TensorType;
#[cfg(target_arch = "x86_64")]
use crate::tensor_type::with_format;
use crate::threads::Threads;

/// Number of rows from which AMX tiles are faster than dot products.
#[cfg(target_arch = "x86_64")]
const TILE_ROWS_MIN: usize = 12;

/// How the rows of a batch are grouped and packed: for AMX tiles if these are available and faster,
/// otherwise for dot products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Groups {
    set: DotSet,
    tiles: bool,
}

impl Groups {
    /// The grouping for a batch of `rows` rows.
    pub(super) fn new(set: DotSet, rows: usize) -> Groups {
        #[cfg(target_arch = "x86_64")]
        let tiles = set.has_tiles() && rows >= TILE_ROWS_MIN;
        #[cfg(not(target_arch = "x86_64"))]
        let (tiles, _) = (false, rows);
        Groups { set, tiles }
    }

    /// Number of rows of every group except possibly the last.
    pub(super) fn size_max(self) -> usize {
        #[cfg(target_arch = "x86_64")]
        if self.tiles {
            return TILE_ROWS;
        }
        self.set.group_max()
    }

    /// Number of rows of the next group if `left` rows are left.
    pub(super) fn size(self, left: usize) -> usize {
        if self.tiles { self.size_max() } else { group_rows(left, self.size_max()) }
    }

    /// Number of bytes of four packed activations of a row.
    pub(super) fn word_bytes(self) -> usize {
        if self.tiles { 4 } else { self.set.word_bytes() }
    }

    /// Packs some columns of a group.
    ///
    /// # Safety
    /// `to` is writable for these columns of the group (see [`PackedGroup`]).
    pub(super) unsafe fn pack(self, rows: GroupRows<'_>, to: PackedGroup) {
        // SAFETY: `to` is writable for the group. `tiles` is only true if the set has AMX tiles,
        // which includes AVX-512 VNNI.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if self.tiles {
                return tiles::pack(rows, to);
            }
            self.set.pack(rows, to);
        }
    }

    /// Computes a task: `out[r, o] = sum over k of x[r, k] * w[o, k]` for its rows and features.
    ///
    /// # Safety
    /// `args` is valid (see [`Int8Chunk`]), and its rows were packed with this grouping.
    pub(super) unsafe fn chunk(self, threads: &Threads, args: &Int8Chunk, dtype: TensorType) {
        // SAFETY: `args` is valid. `tiles` is only true if the set has AMX tiles of bytes and
        // AVX-512 VNNI. The scratch memory has the size of an expanded panel and is aligned to a
        // cache line.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if self.tiles {
                let mut spare = threads.scratch::<u8>(tiles::expanded_len(args.inner));
                let spare = spare.slice_mut::<u8>().as_mut_ptr();
                return with_format!(dtype, F => tiles::chunk::<F>(args, spare));
            }
            self.set.chunk(threads, args, dtype);
        }
    }
}

#[cfg(test)]
mod tests;
