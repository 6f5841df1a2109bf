//! Quantisation and packing of activations.
//!
//! Each 32 successive values of a row become signed bytes with a common scale: their largest
//! magnitude divided by 127. The bytes of a row depend on that row only.
#![allow(unsafe_code, reason = "writes packed activations by pointer")]

use super::dots::Dots;
use crate::quant::{SUB_BLOCK, round_to_byte};
use crate::source_rows::SourceRows;

/// 32 quantised activations.
struct SubBlock {
    /// Value of the integer 1. NaN if an activation is infinite or NaN, zero if all are so small
    /// that the scale would be subnormal.
    scale: f32,
    /// The quantised activations, from -127 to 127.
    bytes: [i8; SUB_BLOCK],
    /// Negated sums of the quantised activations, times the scale: of all, of the first 16 and of
    /// the last 16.
    sums: [f32; SUMS],
    /// The same sums of the integers, times -128.
    offsets: [i32; SUMS],
}

/// Number of sums of a sub-block of activations: of all, of the first half and of the second half.
/// Minima of a sub-block of weights meet the first, minima of half of one meet the others.
pub(crate) const SUMS: usize = 3;

impl SubBlock {
    const ZERO: SubBlock =
        SubBlock { scale: 0.0, bytes: [0; SUB_BLOCK], sums: [0.0; SUMS], offsets: [0; SUMS] };

    /// Quantises 32 activations.
    #[inline(always)]
    fn of(values: &[f32; SUB_BLOCK]) -> SubBlock {
        // Compare magnitudes as integers, so that NaN is the largest.
        let mut largest = 0;
        for value in values {
            largest = largest.max(value.to_bits() & 0x7fff_ffff);
        }
        let scale = if largest >= f32::INFINITY.to_bits() {
            f32::NAN
        } else {
            f32::from_bits(largest) / 127.0
        };
        if scale < f32::MIN_POSITIVE {
            return SubBlock::ZERO;
        }
        let inverse = 1.0 / scale;
        let mut bytes = [0; SUB_BLOCK];
        for (byte, value) in bytes.iter_mut().zip(values) {
            *byte = round_to_byte(value * inverse);
        }
        // Separate loops, so that the compiler can vectorize all three.
        let mut sums = [0, 0];
        for (sum, half) in sums.iter_mut().zip(bytes.as_chunks::<{ SUB_BLOCK / 2 }>().0) {
            for byte in half {
                *sum += i32::from(*byte);
            }
        }
        let integers = [sums[0] + sums[1], sums[0], sums[1]];
        #[allow(clippy::cast_precision_loss, reason = "at most 32 * 127")]
        let sums = integers.map(|sum| -(scale * sum as f32));
        SubBlock { scale, bytes, sums, offsets: integers.map(|sum| sum * -128) }
    }
}

/// Memory for the packed columns of a group. All pointers are writable for the columns and rows of
/// the [`GroupRows`] that are packed.
#[derive(Clone, Copy)]
pub(crate) struct PackedGroup {
    /// `[columns / 4][rows]` words for dot products, or `[columns / 32][rows][32]` bytes for AMX
    /// tiles.
    pub(crate) words: *mut u8,
    /// Scales, `[columns / 32][rows]`.
    pub(crate) scales: *mut f32,
    /// Negated sums, `[columns / 32][SUMS][rows]`.
    pub(crate) sums: *mut f32,
    /// What sums of products with unsigned weights start with, in the same shape.
    pub(crate) offsets: *mut i32,
}

/// The rows of a group that is to be packed.
#[derive(Clone, Copy)]
pub(crate) struct GroupRows<'a> {
    /// At most `size` rows. The number of columns is a multiple of 32.
    pub(crate) source: SourceRows<'a>,
    /// Number of rows of the group. Rows that the source does not have become zero.
    pub(crate) size: usize,
}

impl GroupRows<'_> {
    /// Quantises the group: writes scales, sums and offsets, and calls `put` with the bytes of each
    /// sub-block, the index of the sub-block and the row in the group.
    ///
    /// # Safety
    /// `packed` is writable for the group (see [`PackedGroup`]).
    #[inline(always)]
    unsafe fn each(
        &self,
        packed: &PackedGroup,
        mut put: impl FnMut(&[i8; SUB_BLOCK], usize, usize),
    ) {
        for index in 0..self.source.columns / SUB_BLOCK {
            for row in 0..self.size {
                let mut sub_block = SubBlock::ZERO;
                // As an argument of a function of `Option`, `SubBlock::of` would be compiled
                // without the instruction set of the caller.
                if row < self.source.rows
                    && let Some(values) = self.source.row(row)[index * SUB_BLOCK..].first_chunk()
                {
                    sub_block = SubBlock::of(values);
                }
                let at = index * self.size + row;
                // SAFETY: `at` is below `columns / 32 * rows`, the number of scales. The other
                // indices are below `SUMS` times that number.
                unsafe {
                    packed.scales.add(at).write(sub_block.scale);
                    for i in 0..SUMS {
                        let at = (index * SUMS + i) * self.size + row;
                        packed.sums.add(at).write(sub_block.sums[i]);
                        packed.offsets.add(at).write(sub_block.offsets[i]);
                    }
                }
                put(&sub_block.bytes, index, row);
            }
        }
    }
}

/// Packs a group for the dot products of `D`.
///
/// # Safety
/// The instruction set of `D` is available, and `packed` is writable for the group (see
/// [`PackedGroup`]).
#[inline(always)]
pub(super) unsafe fn pack<D: Dots>(rows: GroupRows<'_>, packed: PackedGroup) {
    let put = |bytes: &[i8; SUB_BLOCK], index: usize, row: usize| {
        for (i, word) in bytes.as_chunks::<4>().0.iter().enumerate() {
            let at = (index * SUB_BLOCK / 4 + i) * rows.size + row;
            // SAFETY: `at` is below `columns / 4 * rows`, the number of words.
            unsafe { D::put(*word, packed.words.add(at * D::WORD)) }
        }
    };
    // SAFETY: `packed` is writable for the group.
    unsafe { rows.each(&packed, put) }
}

/// Packs a group as the rows of AMX tiles.
///
/// # Safety
/// `packed` is writable for the group (see [`PackedGroup`]).
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn pack_tiles(rows: GroupRows<'_>, packed: PackedGroup) {
    let put = |bytes: &[i8; SUB_BLOCK], index: usize, row: usize| {
        let at = (index * rows.size + row) * SUB_BLOCK;
        // SAFETY: `at + 32` is at most `columns * rows`, the number of bytes.
        unsafe { packed.words.add(at).cast::<[i8; SUB_BLOCK]>().write_unaligned(*bytes) }
    };
    // SAFETY: `packed` is writable for the group.
    unsafe { rows.each(&packed, put) }
}

/// `x`, rounded in the way that products round it.
#[cfg(test)]
pub(crate) fn rounded(x: &[f32]) -> Vec<f32> {
    let sub_blocks = x.as_chunks::<SUB_BLOCK>().0.iter().map(SubBlock::of);
    sub_blocks
        .flat_map(|sub_block| sub_block.bytes.map(|byte| f32::from(byte) * sub_block.scale))
        .collect()
}
