//! Sixteen sums of byte products: the integer counterpart of [`Lanes`].
//!
//! A *word* is four successive weights of one output feature; a register of them, 16 features, is
//! what one step multiplies by four activations of a row. All sums are exact integers, so every
//! implementation gives the same ones, whatever order or form of instruction it uses.
#![allow(unsafe_code, reason = "the traits' methods run instruction sets")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one access by pointer")]

use crate::lanes::{LANES, Lanes, Portable};

/// Bytes of 16 words.
pub(super) const RUN: usize = 4 * LANES;

/// Sixteen words, as bytes.
///
/// # Safety of the methods
/// The instruction set of the implementation is available; pointers are valid for [`RUN`] bytes.
pub(super) trait Bytes: Copy {
    unsafe fn load(from: *const u8) -> Self;
    #[cfg(target_arch = "x86_64")]
    unsafe fn store(self, to: *mut u8);
    unsafe fn or(self, other: Self) -> Self;
    unsafe fn sub(self, value: u8) -> Self;
    /// Each byte shifted down, then masked. `mask` has none of the upper `count` bits.
    unsafe fn right(self, count: usize, mask: u8) -> Self;
    /// Each byte shifted up, then masked. `mask` has none of the lower `count` bits.
    unsafe fn left(self, count: usize, mask: u8) -> Self;
}

/// Dot products of signed bytes.
///
/// # Safety of the methods
/// The instruction set of the implementation is available; pointers are valid for what they name.
pub(super) trait Dots: Copy {
    type Bytes: Bytes;
    type Lanes: Lanes;
    /// Sixteen words of signed weights in the form that [`Dots::dot`] takes.
    type Weights: Copy;
    /// Sixteen integers.
    type Sums: Copy;
    /// Bytes that four activations of a row take.
    const WORD: usize;
    /// Most rows that are multiplied at a time.
    const GROUP_MAX: usize;

    /// Writes four activations as [`Dots::dot`] reads them, [`Dots::WORD`] bytes.
    unsafe fn put(x: [i8; 4], to: *mut u8);
    unsafe fn weights(bytes: Self::Bytes) -> Self::Weights;
    unsafe fn zero() -> Self::Sums;
    /// Adds to `excess` what each sum has too much by [`Dots::dot`] with these weights: nothing, unless the
    /// set can only multiply what is shifted.
    #[inline(always)]
    unsafe fn exceed(excess: Self::Sums, _weights: Self::Weights) -> Self::Sums {
        excess
    }
    /// Adds four products to each sum.
    unsafe fn dot(sums: Self::Sums, weights: Self::Weights, x: *const u8) -> Self::Sums;
    /// The same for each of R rows, whose activations stand side by side.
    #[inline(always)]
    unsafe fn dot_rows<const R: usize>(
        sums: &mut [Self::Sums; R],
        weights: Self::Weights,
        x: *const u8,
    ) {
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *sums = unsafe { Self::dot(*sums, weights, x.add(r * Self::WORD)) };
        }
    }
    /// The sums, less their excess, as f32.
    unsafe fn widen(sums: Self::Sums, excess: Self::Sums) -> Self::Lanes;
    /// `a * b + c`, rounded once.
    unsafe fn fused(a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes {
        // SAFETY: the caller's promise. Every set but plain Rust has the fused form.
        unsafe { a.mul_add(b, c) }
    }
}

/// Sixteen words in plain Rust.
#[derive(Clone, Copy)]
pub(super) struct PlainBytes([u8; RUN]);

// SAFETY of every block below: the caller's pointers are valid for what is read or written.
impl Bytes for PlainBytes {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: see above.
        PlainBytes(unsafe { from.cast::<[u8; RUN]>().read() })
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: see above.
        unsafe { to.cast::<[u8; RUN]>().write(self.0) }
    }
    #[inline(always)]
    unsafe fn or(mut self, other: Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(byte, other)| *byte |= other);
        self
    }
    #[inline(always)]
    unsafe fn sub(self, value: u8) -> Self {
        PlainBytes(self.0.map(|byte| byte.wrapping_sub(value)))
    }
    #[inline(always)]
    unsafe fn right(self, count: usize, mask: u8) -> Self {
        PlainBytes(self.0.map(|byte| (byte >> count) & mask))
    }
    #[inline(always)]
    unsafe fn left(self, count: usize, mask: u8) -> Self {
        PlainBytes(self.0.map(|byte| (byte << count) & mask))
    }
}

/// Dot products in plain Rust.
#[derive(Clone, Copy)]
pub(super) struct PlainDots;

// Sums of bytes' products are below 2^24, so f32 holds them exactly, and every target has vectors
// of it.
impl Dots for PlainDots {
    type Bytes = PlainBytes;
    type Lanes = Portable;
    /// The first bytes of all words, the second ones, and so on.
    type Weights = [Portable; 4];
    type Sums = Portable;
    const WORD: usize = 4 * size_of::<f32>();
    const GROUP_MAX: usize = 4;

    #[inline(always)]
    unsafe fn put(x: [i8; 4], to: *mut u8) {
        // SAFETY: see above.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(x.map(f32::from)) }
    }
    #[inline(always)]
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
    unsafe fn zero() -> Portable {
        Portable([0.0; LANES])
    }
    #[inline(always)]
    unsafe fn dot(mut sums: Portable, weights: [Portable; 4], x: *const u8) -> Portable {
        // SAFETY: see above.
        let x = unsafe { x.cast::<[f32; 4]>().read_unaligned() };
        for (weights, x) in weights.iter().zip(x) {
            for (sum, weight) in sums.0.iter_mut().zip(weights.0) {
                *sum += weight * x;
            }
        }
        sums
    }
    #[inline(always)]
    unsafe fn widen(sums: Portable, _: Portable) -> Portable {
        sums
    }
    #[inline(always)]
    unsafe fn fused(a: Portable, b: Portable, c: Portable) -> Portable {
        Portable(std::array::from_fn(|i| a.0[i].mul_add(b.0[i], c.0[i])))
    }
}
