//! Formats with blocks of 32 weights, without super-blocks.
#![allow(unsafe_code, reason = "reads packed blocks by pointer")]

use std::ops::Range;

use super::format::{Block, Format};
use crate::lanes::{Bytes, Lanes};

/// An f16 scale, then 32 signed bytes.
pub(crate) struct Q8_0;

impl Format for Q8_0 {
    const SUB_BLOCKS: usize = 1;
    const BLOCK_BYTES: usize = 34;
    const WORDS: Range<usize> = 2..34;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, _: usize, index: usize) -> B {
        // SAFETY: the word is one of a whole packed block.
        unsafe { block.word(index) }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, _: usize) -> L {
        // SAFETY: the bytes are some of a whole packed block.
        unsafe { block.halves(0) }
    }
}
