//! Dot products of bytes on aarch64: by `sdot` if the processor has it (FEAT_DotProd), otherwise by
//! products of 16 bits that are added in pairs.
#![allow(unsafe_code, reason = "intrinsics")]

use std::arch::aarch64::{
    int8x16_t, int32x4_t, vcombine_s8, vcvtq_f32_s32, vdupq_n_s32, vget_low_s8, vld1_s8,
    vld1q_dup_s32, vld1q_s8, vmull_high_s8, vmull_s8, vpadalq_s16, vpaddq_s16,
    vreinterpretq_s8_s32, vreinterpretq_s8_u8,
};
use std::arch::asm;

use super::dots::Dots;
use crate::lanes::{Four, Neon, each};

/// 16 words of signed bytes in four registers.
type Signed = [int8x16_t; 4];
/// 16 sums in four registers.
type SumRegisters = [int32x4_t; 4];

/// The `sdot` instructions for a word and some rows: the four registers of sums of each row, with
/// the lane of that row's activations. The intrinsic of the compiler is not stable.
///
/// It is one `asm!` statement, so that the instructions stay together. It does not have the option
/// `nomem`, so that the next words are loaded after it. Otherwise the compiler chooses an order
/// that needs more registers than there are.
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

/// Adds the products with a vector of words to the sums of R rows. R is 1, 2 or 4.
///
/// # Safety
/// FEAT_DotProd is available, and `x` is readable for R words of activations.
#[target_feature(enable = "neon,dotprod")]
#[inline]
unsafe fn add_rows<const R: usize>(sums: &mut [SumRegisters; R], words: Signed, x: *const u8) {
    // SAFETY: `x` is readable for R words, and FEAT_DotProd is available.
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
            _ => unreachable!("no group has {R} rows"),
        }
    }
}

/// Adds the products of four words with the same four activations to four sums. `x` holds the
/// activations four times.
///
/// Two products of 16 bits can be added without overflow because activations are at least -127, so
/// the sum is at most 2 * 127 * 128. (If a row contains NaN its activations may be -128, but its
/// results are NaN in any case.)
///
/// # Safety
/// Every call is sound: every aarch64 has NEON.
#[inline(always)]
unsafe fn add_pairs(sums: int32x4_t, words: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: computes in registers; every aarch64 has NEON.
    unsafe {
        let low = vmull_s8(vget_low_s8(words), vget_low_s8(x));
        let high = vmull_high_s8(words, x);
        vpadalq_s16(sums, vpaddq_s16(low, high))
    }
}

/// Dot products by NEON, with FEAT_DotProd if `SDOT`.
#[derive(Clone, Copy)]
pub(super) struct NeonDots<const SDOT: bool>;

impl<const SDOT: bool> Dots for NeonDots<SDOT> {
    type Bytes = Four;
    type Lanes = Neon;
    type Weights = Signed;
    type Sums = SumRegisters;
    const WORD: usize = 4;
    // Four rows need 16 registers of sums, four of weights and one of activations.
    const GROUP_MAX: usize = 4;

    #[inline(always)]
    unsafe fn weights(bytes: Four) -> Signed {
        // SAFETY: computes in registers; every aarch64 has NEON.
        unsafe { each!(vreinterpretq_s8_u8(bytes)) }
    }
    #[inline(always)]
    unsafe fn start(_: i32) -> SumRegisters {
        // SAFETY: computes in registers; every aarch64 has NEON.
        [unsafe { vdupq_n_s32(0) }; 4]
    }
    #[inline(always)]
    unsafe fn dot(sums: SumRegisters, weights: Signed, x: *const u8) -> SumRegisters {
        let mut sums = [sums];
        // SAFETY: `x` is readable for `WORD` bytes, and every aarch64 has NEON.
        unsafe { Self::dot_rows(&mut sums, weights, x) };
        sums[0]
    }
    #[inline(always)]
    unsafe fn dot_rows<const R: usize>(
        sums: &mut [SumRegisters; R],
        weights: Signed,
        x: *const u8,
    ) {
        // SAFETY: `x` is readable for R words. `NeonDots<true>` is only used if FEAT_DotProd was
        // detected.
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
    unsafe fn widen(sums: SumRegisters) -> Neon {
        // SAFETY: computes in registers; every aarch64 has NEON.
        Neon(unsafe { each!(vcvtq_f32_s32(sums)) })
    }
}
