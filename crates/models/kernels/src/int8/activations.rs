//! Quantization and packing of activations.
//!
//! Each 32 successive values of a row become signed bytes with a common scale: their largest
//! magnitude divided by 127. The bytes of a row depend on that row only.
#![allow(unsafe_code, reason = "writes packed activations by pointer")]

use super::dots::Dots;
use crate::quant::{SUB_BLOCK, round_to_byte};
use crate::source_rows::SourceRows;

/// Number of sums of a sub-block of activations: of all, of the first half and of the second half.
/// The first is multiplied by minima of whole sub-blocks of weights, the others by minima of
/// halves.
pub(crate) const SUMS: usize = 3;
/// Maximum number of rows of a group.
const ROWS_MAX: usize = 16;

/// 32 quantized activations.
pub(super) struct SubBlock {
    /// Value of the integer 1. NaN if an activation is infinite or NaN, zero if all are so small
    /// that the scale would be subnormal.
    pub(super) scale: f32,
    /// The quantized activations, from -127 to 127; unspecified if the scale is NaN.
    pub(super) bytes: [i8; SUB_BLOCK],
    /// Sums of the first 16 bytes and of the last 16.
    pub(super) halves: [i32; 2],
}

impl SubBlock {
    pub(super) const ZERO: SubBlock =
        SubBlock { scale: 0.0, bytes: [0; SUB_BLOCK], halves: [0; 2] };

    /// Quantizes 32 activations.
    #[inline(always)]
    pub(super) fn of(values: &[f32; SUB_BLOCK]) -> SubBlock {
        // Compare magnitudes as integers, so that NaN is the largest.
        let mut largest = 0;
        for value in values {
            largest = largest.max(value.to_bits() & 0x7fff_ffff);
        }
        let Some((scale, inverse)) = scale_of(largest) else { return SubBlock::ZERO };
        let mut bytes = [0; SUB_BLOCK];
        for (byte, value) in bytes.iter_mut().zip(values) {
            *byte = round_to_byte(value * inverse);
        }
        // Separate loops, so that the compiler can vectorize all three.
        let mut halves = [0, 0];
        for (sum, half) in halves.iter_mut().zip(bytes.as_chunks::<{ SUB_BLOCK / 2 }>().0) {
            for byte in half {
                *sum += i32::from(*byte);
            }
        }
        SubBlock { scale, bytes, halves }
    }
}

/// The scale of a sub-block whose largest magnitude has the bits `largest`, and its inverse. `None`
/// if all are so small that the scale would be subnormal.
#[inline(always)]
pub(super) fn scale_of(largest: u32) -> Option<(f32, f32)> {
    let scale =
        if largest >= f32::INFINITY.to_bits() { f32::NAN } else { f32::from_bits(largest) / 127.0 };
    // A comparison with NaN is false.
    if scale < f32::MIN_POSITIVE { None } else { Some((scale, 1.0 / scale)) }
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
    /// The initial values of sums of products with unsigned weights, in the same shape.
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
    /// Quantizes the group: writes scales, sums and offsets, and calls `put` with the bytes of each
    /// sub-block, the index of the sub-block and the row in the group.
    ///
    /// # Safety
    /// The instruction set of `D` is available, and `packed` is writable for the group (see
    /// [`PackedGroup`]).
    #[inline(always)]
    unsafe fn each<D: Dots>(
        &self,
        packed: &PackedGroup,
        mut put: impl FnMut(&[i8; SUB_BLOCK], usize, usize),
    ) {
        let (mut scales, mut halves) = ([0.0; ROWS_MAX], [[0; ROWS_MAX]; 2]);
        for index in 0..self.source.columns / SUB_BLOCK {
            for row in 0..self.size {
                let mut sub_block = SubBlock::ZERO;
                // As an argument of a function of `Option`, `quantize` would be compiled without
                // the instruction set of the caller.
                if row < self.source.rows
                    && let Some(values) = self.source.row(row)[index * SUB_BLOCK..].first_chunk()
                {
                    // SAFETY: the instruction set of `D` is available.
                    sub_block = unsafe { D::quantize(values) };
                }
                scales[row] = sub_block.scale;
                [halves[0][row], halves[1][row]] = sub_block.halves;
                put(&sub_block.bytes, index, row);
            }
            let sums = [0, 1, 2].map(|sum| (index * SUMS + sum) * self.size);
            for row in 0..self.size {
                let [first, last] = [halves[0][row], halves[1][row]];
                // SAFETY: `index * size + row` is below `columns / 32 * rows`, the number of
                // scales. The indices of sums are below `SUMS` times that number.
                unsafe {
                    packed.scales.add(index * self.size + row).write(scales[row]);
                    for (to, sum) in sums.into_iter().zip([first + last, first, last]) {
                        #[allow(clippy::cast_precision_loss, reason = "at most 32 * 127")]
                        let scaled = scales[row] * sum as f32;
                        packed.sums.add(to + row).write(-scaled);
                        packed.offsets.add(to + row).write(-128 * sum);
                    }
                }
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
    // SAFETY: the requirements are the same.
    unsafe { rows.each::<D>(&packed, put) }
}

/// Packs a group as the rows of AMX tiles.
///
/// # Safety
/// As for [`pack`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn pack_tiles<D: Dots>(rows: GroupRows<'_>, packed: PackedGroup) {
    let put = |bytes: &[i8; SUB_BLOCK], index: usize, row: usize| {
        let at = (index * rows.size + row) * SUB_BLOCK;
        // SAFETY: `at + 32` is at most `columns * rows`, the number of bytes.
        unsafe { packed.words.add(at).cast::<[i8; SUB_BLOCK]>().write_unaligned(*bytes) }
    };
    // SAFETY: the requirements are the same.
    unsafe { rows.each::<D>(&packed, put) }
}

/// `x`, rounded in the way that products round it.
#[cfg(test)]
pub(crate) fn rounded(x: &[f32]) -> Vec<f32> {
    let sub_blocks = x.as_chunks::<SUB_BLOCK>().0.iter().map(SubBlock::of);
    sub_blocks
        .flat_map(|sub_block| sub_block.bytes.map(|byte| f32::from(byte) * sub_block.scale))
        .collect()
}
