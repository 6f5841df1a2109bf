//! Formats that no file has, for weights that are converted while they are loaded: integers with
//! scales in f32.
//!
//! All numbers of a block are words, little-endian, in the order of the fields below. Rare types of
//! GGUF files become [`I8Group16`] or [`I8Group32`], and so can any other format that is an integer
//! of eight bits times a scale. [`U4Group32`] and [`U4Group128`] are for the 4-bit formats of
//! safetensors files.
#![allow(unsafe_code, reason = "reads packed blocks by pointer")]

use std::ops::Range;

use super::format::{Block, Expanded, Format, WORDS};
use super::small_blocks::nibbles;
use crate::lanes::{Bytes, Lanes, WORD_VECTOR_BYTES};

/// Blocks of 32 weights: `SCALES` (one or two) f32 scales, as many f32 minima if there are any, and
/// 32 signed bytes.
pub(crate) struct ScaledBytes<const SCALES: usize, const MINS: bool>;
/// A scale for every 16 weights.
pub(crate) type I8Group16 = ScaledBytes<2, false>;
/// A scale for every 32 weights.
pub(crate) type I8Group32 = ScaledBytes<1, false>;

impl<const SCALES: usize, const MINS: bool> Format for ScaledBytes<SCALES, MINS> {
    const SUB_BLOCKS: usize = 1;
    const BLOCK_BYTES: usize = 4 * Self::NUMBERS + 32;
    const WORDS: Range<usize> = 0..Self::BLOCK_BYTES;
    const SCALES: usize = SCALES;
    const MINS: bool = MINS;
    const EXPANDED: Expanded = Expanded::Never;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, _: usize, index: usize) -> B {
        // SAFETY: the word is one of a whole packed block.
        unsafe { block.word(Self::NUMBERS + index) }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, index: usize) -> L {
        // SAFETY: the word is one of a whole packed block.
        unsafe { floats(block, index) }
    }
    #[inline(always)]
    unsafe fn min<L: Lanes>(block: Block, index: usize) -> L {
        // SAFETY: the word is one of a whole packed block, which has minima.
        unsafe { floats(block, SCALES + index) }
    }
}

/// Blocks of `32 * SUB_BLOCKS` weights: an f32 scale, an f32 minimum, and for each 32 weights 16
/// bytes with two 4-bit weights each. The low bits are the first 16 weights.
pub(crate) struct ScaledNibbles<const SUB_BLOCKS: usize>;
/// A scale and a minimum for every 32 weights.
pub(crate) type U4Group32 = ScaledNibbles<1>;
/// A scale and a minimum for every 128 weights.
pub(crate) type U4Group128 = ScaledNibbles<4>;

impl<const SUB_BLOCKS: usize> Format for ScaledNibbles<SUB_BLOCKS> {
    const SUB_BLOCKS: usize = SUB_BLOCKS;
    const BLOCK_BYTES: usize = 8 + 16 * SUB_BLOCKS;
    const WORDS: Range<usize> = 0..Self::BLOCK_BYTES;
    const MINS: bool = true;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, sub_block: usize, index: usize) -> B {
        // SAFETY: the words are some of a whole packed block.
        unsafe { nibbles(block, 2 + sub_block * WORDS / 2, index) }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, _: usize) -> L {
        // SAFETY: the word is one of a whole packed block.
        unsafe { floats(block, 0) }
    }
    #[inline(always)]
    unsafe fn min<L: Lanes>(block: Block, _: usize) -> L {
        // SAFETY: the word is one of a whole packed block.
        unsafe { floats(block, 1) }
    }
}

/// Word `index` of a block, as an f32 value.
///
/// # Safety
/// The word is one of a whole packed block, and the instruction set of `L` is available.
#[inline(always)]
unsafe fn floats<L: Lanes>(block: Block, index: usize) -> L {
    // SAFETY: the 16 words are readable.
    unsafe { L::load(block.words.add(index * WORD_VECTOR_BYTES).cast()) }
}
