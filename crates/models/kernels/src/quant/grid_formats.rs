//! Formats whose weights are entries of a grid: IQ1, IQ2 and IQ3.
//!
//! A block is a super-block of 256 weights, whose sub-blocks have small integers as scales. Index
//! and sign bits do not fall into words, so all bytes of a block are packed as single bytes. The
//! bytes are counted in the order of the block.
#![allow(unsafe_code, reason = "reads packed blocks by pointer")]

use std::ops::Range;

use super::format::{Block, Expanded, Format, WORDS};
use super::grids::{IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID};
use crate::lanes::{Bytes, LANES, Lanes, map};

/// Number of groups of eight weights of a sub-block. Each has two words.
const GROUPS: usize = WORDS / 2;

/// Words `word(lane)` of `grid` for the 16 features, where weights are negative if one of the low
/// four bits of `signs(lane)` is one. Each loop does one thing, so that the compiler can vectorize
/// it.
///
/// # Safety
/// The instruction set of `B` is available.
#[inline(always)]
unsafe fn words<B: Bytes, const N: usize>(
    grid: &[u32; N],
    word: impl Fn(usize) -> u32,
    signs: impl Fn(usize) -> u32,
) -> B {
    let indices: [u32; LANES] = std::array::from_fn(word);
    let signs: [u32; LANES] = std::array::from_fn(signs);
    // SAFETY: the instruction set is available. All grids have a power of two of words.
    let words = unsafe { B::gather(grid, indices) };
    let words: [u32; LANES] =
        std::array::from_fn(|lane| with_signs(words[lane], signs[lane]).to_le());
    // SAFETY: the array holds 16 words.
    unsafe { B::load(words.as_ptr().cast()) }
}

/// `word` with the signs of its four weights, none of which is zero, changed where one of the low
/// four bits of `signs` is one.
#[inline(always)]
fn with_signs(word: u32, signs: u32) -> u32 {
    // Bit `i` of the signs becomes the lowest bit of byte `i`.
    let ones = (signs & 15).wrapping_mul(0x0020_4081) & 0x0101_0101;
    // The complement plus one. No byte overflows, because none is zero.
    (word ^ (ones * 255)) + ones
}

/// Eight signs from seven bits: the number of negative signs is even.
const EVEN_SIGNS: [u32; 128] = {
    let mut signs = [0; 128];
    let mut bits: u32 = 0;
    while bits < 128 {
        signs[bits as usize] = bits | (bits.count_ones() & 1) << 7;
        bits += 1;
    }
    signs
};

/// Sixteen-bit integers of the 16 features, from the bytes `byte` and `byte + 1`.
///
/// # Safety
/// The block is a whole packed block with these bytes.
#[inline(always)]
unsafe fn pairs(block: Block, byte: usize) -> [u32; LANES] {
    // SAFETY: the block has the bytes.
    let (low, high) = unsafe { (block.bytes(byte), block.bytes(byte + 1)) };
    // Wide integers, so that the compiler can vectorize what follows.
    std::array::from_fn(|lane| u32::from(low[lane]) | u32::from(high[lane]) << 8)
}

/// `unit * d * (2 * bits + 1)`, where `bits` is at most 15. No product is rounded.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
unsafe fn odd_scale<L: Lanes>(d: L, bits: [u8; LANES], unit: f32) -> L {
    let odd = map(bits, |bits| 2 * bits + 1);
    // SAFETY: the array holds 16 bytes.
    unsafe { d.mul(L::load_u8(odd.as_ptr())).mul(L::splat(unit)) }
}

/// Half `index % 2` of byte `byte + index / 2`: 4-bit scales, the low bits of a byte first.
///
/// # Safety
/// The block is a whole packed block with this byte.
#[inline(always)]
unsafe fn four_bits(block: Block, byte: usize, index: usize) -> [u8; LANES] {
    // SAFETY: the block has the byte.
    map(unsafe { block.bytes(byte + index / 2) }, |byte| byte >> (index % 2 * 4) & 15)
}

/// The signs of a word of a format with 28 bits of signs and 4 bits of scale per sub-block, in the
/// 4 bytes from `first` on. Seven bits are the signs of a group of eight weights.
///
/// # Safety
/// The block is a whole packed block with these bytes, and `index` is below [`WORDS`].
#[inline(always)]
unsafe fn packed_signs<B: Bytes>(block: Block, first: usize, index: usize) -> [u32; LANES] {
    let bit = index / 2 * 7;
    // SAFETY: the signs of a group are in two of the four bytes, because `bit` is at most 21. The
    // table has a power of two of entries.
    let signs = unsafe {
        let bits = pairs(block, first + bit / 8);
        B::gather(&EVEN_SIGNS, map(bits, |bits| bits >> (bit % 8)))
    };
    map(signs, |signs| signs >> (index % 2 * 4))
}

/// An f16 scale; for each 32 weights four 8-bit indices, four times seven signs and a 4-bit scale.
pub(crate) struct Iq2Xxs;

impl Format for Iq2Xxs {
    const SUB_BLOCKS: usize = 8;
    const BLOCK_BYTES: usize = 66;
    const WORDS: Range<usize> = 0..0;
    const EXPANDED: Expanded = Expanded::Always;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, sub_block: usize, index: usize) -> B {
        let first = 2 + 8 * sub_block;
        // SAFETY: the bytes are some of a whole packed block.
        unsafe {
            let entry = block.bytes(first + index / 2);
            let signs = packed_signs::<B>(block, first + 4, index);
            let word = |lane: usize| 2 * u32::from(entry[lane]) + index as u32 % 2;
            words(&IQ2_XXS_GRID, word, |lane| signs[lane])
        }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, index: usize) -> L {
        // SAFETY: the bytes are some of a whole packed block.
        unsafe {
            odd_scale(block.halves(0), map(block.bytes(9 + 8 * index), |byte| byte >> 4), 0.125)
        }
    }
}

/// An f16 scale, 32 16-bit integers with a 9-bit index and seven signs, 16 4-bit scales.
pub(crate) struct Iq2Xs;

impl Format for Iq2Xs {
    const SUB_BLOCKS: usize = 8;
    const BLOCK_BYTES: usize = 74;
    const WORDS: Range<usize> = 0..0;
    const SCALES: usize = 2;
    const EXPANDED: Expanded = Expanded::Always;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, sub_block: usize, index: usize) -> B {
        // SAFETY: the bytes are some of a whole packed block.
        unsafe {
            let bits = pairs(block, 2 + 2 * (GROUPS * sub_block + index / 2));
            let word = |lane: usize| 2 * (bits[lane] & 511) + index as u32 % 2;
            let signs = B::gather(&EVEN_SIGNS, map(bits, |bits| bits >> 9));
            words(&IQ2_XS_GRID, word, |lane| signs[lane] >> (index % 2 * 4))
        }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, index: usize) -> L {
        // SAFETY: the bytes are some of a whole packed block.
        unsafe { odd_scale(block.halves(0), four_bits(block, 66, index), 0.125) }
    }
}

/// An f16 scale, the low 8 bits of 32 indices, 32 bytes of signs, the high 2 bits of the indices,
/// 16 4-bit scales.
pub(crate) struct Iq2S;

impl Format for Iq2S {
    const SUB_BLOCKS: usize = 8;
    const BLOCK_BYTES: usize = 82;
    const WORDS: Range<usize> = 0..0;
    const SCALES: usize = 2;
    const EXPANDED: Expanded = Expanded::Always;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, sub_block: usize, index: usize) -> B {
        let group = GROUPS * sub_block + index / 2;
        // SAFETY: the bytes are some of a whole packed block.
        unsafe {
            let (low, signs) = (block.bytes(2 + group), block.bytes(34 + group));
            let high = block.bytes(66 + sub_block);
            let word = |lane: usize| {
                let high = u32::from(high[lane] >> (index / 2 * 2) & 3);
                2 * (u32::from(low[lane]) | high << 8) + index as u32 % 2
            };
            words(&IQ2_S_GRID, word, |lane| u32::from(signs[lane]) >> (index % 2 * 4))
        }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, index: usize) -> L {
        // SAFETY: the bytes are some of a whole packed block.
        unsafe { odd_scale(block.halves(0), four_bits(block, 74, index), 0.125) }
    }
}

/// An f16 scale, 64 8-bit indices; for each 32 weights four times seven signs and a 4-bit scale.
pub(crate) struct Iq3Xxs;

impl Format for Iq3Xxs {
    const SUB_BLOCKS: usize = 8;
    const BLOCK_BYTES: usize = 98;
    const WORDS: Range<usize> = 0..0;
    const EXPANDED: Expanded = Expanded::Always;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, sub_block: usize, index: usize) -> B {
        // SAFETY: the bytes are some of a whole packed block.
        unsafe {
            let entry = block.bytes(2 + WORDS * sub_block + index);
            let signs = packed_signs::<B>(block, 66 + 4 * sub_block, index);
            words(&IQ3_XXS_GRID, |lane| entry[lane].into(), |lane| signs[lane])
        }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, index: usize) -> L {
        // SAFETY: the bytes are some of a whole packed block.
        unsafe {
            odd_scale(block.halves(0), map(block.bytes(69 + 4 * index), |byte| byte >> 4), 0.25)
        }
    }
}

/// An f16 scale, the low 8 bits of 64 indices, the high bits of the indices, 32 bytes of signs,
/// eight 4-bit scales.
pub(crate) struct Iq3S;

impl Format for Iq3S {
    const SUB_BLOCKS: usize = 8;
    const BLOCK_BYTES: usize = 110;
    const WORDS: Range<usize> = 0..0;
    const EXPANDED: Expanded = Expanded::Always;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, sub_block: usize, index: usize) -> B {
        // SAFETY: the bytes are some of a whole packed block.
        unsafe {
            let low = block.bytes(2 + WORDS * sub_block + index);
            let high = block.bytes(66 + sub_block);
            let signs = block.bytes(74 + GROUPS * sub_block + index / 2);
            let word = |lane: usize| u32::from(low[lane]) | u32::from(high[lane] >> index & 1) << 8;
            words(&IQ3_S_GRID, word, |lane| u32::from(signs[lane]) >> (index % 2 * 4))
        }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, index: usize) -> L {
        // SAFETY: the bytes are some of a whole packed block.
        unsafe { odd_scale(block.halves(0), four_bits(block, 106, index), 1.0) }
    }
}

/// Index of a word of [`IQ1_GRID`]. `high` holds the upper three bits of the index of the entry.
#[inline(always)]
fn iq1_word(low: u8, high: u32, minus: bool, half: usize) -> u32 {
    2 * (u32::from(low) | (high & 7) << 8 | u32::from(minus) << 11) + half as u32
}

/// An f16 scale, the low 8 bits of 32 indices; for each 32 weights a 16-bit integer with the high 3
/// bits of four indices, a 3-bit scale and the sign of the addend.
pub(crate) struct Iq1S;

impl Format for Iq1S {
    const SUB_BLOCKS: usize = 8;
    const BLOCK_BYTES: usize = 50;
    const WORDS: Range<usize> = 0..0;
    const EXPANDED: Expanded = Expanded::Always;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, sub_block: usize, index: usize) -> B {
        // SAFETY: the bytes are some of a whole packed block.
        unsafe {
            let low = block.bytes(2 + GROUPS * sub_block + index / 2);
            let bits = pairs(block, 34 + 2 * sub_block);
            let word = |lane: usize| {
                let high = bits[lane] >> (index / 2 * 3);
                iq1_word(low[lane], high, bits[lane] >> 15 == 1, index % 2)
            };
            words(&IQ1_GRID, word, |_| 0)
        }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, index: usize) -> L {
        // SAFETY: the bytes are some of a whole packed block.
        unsafe {
            let bits = map(block.bytes(35 + 2 * index), |byte| byte >> 4 & 7);
            odd_scale(block.halves(0), bits, 0.125)
        }
    }
}

/// The low 8 bits of 32 indices, the high 3 bits of the indices with the sign of the addend, and
/// four 16-bit integers with four 3-bit scales and a quarter of the f16 scale each.
pub(crate) struct Iq1M;

impl Format for Iq1M {
    const SUB_BLOCKS: usize = 8;
    const BLOCK_BYTES: usize = 56;
    const WORDS: Range<usize> = 0..0;
    const SCALES: usize = 2;
    const EXPANDED: Expanded = Expanded::Always;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, sub_block: usize, index: usize) -> B {
        let group = GROUPS * sub_block + index / 2;
        // SAFETY: the bytes are some of a whole packed block.
        unsafe {
            let (low, high) = (block.bytes(group), block.bytes(32 + group / 2));
            let word = |lane: usize| {
                let high = high[lane] >> (group % 2 * 4);
                iq1_word(low[lane], high.into(), high & 8 != 0, index % 2)
            };
            words(&IQ1_GRID, word, |_| 0)
        }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, index: usize) -> L {
        // SAFETY: the bytes are some of a whole packed block.
        unsafe {
            let quarters = [49, 51, 53, 55].map(|byte| block.bytes(byte));
            let [low, high] = [0, 2].map(|first| -> [u8; LANES] {
                std::array::from_fn(|i| quarters[first][i] >> 4 | quarters[first + 1][i] & 0xf0)
            });
            let d = L::load_f16_bytes(low.as_ptr(), high.as_ptr());
            let bits = pairs(block, 48 + index / 4 * 2);
            odd_scale(d, map(bits, |bits| (bits >> (index % 4 * 3) & 7) as u8), 0.125)
        }
    }
}
