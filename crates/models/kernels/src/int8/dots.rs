//! Dot products of signed bytes: the integer counterpart of [`Lanes`].
//!
//! A *word* is four successive weights of one output feature. One step multiplies a vector of 16
//! words, one per output feature, with four activations of a row. All sums are exact integers, so
//! every implementation gives the same result with any instructions in any order.
#![allow(unsafe_code, reason = "the traits' methods run instruction sets")]

use super::activations::SubBlock;
use crate::lanes::{Bytes, LANES, Lanes, PlainBytes, Portable};
use crate::quant::SUB_BLOCK;

/// An instruction sequence for dot products of signed bytes.
///
/// # Safety of the methods
/// The instruction set of the implementing type is available. Pointers need no alignment; each
/// method says for how many bytes they are valid.
pub(super) trait Dots: Copy {
    /// A vector of 16 words.
    type Bytes: Bytes;
    /// A vector of 16 f32 values.
    type Lanes: Lanes;
    /// 16 words of signed weights in the form that [`Dots::dot`] needs.
    type Weights: Copy;
    /// 16 integer sums.
    type Sums: Copy;
    /// Number of bytes of four packed activations of a row.
    const WORD: usize;
    /// Maximum number of rows of a group.
    const GROUP_MAX: usize;

    /// Quantizes 32 activations. Every set gives the same result, unless the scale is NaN.
    #[inline(always)]
    unsafe fn quantize(values: &[f32; SUB_BLOCK]) -> SubBlock {
        SubBlock::of(values)
    }
    /// Writes four activations, [`Dots::WORD`] bytes, in the form that [`Dots::dot`] reads: as
    /// signed bytes unless the set needs another one.
    #[inline(always)]
    unsafe fn put(x: [i8; 4], to: *mut u8) {
        // SAFETY: `to` is writable for `WORD` bytes, which are four for signed bytes.
        unsafe { to.cast::<[i8; 4]>().write(x) }
    }
    /// Converts 16 words to the form that [`Dots::dot`] needs.
    unsafe fn weights(bytes: Self::Bytes) -> Self::Weights;
    /// The sums of a row before the first [`Dots::dot`]: zero, or, if [`Dots::weights`] adds 128 to
    /// each weight, `offset`, which is -128 times the sum of the activations.
    unsafe fn start(offset: i32) -> Self::Sums;
    /// Adds four products to each sum. Reads [`Dots::WORD`] bytes of activations from `x`.
    unsafe fn dot(sums: Self::Sums, weights: Self::Weights, x: *const u8) -> Self::Sums;
    /// Applies [`Dots::dot`] to the sums of R rows, whose activations are contiguous at `x`.
    #[inline(always)]
    unsafe fn dot_rows<const R: usize>(
        sums: &mut [Self::Sums; R],
        weights: Self::Weights,
        x: *const u8,
    ) {
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: `x` is readable for R words, of which this is word `r < R`.
            *sums = unsafe { Self::dot(*sums, weights, x.add(r * Self::WORD)) };
        }
    }
    /// The sums as f32.
    unsafe fn widen(sums: Self::Sums) -> Self::Lanes;
    /// `a * b + c`, rounded once.
    unsafe fn fused(a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes {
        // SAFETY: computes in registers; the instruction set is available. Every set except
        // portable Rust has fused multiply-add.
        unsafe { a.mul_add(b, c) }
    }
}

/// Dot products in portable Rust.
#[derive(Clone, Copy)]
pub(super) struct PlainDots;

// The sums are below 2^24, so f32 holds them exactly, and every target has vectors of f32.
impl Dots for PlainDots {
    type Bytes = PlainBytes;
    type Lanes = Portable;
    /// The first bytes of all words, then the second bytes, and so on.
    type Weights = [Portable; 4];
    type Sums = Portable;
    const WORD: usize = 4 * size_of::<f32>();
    const GROUP_MAX: usize = 4;

    #[inline(always)]
    unsafe fn put(x: [i8; 4], to: *mut u8) {
        // SAFETY: `to` is writable for `WORD` bytes, the size of four f32 values.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(x.map(f32::from)) }
    }
    #[inline(always)]
    /// Converts 16 words to the form that [`Dots::dot`] needs.
    unsafe fn weights(bytes: PlainBytes) -> [Portable; 4] {
        let mut weights = [Portable([0.0; LANES]); 4];
        for (place, weights) in weights.iter_mut().enumerate() {
            for (weight, word) in weights.0.iter_mut().zip(bytes.0.as_chunks::<4>().0) {
                *weight = f32::from(word[place].cast_signed());
            }
        }
        weights
    }
    #[inline(always)]
    unsafe fn start(_: i32) -> Portable {
        Portable([0.0; LANES])
    }
    #[inline(always)]
    unsafe fn dot(mut sums: Portable, weights: [Portable; 4], x: *const u8) -> Portable {
        // SAFETY: `x` is readable for `WORD` bytes, the size of four f32 values.
        let x = unsafe { x.cast::<[f32; 4]>().read_unaligned() };
        for (weights, x) in weights.iter().zip(x) {
            for (sum, weight) in sums.0.iter_mut().zip(weights.0) {
                *sum += weight * x;
            }
        }
        sums
    }
    #[inline(always)]
    unsafe fn widen(sums: Portable) -> Portable {
        sums
    }
    #[inline(always)]
    unsafe fn fused(a: Portable, b: Portable, c: Portable) -> Portable {
        Portable(std::array::from_fn(|i| a.0[i].mul_add(b.0[i], c.0[i])))
    }
}
