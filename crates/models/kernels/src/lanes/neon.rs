//! [`Lanes`] on aarch64: four NEON registers.
//!
//! Every aarch64 target of Rust's standard library has NEON with fused multiply-add and conversion
//! of f16, so nothing needs to be detected.
#![allow(unsafe_code, reason = "intrinsics")]

use std::arch::aarch64::{
    float32x4_t, uint16x8_t, uint32x4_t, vadd_f32, vaddq_f32, vaddq_s32, vandq_u32, vbicq_u32,
    vbslq_f32, vcgtq_f32, vcltq_f32, vcvtq_f32_s32, vcvtq_f32_u32, vdivq_f32, vdupq_n_f32,
    vdupq_n_u32, vfmaq_f32, vfmsq_f32, vget_high_f32, vget_lane_f32, vget_low_f32, vget_low_s8,
    vget_low_s16, vget_low_u8, vget_low_u16, vld1q_f32, vld1q_s8, vld1q_u8, vld1q_u16, vld1q_u32,
    vmaxnmq_f32, vmaxnmvq_f32, vmovl_high_s8, vmovl_high_s16, vmovl_high_u8, vmovl_high_u16,
    vmovl_s8, vmovl_s16, vmovl_u8, vmovl_u16, vmulq_f32, vrecpeq_f32, vrecpsq_f32,
    vreinterpretq_f32_f64, vreinterpretq_f32_s32, vreinterpretq_f32_u32, vreinterpretq_f64_f32,
    vreinterpretq_s32_f32, vreinterpretq_u16_u8, vreinterpretq_u32_f32, vshlq_n_s32, vshlq_n_u32,
    vst1q_f32, vsubq_f32, vtrn1q_f32, vtrn2q_f32, vzip1q_f64, vzip1q_u8, vzip2q_f64, vzip2q_u8,
};
use std::arch::asm;

use super::vector::{Kernel, LANES, Lanes, binary, call};

/// Four registers of four lanes.
#[derive(Clone, Copy)]
pub(crate) struct Neon(pub(crate) [float32x4_t; 4]);

/// Mask of the upper 16 bits of a 32-bit lane: the second value of a bf16 pair, as f32 bits.
const UPPER_HALF: u32 = 0xffff_0000;

/// Applies a function to the corresponding registers of arrays of four. This is a macro because a
/// closure might not be inlined.
macro_rules! each {
    ($f:ident($($of:expr),+)) => {
        [$f($($of[0]),+), $f($($of[1]),+), $f($($of[2]),+), $f($($of[3]),+)]
    };
}
pub(crate) use each;

/// Widens eight 16-bit integers to 32 bits.
#[inline(always)]
fn widen(raw: uint16x8_t) -> [uint32x4_t; 2] {
    // SAFETY: every aarch64 has NEON.
    unsafe { [vmovl_u16(vget_low_u16(raw)), vmovl_high_u16(raw)] }
}

/// Widens eight f16 values to f32.
#[inline(always)]
fn widen_f16(raw: uint16x8_t) -> [float32x4_t; 2] {
    let (low, high): (float32x4_t, float32x4_t);
    // SAFETY: every aarch64 has NEON, and the instructions only change the output registers. The
    // intrinsics are stable only since Rust 1.94.
    unsafe {
        asm!("fcvtl {low:v}.4s, {raw:v}.4h", raw = in(vreg) raw, low = lateout(vreg) low,
            options(pure, nomem, nostack));
        asm!("fcvtl2 {high:v}.4s, {raw:v}.8h", raw = in(vreg) raw, high = lateout(vreg) high,
            options(pure, nomem, nostack));
    }
    [low, high]
}

/// The larger value; `b` if either is NaN. (NEON's maximum returns the NaN of either operand.)
#[inline(always)]
fn larger(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: every aarch64 has NEON.
    unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

/// The smaller value; `b` if either is NaN.
#[inline(always)]
fn smaller(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: every aarch64 has NEON.
    unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
}

/// The reciprocal: an estimate of eight bits, which Arm's manual defines exactly, and two Newton
/// steps. Small processors divide one lane at a time, so a division would be slower.
#[inline(always)]
fn invert(x: float32x4_t) -> float32x4_t {
    // SAFETY: every aarch64 has NEON.
    unsafe {
        let rough = vrecpeq_f32(x);
        let near = vmulq_f32(rough, vrecpsq_f32(x, rough));
        let error = vfmsq_f32(vdupq_n_f32(1.0), x, near);
        vfmaq_f32(near, error, near)
    }
}

/// `value * 2^n`, where `n` is in the low bits of `shifted`.
#[inline(always)]
fn scale(value: float32x4_t, shifted: float32x4_t) -> float32x4_t {
    // SAFETY: every aarch64 has NEON.
    unsafe {
        let n = vshlq_n_s32::<23>(vreinterpretq_s32_f32(shifted));
        vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(value), n))
    }
}

/// `value`, or zero where `x < limit`.
#[inline(always)]
fn keep(value: float32x4_t, x: float32x4_t, limit: float32x4_t) -> float32x4_t {
    // SAFETY: every aarch64 has NEON.
    unsafe { vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vcltq_f32(x, limit))) }
}

/// Loads 16 words.
///
/// # Safety
/// `from` is readable for 16 words.
#[inline(always)]
unsafe fn load_words(from: *const u32) -> [uint32x4_t; 4] {
    // SAFETY: each register is filled with 4 of the 16 words, and every aarch64 has NEON.
    unsafe {
        [vld1q_u32(from), vld1q_u32(from.add(4)), vld1q_u32(from.add(8)), vld1q_u32(from.add(12))]
    }
}

/// The first value of each bf16 pair.
#[inline(always)]
fn first(raw: uint32x4_t) -> float32x4_t {
    // SAFETY: every aarch64 has NEON.
    unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<16>(raw)) }
}

/// The second value of each bf16 pair.
#[inline(always)]
fn second(raw: uint32x4_t) -> float32x4_t {
    // SAFETY: every aarch64 has NEON.
    unsafe { vreinterpretq_f32_u32(vandq_u32(raw, vdupq_n_u32(UPPER_HALF))) }
}

/// The low halves of two registers.
#[inline(always)]
fn low_halves([a, b]: [float32x4_t; 2]) -> float32x4_t {
    // SAFETY: every aarch64 has NEON.
    unsafe {
        let halves = vzip1q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b));
        vreinterpretq_f32_f64(halves)
    }
}

/// The high halves of two registers.
#[inline(always)]
fn high_halves([a, b]: [float32x4_t; 2]) -> float32x4_t {
    // SAFETY: every aarch64 has NEON.
    unsafe {
        let halves = vzip2q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b));
        vreinterpretq_f32_f64(halves)
    }
}

/// Transposes the 4 x 4 matrix in register `column` of four rows.
#[inline(always)]
fn transpose_4x4(rows: &[Neon], column: usize) -> [float32x4_t; 4] {
    // SAFETY: every aarch64 has NEON.
    unsafe {
        let [a, b] = [rows[0].0[column], rows[1].0[column]];
        let [c, d] = [rows[2].0[column], rows[3].0[column]];
        let even = [vtrn1q_f32(a, b), vtrn1q_f32(c, d)];
        let odd = [vtrn2q_f32(a, b), vtrn2q_f32(c, d)];
        [low_halves(even), low_halves(odd), high_halves(even), high_halves(odd)]
    }
}

/// Applies an intrinsic to the four registers.
macro_rules! four {
    ($f:ident($a:expr, $b:expr)) => {
        Neon(each!($f($a.0, $b.0)))
    };
}

impl Lanes for Neon {
    // Four rows of a panel are 16 independent chains of additions, as many as the widest processors
    // execute at once (four units with a latency of four cycles). Six rows would fit in the
    // registers, except with bf16 pairs, which need eight more.
    const REGISTERS: usize = 8;
    const GROUP_MAX: usize = 4;

    call!();
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: computes in registers; every aarch64 has NEON.
        Neon([unsafe { vdupq_n_f32(value) }; 4])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: `from` is readable for 16 values, and every aarch64 has NEON.
        unsafe {
            let (low, high) = (from, from.add(8));
            Neon([vld1q_f32(low), vld1q_f32(low.add(4)), vld1q_f32(high), vld1q_f32(high.add(4))])
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: `to` is writable for 16 values, and every aarch64 has NEON.
        unsafe {
            vst1q_f32(to, self.0[0]);
            vst1q_f32(to.add(4), self.0[1]);
            vst1q_f32(to.add(8), self.0[2]);
            vst1q_f32(to.add(12), self.0[3]);
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: `from` is readable for 16 values, and every aarch64 has NEON.
        unsafe {
            let [[a, b], [c, d]] = [widen(vld1q_u16(from)), widen(vld1q_u16(from.add(8)))];
            Neon([first(a), first(b), first(c), first(d)])
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: `from` is readable for 16 values, and every aarch64 has NEON.
        let [[a, b], [c, d]] =
            unsafe { [widen_f16(vld1q_u16(from)), widen_f16(vld1q_u16(from.add(8)))] };
        Neon([a, b, c, d])
    }
    #[inline(always)]
    unsafe fn load_f16_bytes(low: *const u8, high: *const u8) -> Self {
        // SAFETY: `low` and `high` are readable for 16 bytes each, and every aarch64 has NEON.
        unsafe {
            let (low, high) = (vld1q_u8(low), vld1q_u8(high));
            let [a, b] = widen_f16(vreinterpretq_u16_u8(vzip1q_u8(low, high)));
            let [c, d] = widen_f16(vreinterpretq_u16_u8(vzip2q_u8(low, high)));
            Neon([a, b, c, d])
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_firsts(from: *const u16) -> Self {
        // SAFETY: `from` is readable for 32 values, and every aarch64 has NEON.
        unsafe {
            let raw = load_words(from.cast::<u32>());
            Neon(each!(first(raw)))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_seconds(from: *const u16) -> Self {
        // SAFETY: `from` is readable for 32 values, and every aarch64 has NEON.
        unsafe {
            let raw = load_words(from.cast::<u32>());
            Neon(each!(second(raw)))
        }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 16 bytes, and every aarch64 has NEON.
        unsafe {
            let raw = vld1q_u8(from);
            let [a, b] = widen(vmovl_u8(vget_low_u8(raw)));
            let [c, d] = widen(vmovl_high_u8(raw));
            let integers = [a, b, c, d];
            Neon(each!(vcvtq_f32_u32(integers)))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 16 bytes, and every aarch64 has NEON.
        unsafe {
            let raw = vld1q_s8(from.cast());
            let (low, high) = (vmovl_s8(vget_low_s8(raw)), vmovl_high_s8(raw));
            let [a, b] = [vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low)];
            let [c, d] = [vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)];
            let integers = [a, b, c, d];
            Neon(each!(vcvtq_f32_s32(integers)))
        }
    }
    binary!(four: add = vaddq_f32, sub = vsubq_f32, mul = vmulq_f32, div = vdivq_f32);
    #[inline(always)]
    unsafe fn reciprocal(self) -> Self {
        Neon(each!(invert(self.0)))
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: computes in registers; every aarch64 has NEON.
        Neon(unsafe { each!(vfmaq_f32(addend.0, self.0, factor.0)) })
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        Neon(each!(larger(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        Neon(each!(smaller(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn scale_by_power(self, shifted: Self) -> Self {
        Neon(each!(scale(self.0, shifted.0)))
    }
    #[inline(always)]
    unsafe fn keep_where_ge(self, x: Self, limit: Self) -> Self {
        Neon(each!(keep(self.0, x.0, limit.0)))
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        let [a, b, c, d] = self.0;
        // SAFETY: computes in registers; every aarch64 has NEON.
        unsafe {
            let four = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        let [a, b, c, d] = self.0;
        // SAFETY: computes in registers; every aarch64 has NEON.
        let largest = unsafe { vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(a, b), vmaxnmq_f32(c, d))) };
        f32::NEG_INFINITY.max(largest)
    }
    #[inline(always)]
    unsafe fn transpose(square: &mut [Self; LANES]) {
        // Each 4 x 4 block changes places with the block on the other side of the diagonal.
        for i in 0..4 {
            for j in i..4 {
                let blocks =
                    [transpose_4x4(&square[4 * i..], j), transpose_4x4(&square[4 * j..], i)];
                for k in 0..4 {
                    square[4 * j + k].0[i] = blocks[0][k];
                    square[4 * i + k].0[j] = blocks[1][k];
                }
            }
        }
    }
}
