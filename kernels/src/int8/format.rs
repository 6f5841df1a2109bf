//! What the kernels take from a packed block: signed bytes, scales and minima of its parts.
//!
//! A part is 32 successive weights of 16 features. Its weights are `scale * byte - min`; Q6_K has
//! two scales a part, the other formats one; only Q4_K and Q5_K have minima.
#![allow(unsafe_code, reason = "reads packed blocks by pointer, on lanes")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: a whole block")]

use super::dots::{Bytes, RUN};
use crate::lanes::{LANES, Lanes};
use crate::tensor_type::TensorType;

/// Words of a part.
pub(super) const WORDS: usize = 8;

/// A block format. `words` and `scales` point to a packed block's two parts, as
/// [`quant`](crate::quant) says.
///
/// # Safety of the methods
/// The set of the type parameter is available, and the block has that part or scale.
pub(super) trait Format {
    /// The type of these blocks.
    const DTYPE: TensorType;
    /// Parts of a block.
    const PARTS: usize;
    /// Bytes that a part takes of its block's words, one part with another.
    const PART_BYTES: usize;
    /// Scales of a part.
    const SCALES: usize;
    /// Whether parts have minima.
    const MINS: bool;
    /// Word `index` of a part, as signed bytes.
    unsafe fn word<B: Bytes>(words: *const u8, part: usize, index: usize) -> B;
    /// Scale `index` of the block, of 16 features.
    unsafe fn scale<L: Lanes>(scales: *const u8, index: usize) -> L;
    /// The minimum of a part.
    #[inline(always)]
    unsafe fn min<L: Lanes>(_: *const u8, _: usize) -> L {
        unreachable!("a format without minima")
    }
}

/// Sixteen bytes, one a feature.
#[inline(always)]
unsafe fn run(scales: *const u8, byte: usize) -> [u8; LANES] {
    // SAFETY: the caller gives a whole packed block.
    unsafe { scales.add(byte * LANES).cast::<[u8; LANES]>().read() }
}

/// The f16 whose low byte is `byte`, of each feature.
#[inline(always)]
unsafe fn halves<L: Lanes>(scales: *const u8, byte: usize) -> L {
    // SAFETY: the caller gives a whole packed block.
    unsafe { L::load_f16_bytes(scales.add(byte * LANES), scales.add((byte + 1) * LANES)) }
}

/// A word of a block.
#[inline(always)]
unsafe fn load<B: Bytes>(words: *const u8, index: usize) -> B {
    // SAFETY: the caller gives a whole packed block that has this word.
    unsafe { B::load(words.add(index * RUN)) }
}

pub(super) struct Q8_0;

impl Format for Q8_0 {
    const DTYPE: TensorType = TensorType::Q8_0;
    const PARTS: usize = 1;
    const PART_BYTES: usize = 32 * LANES;
    const SCALES: usize = 1;
    const MINS: bool = false;
    #[inline(always)]
    unsafe fn word<B: Bytes>(words: *const u8, _: usize, index: usize) -> B {
        // SAFETY: the caller's promise.
        unsafe { load(words, index) }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(scales: *const u8, _: usize) -> L {
        // SAFETY: the caller's promise.
        unsafe { halves(scales, 0) }
    }
}

/// The 6-bit scale and minimum of a part, from the 12 bytes that Q4_K and Q5_K pack them in.
#[inline(always)]
unsafe fn six_bits(scales: *const u8, part: usize) -> ([u8; LANES], [u8; LANES]) {
    let (mut scale, mut min) = ([0; LANES], [0; LANES]);
    // SAFETY: the caller gives a whole packed block whose bytes 4 to 15 these are.
    unsafe {
        if part < 4 {
            let (scales, mins) = (run(scales, 4 + part), run(scales, 8 + part));
            for i in 0..LANES {
                (scale[i], min[i]) = (scales[i] & 63, mins[i] & 63);
            }
        } else {
            let (low, high_scales) = (run(scales, 8 + part), run(scales, part));
            let high_mins = run(scales, 4 + part);
            for i in 0..LANES {
                scale[i] = (low[i] & 15) | (high_scales[i] >> 6 << 4);
                min[i] = (low[i] >> 4) | (high_mins[i] >> 6 << 4);
            }
        }
    }
    (scale, min)
}

#[inline(always)]
unsafe fn k_scale<L: Lanes>(scales: *const u8, part: usize) -> L {
    // SAFETY: the caller gives a whole packed block of Q4_K or Q5_K.
    unsafe { halves::<L>(scales, 0).mul(L::load_u8(six_bits(scales, part).0.as_ptr())) }
}

#[inline(always)]
unsafe fn k_min<L: Lanes>(scales: *const u8, part: usize) -> L {
    // SAFETY: as above.
    unsafe { halves::<L>(scales, 2).mul(L::load_u8(six_bits(scales, part).1.as_ptr())) }
}

pub(super) struct Q4K;

impl Format for Q4K {
    const DTYPE: TensorType = TensorType::Q4K;
    const PARTS: usize = 8;
    const PART_BYTES: usize = 16 * LANES;
    const SCALES: usize = 1;
    const MINS: bool = true;
    #[inline(always)]
    unsafe fn word<B: Bytes>(words: *const u8, part: usize, index: usize) -> B {
        // SAFETY: the caller's promise.
        unsafe { load::<B>(words, part / 2 * WORDS + index).right(part % 2 * 4, 15) }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(scales: *const u8, part: usize) -> L {
        // SAFETY: the caller's promise.
        unsafe { k_scale(scales, part) }
    }
    #[inline(always)]
    unsafe fn min<L: Lanes>(scales: *const u8, part: usize) -> L {
        // SAFETY: the caller's promise.
        unsafe { k_min(scales, part) }
    }
}

pub(super) struct Q5K;

impl Format for Q5K {
    const DTYPE: TensorType = TensorType::Q5K;
    const PARTS: usize = 8;
    const PART_BYTES: usize = 20 * LANES;
    const SCALES: usize = 1;
    const MINS: bool = true;
    #[inline(always)]
    unsafe fn word<B: Bytes>(words: *const u8, part: usize, index: usize) -> B {
        // SAFETY: the caller's promise. Eight words of fifth bits come before the pairs; bit n
        // belongs to part n.
        unsafe {
            let fifth = load::<B>(words, index).right(part, 1).left(4, 16);
            let bytes: B = load(words, WORDS + part / 2 * WORDS + index);
            bytes.right(part % 2 * 4, 15).or(fifth)
        }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(scales: *const u8, part: usize) -> L {
        // SAFETY: the caller's promise.
        unsafe { k_scale(scales, part) }
    }
    #[inline(always)]
    unsafe fn min<L: Lanes>(scales: *const u8, part: usize) -> L {
        // SAFETY: the caller's promise.
        unsafe { k_min(scales, part) }
    }
}

pub(super) struct Q6K;

impl Format for Q6K {
    const DTYPE: TensorType = TensorType::Q6K;
    const PARTS: usize = 8;
    const PART_BYTES: usize = 24 * LANES;
    const SCALES: usize = 2;
    const MINS: bool = false;
    #[inline(always)]
    unsafe fn word<B: Bytes>(words: *const u8, part: usize, index: usize) -> B {
        // SAFETY: the caller's promise. Four parts share 16 words of lower 4 bits and 8 of upper 2.
        unsafe {
            let (half, quarter) = (part / 4, part % 4);
            let upper = load::<B>(words, 32 + half * WORDS + index);
            let upper = upper.right(quarter * 2, 3).left(4, 48);
            let bytes: B = load(words, half * 16 + quarter % 2 * WORDS + index);
            bytes.right(quarter / 2 * 4, 15).or(upper).sub(32)
        }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(scales: *const u8, index: usize) -> L {
        // SAFETY: the caller's promise.
        unsafe { halves::<L>(scales, 16).mul(L::load_i8(scales.add(index * LANES))) }
    }
}
