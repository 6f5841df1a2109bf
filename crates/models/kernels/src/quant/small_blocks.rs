//! Formats with blocks of 32 weights, without super-blocks.
#![allow(unsafe_code, reason = "reads packed blocks by pointer")]

use std::ops::Range;

use super::format::{Block, Expanded, Format, WORDS};
use crate::lanes::{Bytes, LANES, Lanes};

/// An f16 scale, then 32 signed bytes.
pub(crate) struct Q8_0;

impl Format for Q8_0 {
    const EXPANDED: Expanded = Expanded::Never;
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

/// Weights of 4 bits, or of 5 bits if `FIFTH`, with an f16 scale.
///
/// The scale, an f16 value that is added to all weights if `OFFSET`, 4 bytes of fifth bits if there
/// are any, and 16 bytes with two 4-bit weights each: the low bits are the first 16 weights.
/// Without an offset, the numbers are centered on zero.
pub(crate) struct Nibbles<const FIFTH: bool, const OFFSET: bool>;
/// 4-bit weights from -8 to 7.
pub(crate) type Q4_0 = Nibbles<false, false>;
/// 4-bit weights from 0 to 15.
pub(crate) type Q4_1 = Nibbles<false, true>;
/// 5-bit weights from -16 to 15.
pub(crate) type Q5_0 = Nibbles<true, false>;
/// 5-bit weights from 0 to 31.
pub(crate) type Q5_1 = Nibbles<true, true>;

impl<const FIFTH: bool, const OFFSET: bool> Nibbles<FIFTH, OFFSET> {
    /// The fifth bits in a block.
    fn fifth_bits(block: &mut [u8]) -> &mut [u8] {
        &mut block[Self::WORDS.start..][..4]
    }
}

impl<const FIFTH: bool, const OFFSET: bool> Format for Nibbles<FIFTH, OFFSET> {
    const SUB_BLOCKS: usize = 1;
    const BLOCK_BYTES: usize = Self::WORDS.end;
    const WORDS: Range<usize> = {
        let start = if OFFSET { 4 } else { 2 };
        start..start + if FIFTH { 20 } else { 16 }
    };
    const MINS: bool = OFFSET;
    const ARRANGED: bool = FIFTH;

    /// In a file, bit `4 i + j` of the fifth bits belongs to byte `j` of word `i`. In a panel it is
    /// bit `i` of byte `j`, so that a shift moves the bits of a word to their bytes.
    #[inline(always)]
    fn arrange(block: &mut [u8]) {
        let bits = Self::fifth_bits(block);
        let file = u32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]);
        for (j, byte) in bits.iter_mut().enumerate() {
            *byte = (0..8).fold(0, |byte, i| byte | ((file >> (4 * i + j) & 1) as u8) << i);
        }
    }
    #[inline(always)]
    fn restore(block: &mut [u8]) {
        let bits = Self::fifth_bits(block);
        let mut file = 0_u32;
        for (j, byte) in bits.iter().enumerate() {
            for i in 0..8 {
                file |= u32::from(byte >> i & 1) << (4 * i + j);
            }
        }
        bits.copy_from_slice(&file.to_le_bytes());
    }

    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, _: usize, index: usize) -> B {
        // SAFETY: the words are some of a whole packed block.
        unsafe {
            let mut bytes: B = nibbles(block, usize::from(FIFTH), index);
            if FIFTH {
                bytes = bytes.or(block.word::<B>(0).right(index, 1).left(4, 16));
            }
            match (OFFSET, FIFTH) {
                (true, _) => bytes,
                (false, true) => bytes.sub(16),
                (false, false) => bytes.sub(8),
            }
        }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, _: usize) -> L {
        // SAFETY: the bytes are some of a whole packed block.
        unsafe { block.halves(0) }
    }
    #[inline(always)]
    unsafe fn min<L: Lanes>(block: Block, _: usize) -> L {
        // SAFETY: bytes 2 and 3 are the offset, which is the negated minimum.
        unsafe { block.halves::<L>(2).mul(L::splat(-1.0)) }
    }
}

/// Word `index` of a sub-block whose 16 bytes begin with word `first` of the block. The low four
/// bits of each byte are the first 16 weights, the high four bits the others.
///
/// # Safety
/// The four words are some of a whole packed block.
#[inline(always)]
pub(super) unsafe fn nibbles<B: Bytes>(block: Block, first: usize, index: usize) -> B {
    // SAFETY: the word is one of a whole packed block.
    unsafe { block.word::<B>(first + index % (WORDS / 2)).right(index / (WORDS / 2) * 4, 15) }
}

/// The values of the 4-bit numbers of the IQ4 formats.
pub(super) const IQ4_VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// An f16 scale, then 16 bytes with two indices each into [`IQ4_VALUES`].
pub(crate) struct Iq4Nl;

impl Format for Iq4Nl {
    const SUB_BLOCKS: usize = 1;
    const BLOCK_BYTES: usize = 18;
    const WORDS: Range<usize> = 2..18;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, _: usize, index: usize) -> B {
        // SAFETY: the words are some of a whole packed block.
        unsafe { nibbles::<B>(block, 0, index).look_up(&IQ4_VALUES) }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, _: usize) -> L {
        // SAFETY: the bytes are some of a whole packed block.
        unsafe { block.halves(0) }
    }
}

/// The microscaling format MXFP4: an exponent (E8M0), then 16 bytes with two floats of 4 bits each
/// (E2M1).
///
/// The values are twice the floats, so that they are integers, and the scale is half of the power
/// of two.
pub(crate) struct Mxfp4;

/// Twice the values of E2M1.
const E2M1_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

impl Format for Mxfp4 {
    const SUB_BLOCKS: usize = 1;
    const BLOCK_BYTES: usize = 17;
    const WORDS: Range<usize> = 1..17;
    #[inline(always)]
    unsafe fn word<B: Bytes>(block: Block, _: usize, index: usize) -> B {
        // SAFETY: the words are some of a whole packed block.
        unsafe { nibbles::<B>(block, 0, index).look_up(&E2M1_VALUES) }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: Block, _: usize) -> L {
        let mut scales = [0.0; LANES];
        // SAFETY: byte 0 of a whole packed block is the exponent.
        let exponents = unsafe { block.bytes(0) };
        for (scale, exponent) in scales.iter_mut().zip(exponents) {
            // 2^(exponent - 128). The two smallest are subnormal.
            let subnormal = 0x0020_0000 << (exponent & 1);
            let normal = (u32::from(exponent).wrapping_sub(1)) << 23;
            *scale = f32::from_bits(if exponent < 2 { subnormal } else { normal });
        }
        // SAFETY: `scales` has 16 values, and the instruction set of `L` is available.
        unsafe { L::load(scales.as_ptr()) }
    }
}
