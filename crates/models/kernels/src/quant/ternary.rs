//! Formats whose weights are -1, 0 and 1, with an f16 scale for each 256 of them.
#![allow(unsafe_code, reason = "reads packed blocks by pointer")]

use std::ops::Range;

use super::format::{Block, Expanded, Format, WORDS};
use super::k_quants::two_bits;
use crate::lanes::{Bytes, Lanes, WORD_VECTOR_BYTES, map};

/// Weights as digits of base 3: 48 bytes with five digits each, four bytes with four digits each,
/// an f16 scale. The first digits of 32, 16 and 4 bytes are successive weights, then the second
/// digits of the same bytes, and so on.
pub(crate) struct Tq1_0;

impl Format for Tq1_0 {
    const SUB_BLOCKS: usize = 8;
    const BLOCK_BYTES: usize = 54;
    const WORDS: Range<usize> = 0..52;
    const EXPANDED: Expanded = Expanded::Always;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, sub_block: usize, index: usize) -> B {
        // The words of 160 weights, 80 weights and 16 weights.
        let (word, digit) = match sub_block * WORDS + index {
            at @ 0..40 => (at % 8, at / 8),
            at @ 40..60 => (8 + at % 4, (at - 40) / 4),
            at => (12, at - 60),
        };
        let power = [1, 3, 9, 27, 81][digit];
        // SAFETY: the word is one of a whole packed block, and the array holds 16 words.
        unsafe {
            let bytes = block.words.add(word * WORD_VECTOR_BYTES);
            let weights = map(bytes.cast::<[u8; WORD_VECTOR_BYTES]>().read(), |byte| {
                // Without its first digits, the byte is a fraction of 256.
                let fraction = u16::from(byte.wrapping_mul(power));
                ((fraction * 3) >> 8) as u8
            });
            B::load(weights.as_ptr()).sub(1)
        }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, _: usize) -> L {
        // SAFETY: the bytes are some of a whole packed block.
        unsafe { block.halves(0) }
    }
}

/// Weights of two bits each, from -1 to 2, and an f16 scale. Four sub-blocks share 32 bytes.
pub(crate) struct Tq2_0;

impl Format for Tq2_0 {
    const SUB_BLOCKS: usize = 8;
    const BLOCK_BYTES: usize = 66;
    const WORDS: Range<usize> = 0..64;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, sub_block: usize, index: usize) -> B {
        // SAFETY: the word is one of a whole packed block.
        unsafe { two_bits::<B>(block, 0, sub_block, index).sub(1) }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, _: usize) -> L {
        // SAFETY: the bytes are some of a whole packed block.
        unsafe { block.halves(0) }
    }
}
