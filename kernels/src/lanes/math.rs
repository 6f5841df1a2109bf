//! Functions of `f32` lanes: exponential, sigmoid, GELU.
//!
//! The exponential splits `x = n ln 2 + r` with |r| at most half of ln 2 and takes the polynomial of
//! degree 6 in r whose largest relative error is least (3e-9) among those that begin with 1 + r; with
//! roundings its relative error is below 2e-7.
#![allow(unsafe_code, reason = "runs on lanes, whose methods are unsafe")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: the path's set")]

use super::Lanes;

/// Below it the result would be subnormal; it is zero instead.
const EXP_MIN: f32 = -87.3;
/// Above it the result would overflow; it stays at this power's.
const EXP_MAX: f32 = 88.3;
/// The same for powers of two.
const EXP2_MIN: f32 = -126.0;
const EXP2_MAX: f32 = 126.0;
/// Adding it leaves the nearest integer in the low bits of the significand.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has low bits free, so that n times it is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// e^x, lane by lane; 0 below -87.3, about 2.2e38 above 88.3, NaN for NaN.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
pub(crate) unsafe fn exp<L: Lanes>(x: L) -> L {
    const MINIMAX: [f32; 6] = [0.008_368_781, 0.041_668_393, 0.166_665_2, 0.499_999_94, 1.0, 1.0];
    // SAFETY: the caller's promise is all that lanes need.
    unsafe {
        let clamped = L::splat(EXP_MAX).min(L::splat(EXP_MIN).max(x));
        let shifted = clamped.mul_add(L::splat(std::f32::consts::LOG2_E), L::splat(ROUND));
        let n = shifted.sub(L::splat(ROUND));
        let r = n.mul_add(L::splat(-LN2_HIGH), clamped);
        let r = n.mul_add(L::splat(-LN2_LOW), r);
        let mut sum = L::splat(0.001_381_446_7);
        for coefficient in MINIMAX {
            sum = sum.mul_add(r, L::splat(coefficient));
        }
        sum.scale_by_power(shifted).keep_where_ge(x, L::splat(EXP_MIN))
    }
}

/// 2^x for x up to 126, lane by lane, relative error below 2e-7; 0 below -126, NaN for NaN.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
pub(crate) unsafe fn exp2<L: Lanes>(x: L) -> L {
    /// Powers of ln 2 over factorials: the Taylor polynomial of 2^r, highest first.
    const TAYLOR: [f32; 7] = [
        1.540_353e-4,
        1.333_355_8e-3,
        9.618_129e-3,
        5.550_411e-2,
        0.240_226_5,
        std::f32::consts::LN_2,
        1.0,
    ];
    // SAFETY: the caller's promise is all that lanes need.
    unsafe {
        power_of_two(x, L::splat(1.525_273_4e-5), &TAYLOR).keep_where_ge(x, L::splat(EXP2_MIN))
    }
}

/// 2^x for x up to 126 and weights that are rounded to bf16 next: relative error below 1.1e-4, exactly 1
/// at zero; 2^-126 below -126, NaN for NaN.
///
/// # Safety
/// The instruction set of `L` is available.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) unsafe fn exp2_rough<L: Lanes>(x: L) -> L {
    /// The polynomial of degree 3 through (0, 1) whose largest relative error over |r| <= 1/2 is least.
    const MINIMAX: [f32; 3] = [0.242_211_01, 0.693_282_9, 1.0];
    // SAFETY: the caller's promise is all that lanes need.
    unsafe { power_of_two(x, L::splat(0.055_008_95), &MINIMAX) }
}

/// 2^x, from -126 on, by a polynomial of 2^r for |r| at most one half, whose coefficients stand highest
/// first.
#[inline(always)]
unsafe fn power_of_two<L: Lanes>(x: L, highest: L, coefficients: &[f32]) -> L {
    // SAFETY: the caller's promise is all that lanes need.
    unsafe {
        let clamped = L::splat(EXP2_MIN).max(x);
        let shifted = clamped.add(L::splat(ROUND));
        let r = clamped.sub(shifted.sub(L::splat(ROUND)));
        let mut sum = highest;
        for &coefficient in coefficients {
            sum = sum.mul_add(r, L::splat(coefficient));
        }
        sum.scale_by_power(shifted)
    }
}

/// 1 / (1 + e^-x), lane by lane; relative error below 3e-7 and 1e-7 for each unit of |x| below zero. 1e-38
/// or so below -87.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
pub(crate) unsafe fn sigmoid<L: Lanes>(x: L) -> L {
    /// The polynomial of 2^r for |r| <= 1/2 that begins with 1 + r ln 2 and whose largest relative
    /// error (1.1e-7) is least.
    const MINIMAX: [f32; 5] =
        [0.009_669_81, 0.055_505_604, 0.240_222_8, std::f32::consts::LN_2, 1.0];
    // SAFETY: the caller's promise is all that lanes need.
    unsafe {
        let power = x.mul(L::splat(-std::f32::consts::LOG2_E));
        let power = L::splat(EXP2_MAX).min(power);
        let exp = power_of_two(power, L::splat(0.001_330_018_9), &MINIMAX);
        L::splat(1.0).add(exp).reciprocal()
    }
}

/// GELU in its tanh form: x / 2 (1 + tanh(c (x + 0.044715 x^3))), c = sqrt(2 / pi), which is
/// x sigmoid(2 c (x + 0.044715 x^3)).
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
pub(crate) unsafe fn gelu_tanh<L: Lanes>(x: L) -> L {
    const TWICE_C: f32 = 1.595_769;
    // SAFETY: the caller's promise is all that lanes need.
    unsafe {
        let cubic = x.mul(x).mul(x).mul_add(L::splat(0.044_715), x);
        x.mul(sigmoid(cubic.mul(L::splat(TWICE_C))))
    }
}
