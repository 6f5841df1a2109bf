//! Dot products of bytes on aarch64: with `sdot` where the processor has it, and without, by products of
//! 16 bits that are added up in pairs.
#![allow(unsafe_code, reason = "intrinsics")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: the set given")]

use std::arch::aarch64::{
    int8x16_t, int32x4_t, uint8x16_t, vandq_u8, vcombine_s8, vcvtq_f32_s32, vdupq_n_s8,
    vdupq_n_s32, vdupq_n_u8, vget_low_s8, vld1_s8, vld1q_dup_s32, vld1q_s8, vld1q_u8,
    vmull_high_s8, vmull_s8, vorrq_u8, vpadalq_s16, vpaddq_s16, vreinterpretq_s8_s32,
    vreinterpretq_s8_u8, vshlq_u8, vsubq_u8,
};
use std::arch::asm;

use super::dots::{Bytes, Dots};
use crate::lanes::{Neon, each};

/// Sixteen words in four registers.
type Four = [uint8x16_t; 4];
/// The same, signed.
type Signed = [int8x16_t; 4];
/// Sixteen sums in four registers.
type Sums = [int32x4_t; 4];

// SAFETY of every block below: every aarch64 has NEON, the caller promises what a type needs beyond it,
// and pointers that are valid for what the method reads or writes.
impl Bytes for Four {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: see above.
        unsafe {
            let (low, high) = (from, from.add(32));
            [vld1q_u8(low), vld1q_u8(low.add(16)), vld1q_u8(high), vld1q_u8(high.add(16))]
        }
    }
    #[inline(always)]
    unsafe fn or(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { each!(vorrq_u8(self, other)) }
    }
    #[inline(always)]
    unsafe fn sub(self, value: u8) -> Self {
        // SAFETY: see above.
        unsafe {
            let value = [vdupq_n_u8(value); 4];
            each!(vsubq_u8(self, value))
        }
    }
    #[inline(always)]
    unsafe fn right(self, count: usize, mask: u8) -> Self {
        // SAFETY: see above. Shifts of a byte by less than nothing go right.
        unsafe { shift(self, (count as i8).wrapping_neg(), mask) }
    }
    #[inline(always)]
    unsafe fn left(self, count: usize, mask: u8) -> Self {
        // SAFETY: see above.
        unsafe { shift(self, count as i8, mask) }
    }
}

/// Each byte shifted, then masked.
#[inline(always)]
unsafe fn shift(bytes: Four, left: i8, mask: u8) -> Four {
    // SAFETY: see above.
    unsafe {
        let (left, mask) = ([vdupq_n_s8(left); 4], [vdupq_n_u8(mask); 4]);
        let shifted = each!(vshlq_u8(bytes, left));
        each!(vandq_u8(shifted, mask))
    }
}

/// `sdot` of a word and some rows: the sums of a row, four registers, with its lane of the activations. The
/// compiler's own intrinsic is not stable.
///
/// One statement, so that the instructions stay together, and not said to leave memory alone, so that the
/// next words are loaded after it: left free, the compiler takes an order for which registers do not suffice.
macro_rules! sdot {
    ($sums:ident, $words:ident, $x:ident, $($row:literal: $a:ident $b:ident $c:ident $d:ident)+) => {
        asm!(
            $(
                concat!("sdot {", stringify!($a), ":v}.4s, {w0:v}.16b, {x:v}.4b[", $row, "]"),
                concat!("sdot {", stringify!($b), ":v}.4s, {w1:v}.16b, {x:v}.4b[", $row, "]"),
                concat!("sdot {", stringify!($c), ":v}.4s, {w2:v}.16b, {x:v}.4b[", $row, "]"),
                concat!("sdot {", stringify!($d), ":v}.4s, {w3:v}.16b, {x:v}.4b[", $row, "]"),
            )+
            $(
                $a = inout(vreg) $sums[$row][0],
                $b = inout(vreg) $sums[$row][1],
                $c = inout(vreg) $sums[$row][2],
                $d = inout(vreg) $sums[$row][3],
            )+
            w0 = in(vreg) $words[0],
            w1 = in(vreg) $words[1],
            w2 = in(vreg) $words[2],
            w3 = in(vreg) $words[3],
            x = in(vreg) $x,
            options(nostack, preserves_flags),
        )
    };
}

/// Adds to the sums of R rows, at most four, the products with a word.
///
/// # Safety
/// FEAT_DotProd is available; there are R words of activations at `x`.
#[target_feature(enable = "neon,dotprod")]
#[inline]
unsafe fn add_rows<const R: usize>(sums: &mut [Sums; R], words: Signed, x: *const u8) {
    // SAFETY: the caller's promise.
    unsafe {
        match R {
            1 => {
                let x = vreinterpretq_s8_s32(vld1q_dup_s32(x.cast()));
                sdot!(sums, words, x, 0: a b c d);
            }
            2 => {
                let x = vld1_s8(x.cast());
                let x = vcombine_s8(x, x);
                sdot!(sums, words, x, 0: a b c d 1: e f g h);
            }
            4 => {
                let x = vld1q_s8(x.cast());
                sdot!(sums, words, x, 0: a b c d 1: e f g h 2: i j k l 3: m n o p);
            }
            _ => unreachable!("no group of {R} rows"),
        }
    }
}

/// Adds to four sums the products of four words with four activations, four times over.
///
/// Activations are at least -127 (but beside what is no number, whose sums are dropped), so that two products
/// of 16 bits can be added: they are at most 2 * 127 * 128.
#[inline(always)]
unsafe fn add_pairs(sums: int32x4_t, words: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: see above.
    unsafe {
        let low = vmull_s8(vget_low_s8(words), vget_low_s8(x));
        let high = vmull_high_s8(words, x);
        vpadalq_s16(sums, vpaddq_s16(low, high))
    }
}

/// NEON, and FEAT_DotProd if `SDOT`.
#[derive(Clone, Copy)]
pub(super) struct NeonDots<const SDOT: bool>;

impl<const SDOT: bool> Dots for NeonDots<SDOT> {
    type Bytes = Four;
    type Lanes = Neon;
    type Weights = Signed;
    type Sums = Sums;
    const WORD: usize = 4;
    // Sixteen registers of sums, four of weights, and one of activations.
    const GROUP_MAX: usize = 4;

    #[inline(always)]
    unsafe fn put(x: [i8; 4], to: *mut u8) {
        // SAFETY: the caller gives four writable bytes.
        unsafe { to.cast::<[i8; 4]>().write(x) }
    }
    #[inline(always)]
    unsafe fn weights(bytes: Four) -> Signed {
        // SAFETY: see above.
        unsafe { each!(vreinterpretq_s8_u8(bytes)) }
    }
    #[inline(always)]
    unsafe fn zero() -> Sums {
        // SAFETY: see above.
        [unsafe { vdupq_n_s32(0) }; 4]
    }
    #[inline(always)]
    unsafe fn dot(sums: Sums, weights: Signed, x: *const u8) -> Sums {
        let mut sums = [sums];
        // SAFETY: see above.
        unsafe { Self::dot_rows(&mut sums, weights, x) };
        sums[0]
    }
    #[inline(always)]
    unsafe fn dot_rows<const R: usize>(sums: &mut [Sums; R], weights: Signed, x: *const u8) {
        // SAFETY: see above, with FEAT_DotProd where it is used.
        unsafe {
            if SDOT {
                return add_rows(sums, weights, x);
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = x.add(r * Self::WORD).cast();
                let x = [vreinterpretq_s8_s32(vld1q_dup_s32(x)); 4];
                *sums = each!(add_pairs(*sums, weights, x));
            }
        }
    }
    #[inline(always)]
    unsafe fn widen(sums: Sums, _: Sums) -> Neon {
        // SAFETY: see above.
        Neon(unsafe { each!(vcvtq_f32_s32(sums)) })
    }
}
