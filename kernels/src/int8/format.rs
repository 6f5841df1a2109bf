//! Unpacking of quantised blocks in registers: signed bytes, scales and minima of their sub-blocks.
//!
//! A sub-block is 32 successive weights of 16 features. Its weights are `scale * byte - min`. Q6_K
//! has two scales per sub-block, the other formats have one. Only Q4_K and Q5_K have minima.
#![allow(unsafe_code, reason = "reads packed blocks by pointer")]

use super::dots::{Bytes, WORD_VECTOR_BYTES};
use crate::lanes::{LANES, Lanes};
use crate::tensor_type::TensorType;

/// Number of words of a sub-block.
pub(super) const WORDS: usize = 8;

/// A block format of ggml, packed as [`quant`](crate::quant) describes: `words` points to the words
/// of a block, `scales` to its other bytes.
///
/// # Safety of the methods
/// The instruction set of the type parameter is available. The pointers are readable for the words,
/// or the other bytes, of a whole packed block of the implementing format. Indices are below the
/// number of sub-blocks or scales of the block.
pub(super) trait Format {
    /// The tensor type with these blocks.
    const DTYPE: TensorType;
    /// Number of sub-blocks of a block.
    const SUB_BLOCKS: usize;
    /// Bytes of the words of a packed block, divided by the number of sub-blocks.
    const SUB_BLOCK_BYTES: usize;
    /// Number of scales of a sub-block.
    const SCALES: usize;
    /// Whether sub-blocks have minima.
    const MINS: bool;
    /// Word `index` of a sub-block, for 16 features, as signed bytes.
    unsafe fn word<B: Bytes>(words: *const u8, sub_block: usize, index: usize) -> B;
    /// Scale `index` of the block, for 16 features.
    unsafe fn scale<L: Lanes>(scales: *const u8, index: usize) -> L;
    /// The minimum of a sub-block, for 16 features. Only for formats with [`Format::MINS`].
    #[inline(always)]
    unsafe fn min<L: Lanes>(_: *const u8, _: usize) -> L {
        unreachable!("this format has no minima")
    }
}

/// Byte `byte` of the scales of a block, for 16 features.
///
/// # Safety
/// `scales` is readable for `16 * (byte + 1)` bytes.
#[inline(always)]
unsafe fn scale_bytes(scales: *const u8, byte: usize) -> [u8; LANES] {
    // SAFETY: the 16 bytes from `16 * byte` on are readable.
    unsafe { scales.add(byte * LANES).cast::<[u8; LANES]>().read() }
}

/// The f16 value in the bytes `byte` and `byte + 1` of the scales of a block, for 16 features.
///
/// # Safety
/// The instruction set of `L` is available, and `scales` is readable for `16 * (byte + 2)` bytes.
#[inline(always)]
unsafe fn halves<L: Lanes>(scales: *const u8, byte: usize) -> L {
    // SAFETY: 16 bytes are readable from `16 * byte` and from `16 * (byte + 1)` on.
    unsafe { L::load_f16_bytes(scales.add(byte * LANES), scales.add((byte + 1) * LANES)) }
}

/// Word `index` of a block, for 16 features.
///
/// # Safety
/// The instruction set of `B` is available, and `words` is readable for `64 * (index + 1)` bytes.
#[inline(always)]
unsafe fn load<B: Bytes>(words: *const u8, index: usize) -> B {
    // SAFETY: the 64 bytes from `64 * index` on are readable.
    unsafe { B::load(words.add(index * WORD_VECTOR_BYTES)) }
}

/// Blocks of 32 signed bytes with one f16 scale.
pub(super) struct Q8_0;

impl Format for Q8_0 {
    const DTYPE: TensorType = TensorType::Q8_0;
    const SUB_BLOCKS: usize = 1;
    const SUB_BLOCK_BYTES: usize = 32 * LANES;
    const SCALES: usize = 1;
    const MINS: bool = false;
    #[inline(always)]
    unsafe fn word<B: Bytes>(words: *const u8, _: usize, index: usize) -> B {
        // SAFETY: the word is one of a whole packed block, which is readable.
        unsafe { load(words, index) }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(scales: *const u8, _: usize) -> L {
        // SAFETY: the scale bytes of a whole packed block are readable.
        unsafe { halves(scales, 0) }
    }
}

/// The 6-bit scale and minimum of a sub-block for 16 features, from the 12 bytes of a Q4_K or Q5_K
/// block that hold those of all eight sub-blocks.
///
/// # Safety
/// `scales` is readable for the 16 scale bytes of a whole packed Q4_K or Q5_K block, and
/// `sub_block` is below 8.
#[inline(always)]
unsafe fn six_bits(scales: *const u8, sub_block: usize) -> ([u8; LANES], [u8; LANES]) {
    let (mut scale, mut min) = ([0; LANES], [0; LANES]);
    // SAFETY: the indices are between 4 and 15, and the block has 16 scale bytes per feature.
    unsafe {
        if sub_block < 4 {
            let (scales, mins) =
                (scale_bytes(scales, 4 + sub_block), scale_bytes(scales, 8 + sub_block));
            for i in 0..LANES {
                (scale[i], min[i]) = (scales[i] & 63, mins[i] & 63);
            }
        } else {
            let (low, high_scales) =
                (scale_bytes(scales, 8 + sub_block), scale_bytes(scales, sub_block));
            let high_mins = scale_bytes(scales, 4 + sub_block);
            for i in 0..LANES {
                scale[i] = (low[i] & 15) | (high_scales[i] >> 6 << 4);
                min[i] = (low[i] >> 4) | (high_mins[i] >> 6 << 4);
            }
        }
    }
    (scale, min)
}

/// The scale of a sub-block of Q4_K or Q5_K, for 16 features.
///
/// # Safety
/// The instruction set of `L` is available; otherwise as for [`six_bits`].
#[inline(always)]
unsafe fn k_scale<L: Lanes>(scales: *const u8, sub_block: usize) -> L {
    // SAFETY: bytes 0 and 1 are the scale of the scales of a whole packed Q4_K or Q5_K block.
    unsafe { halves::<L>(scales, 0).mul(L::load_u8(six_bits(scales, sub_block).0.as_ptr())) }
}

/// The minimum of a sub-block of Q4_K or Q5_K, for 16 features.
///
/// # Safety
/// The instruction set of `L` is available; otherwise as for [`six_bits`].
#[inline(always)]
unsafe fn k_min<L: Lanes>(scales: *const u8, sub_block: usize) -> L {
    // SAFETY: bytes 2 and 3 are the scale of the minima of a whole packed Q4_K or Q5_K block.
    unsafe { halves::<L>(scales, 2).mul(L::load_u8(six_bits(scales, sub_block).1.as_ptr())) }
}

/// Blocks of 256 weights of 4 bits in eight sub-blocks with 6-bit scales and minima.
pub(super) struct Q4K;

impl Format for Q4K {
    const DTYPE: TensorType = TensorType::Q4K;
    const SUB_BLOCKS: usize = 8;
    const SUB_BLOCK_BYTES: usize = 16 * LANES;
    const SCALES: usize = 1;
    const MINS: bool = true;
    #[inline(always)]
    unsafe fn word<B: Bytes>(words: *const u8, sub_block: usize, index: usize) -> B {
        // SAFETY: the word is one of a whole packed block, which is readable.
        unsafe { load::<B>(words, sub_block / 2 * WORDS + index).right(sub_block % 2 * 4, 15) }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(scales: *const u8, sub_block: usize) -> L {
        // SAFETY: the scale bytes of a whole packed block are readable.
        unsafe { k_scale(scales, sub_block) }
    }
    #[inline(always)]
    unsafe fn min<L: Lanes>(scales: *const u8, sub_block: usize) -> L {
        // SAFETY: the scale bytes of a whole packed block are readable.
        unsafe { k_min(scales, sub_block) }
    }
}

/// Blocks of 256 weights of 5 bits in eight sub-blocks with 6-bit scales and minima.
pub(super) struct Q5K;

impl Format for Q5K {
    const DTYPE: TensorType = TensorType::Q5K;
    const SUB_BLOCKS: usize = 8;
    const SUB_BLOCK_BYTES: usize = 20 * LANES;
    const SCALES: usize = 1;
    const MINS: bool = true;
    #[inline(always)]
    unsafe fn word<B: Bytes>(words: *const u8, sub_block: usize, index: usize) -> B {
        // SAFETY: the words of a whole packed block are readable: eight words of fifth bits, of
        // which bit `n` belongs to sub-block `n`, and 32 words of 4-bit weights.
        unsafe {
            let fifth = load::<B>(words, index).right(sub_block, 1).left(4, 16);
            let bytes: B = load(words, WORDS + sub_block / 2 * WORDS + index);
            bytes.right(sub_block % 2 * 4, 15).or(fifth)
        }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(scales: *const u8, sub_block: usize) -> L {
        // SAFETY: the scale bytes of a whole packed block are readable.
        unsafe { k_scale(scales, sub_block) }
    }
    #[inline(always)]
    unsafe fn min<L: Lanes>(scales: *const u8, sub_block: usize) -> L {
        // SAFETY: the scale bytes of a whole packed block are readable.
        unsafe { k_min(scales, sub_block) }
    }
}

/// Blocks of 256 weights of 6 bits in eight sub-blocks with two 8-bit scales each.
pub(super) struct Q6K;

impl Format for Q6K {
    const DTYPE: TensorType = TensorType::Q6K;
    const SUB_BLOCKS: usize = 8;
    const SUB_BLOCK_BYTES: usize = 24 * LANES;
    const SCALES: usize = 2;
    const MINS: bool = false;
    #[inline(always)]
    unsafe fn word<B: Bytes>(words: *const u8, sub_block: usize, index: usize) -> B {
        // SAFETY: the words of a whole packed block are readable: 32 words of low bits and 16 words
        // of high bits. Four sub-blocks share 16 words of low bits and 8 words of high bits.
        unsafe {
            let (half, quarter) = (sub_block / 4, sub_block % 4);
            let upper = load::<B>(words, 32 + half * WORDS + index);
            let upper = upper.right(quarter * 2, 3).left(4, 48);
            let bytes: B = load(words, half * 16 + quarter % 2 * WORDS + index);
            bytes.right(quarter / 2 * 4, 15).or(upper).sub(32)
        }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(scales: *const u8, index: usize) -> L {
        // SAFETY: the scale bytes of a whole packed block are readable.
        unsafe { halves::<L>(scales, 16).mul(L::load_i8(scales.add(index * LANES))) }
    }
}
