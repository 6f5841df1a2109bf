//! Formats with super-blocks of 256 weights, whose sub-blocks have small integers as scales.
#![allow(unsafe_code, reason = "reads packed blocks by pointer")]

use std::ops::Range;

use super::format::{Block, Format, WORDS};
use super::small_blocks::{IQ4_VALUES, nibbles};
use crate::lanes::{Bytes, LANES, Lanes, map};

/// Weights of 4 bits, or of 5 bits if `FIFTH`, in eight sub-blocks with 6-bit scales and minima.
///
/// An f16 scale of the scales, an f16 scale of the minima, 12 bytes of scales and minima, 32 bytes
/// of fifth bits if there are any (bit `n` of them belongs to sub-block `n`), and 128 bytes with
/// two 4-bit weights each.
pub(crate) struct WithMinima<const FIFTH: bool>;
/// 4-bit weights.
pub(crate) type Q4K = WithMinima<false>;
/// 5-bit weights.
pub(crate) type Q5K = WithMinima<true>;

impl<const FIFTH: bool> Format for WithMinima<FIFTH> {
    const SUB_BLOCKS: usize = 8;
    const BLOCK_BYTES: usize = if FIFTH { 176 } else { 144 };
    const WORDS: Range<usize> = 16..Self::BLOCK_BYTES;
    const MINS: bool = true;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, sub_block: usize, index: usize) -> B {
        let first = if FIFTH { WORDS } else { 0 };
        // SAFETY: the words are some of a whole packed block.
        unsafe {
            let bytes: B = block.word(first + sub_block / 2 * WORDS + index);
            let low = bytes.right(sub_block % 2 * 4, 15);
            if FIFTH { low.or(block.word::<B>(index).right(sub_block, 1).left(4, 16)) } else { low }
        }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, index: usize) -> L {
        // SAFETY: bytes 0 and 1 are the scale of the scales.
        unsafe { block.halves::<L>(0).mul(L::load_u8(six_bits(block, index).0.as_ptr())) }
    }
    #[inline(always)]
    unsafe fn min<L: Lanes>(block: Block, index: usize) -> L {
        // SAFETY: bytes 2 and 3 are the scale of the minima.
        unsafe { block.halves::<L>(2).mul(L::load_u8(six_bits(block, index).1.as_ptr())) }
    }
}

/// The 6-bit scale and minimum of a sub-block for 16 features, from the 12 bytes of a Q4_K or Q5_K
/// block that hold the scales and minima of all eight sub-blocks.
///
/// # Safety
/// The block is a whole packed Q4_K or Q5_K block, and `sub_block` is below 8.
#[inline(always)]
unsafe fn six_bits(block: Block, sub_block: usize) -> ([u8; LANES], [u8; LANES]) {
    let (mut scale, mut min) = ([0; LANES], [0; LANES]);
    // SAFETY: the indices are between 4 and 15, and the block has 16 such bytes per feature.
    unsafe {
        if sub_block < 4 {
            let (scales, mins) = (block.bytes(4 + sub_block), block.bytes(8 + sub_block));
            for i in 0..LANES {
                (scale[i], min[i]) = (scales[i] & 63, mins[i] & 63);
            }
        } else {
            let (low, high_scales) = (block.bytes(8 + sub_block), block.bytes(sub_block));
            let high_mins = block.bytes(4 + sub_block);
            for i in 0..LANES {
                scale[i] = (low[i] & 15) | (high_scales[i] >> 6 << 4);
                min[i] = (low[i] >> 4) | (high_mins[i] >> 6 << 4);
            }
        }
    }
    (scale, min)
}

/// 6-bit weights in eight sub-blocks with two 8-bit scales each.
///
/// 128 bytes of low 4 bits, 64 bytes of high 2 bits, 16 signed 8-bit scales, an f16 scale of the
/// scales. Four sub-blocks share 64 bytes of low bits and 32 bytes of high bits.
pub(crate) struct Q6K;

impl Format for Q6K {
    const SUB_BLOCKS: usize = 8;
    const BLOCK_BYTES: usize = 210;
    const WORDS: Range<usize> = 0..192;
    const SCALES: usize = 2;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, sub_block: usize, index: usize) -> B {
        let (half, quarter) = (sub_block / 4, sub_block % 4);
        // SAFETY: the words are some of a whole packed block.
        unsafe {
            let upper: B = block.word(32 + half * WORDS + index);
            let upper = upper.right(quarter * 2, 3).left(4, 48);
            let bytes: B = block.word(half * 16 + quarter % 2 * WORDS + index);
            bytes.right(quarter / 2 * 4, 15).or(upper).sub(32)
        }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, index: usize) -> L {
        // SAFETY: the block has 16 scales, followed by the scale of the scales.
        unsafe { block.halves::<L>(16).mul(L::load_i8(block.bytes(index).as_ptr())) }
    }
}

/// 2-bit weights in eight sub-blocks with two 4-bit scales and two 4-bit minima each.
///
/// 16 bytes with a scale (low bits) and a minimum each, 64 bytes with four weights each, an f16
/// scale of the scales, an f16 scale of the minima. Four sub-blocks share 32 bytes.
pub(crate) struct Q2K;

impl Format for Q2K {
    const SUB_BLOCKS: usize = 8;
    const BLOCK_BYTES: usize = 84;
    const WORDS: Range<usize> = 16..80;
    const SCALES: usize = 2;
    const MINS: bool = true;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, sub_block: usize, index: usize) -> B {
        // SAFETY: the word is one of a whole packed block.
        unsafe { two_bits(block, 0, sub_block, index) }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, index: usize) -> L {
        // SAFETY: the bytes are some of a whole packed block.
        unsafe {
            let scales = map(block.bytes(index), |byte| byte & 15);
            block.halves::<L>(16).mul(L::load_u8(scales.as_ptr()))
        }
    }
    #[inline(always)]
    unsafe fn min<L: Lanes>(block: Block, index: usize) -> L {
        // SAFETY: the bytes are some of a whole packed block.
        unsafe {
            let mins = map(block.bytes(index), |byte| byte >> 4);
            block.halves::<L>(18).mul(L::load_u8(mins.as_ptr()))
        }
    }
}

/// Word `index` of a sub-block of 2-bit weights that begin with word `first` of the block.
///
/// # Safety
/// The word is one of a whole packed block, and the instruction set of `B` is available.
#[inline(always)]
pub(super) unsafe fn two_bits<B: Bytes>(
    block: Block,
    first: usize,
    sub_block: usize,
    index: usize,
) -> B {
    // SAFETY: the word is one of a whole packed block.
    unsafe { block.word::<B>(first + sub_block / 4 * WORDS + index).right(sub_block % 4 * 2, 3) }
}

/// 3-bit weights in eight sub-blocks with two 6-bit scales each.
///
/// 32 bytes of third bits (bit `n` of them belongs to sub-block `n`), 64 bytes with the low bits of
/// four weights each, 12 bytes of scales, an f16 scale of the scales. A weight is from -4 to 3, a
/// scale from -32 to 31.
pub(crate) struct Q3K;

impl Format for Q3K {
    const SUB_BLOCKS: usize = 8;
    const BLOCK_BYTES: usize = 110;
    const WORDS: Range<usize> = 0..96;
    const SCALES: usize = 2;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, sub_block: usize, index: usize) -> B {
        // SAFETY: the words are some of a whole packed block.
        unsafe {
            let third = block.word::<B>(index).right(sub_block, 1).left(2, 4);
            two_bits::<B>(block, WORDS, sub_block, index).or(third).sub(4)
        }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, index: usize) -> L {
        let mut scales = [0; LANES];
        // SAFETY: bytes 0 to 7 hold the low four bits of two scales each, bytes 8 to 11 the high
        // two bits of four scales each, and bytes 12 and 13 the scale of the scales.
        unsafe {
            let (low, high) = (block.bytes(index % 8), block.bytes(8 + index % 4));
            for i in 0..LANES {
                let low = low[i] >> (index / 8 * 4) & 15;
                scales[i] = (low | (high[i] >> (index / 4 * 2) & 3) << 4).wrapping_sub(32);
            }
            block.halves::<L>(12).mul(L::load_i8(scales.as_ptr()))
        }
    }
}

/// Indices of 4 bits into [`IQ4_VALUES`] in eight sub-blocks with 6-bit scales.
///
/// An f16 scale of the scales, 2 bytes with the high two bits of the scales, 4 bytes with the low
/// four bits of two scales each, 128 bytes with two indices each. A scale is from -32 to 31.
pub(crate) struct Iq4Xs;

impl Format for Iq4Xs {
    const SUB_BLOCKS: usize = 8;
    const BLOCK_BYTES: usize = 136;
    const WORDS: Range<usize> = 8..136;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, sub_block: usize, index: usize) -> B {
        // SAFETY: the words are some of a whole packed block.
        unsafe { nibbles::<B>(block, sub_block * WORDS / 2, index).look_up(&IQ4_VALUES) }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, index: usize) -> L {
        let mut scales = [0; LANES];
        // SAFETY: bytes 0 and 1 are the scale of the scales, bytes 2 and 3 hold the high bits of
        // four scales each, bytes 4 to 7 the low bits of two scales each.
        unsafe {
            let (high, low) = (block.bytes(2 + index / 4), block.bytes(4 + index / 2));
            for i in 0..LANES {
                let low = low[i] >> (index % 2 * 4) & 15;
                scales[i] = (low | (high[i] >> (index % 4 * 2) & 3) << 4).wrapping_sub(32);
            }
            block.halves::<L>(0).mul(L::load_i8(scales.as_ptr()))
        }
    }
}
