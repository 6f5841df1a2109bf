//! Functions of `f32` lanes: exponential, sigmoid, GELU.
//!
//! The exponential splits `x = n ln 2 + r` with |r| at most half of ln 2 and takes the Taylor
//! polynomial of degree 7 in r; its relative error is below 2e-7.
#![allow(unsafe_code, reason = "runs on lanes, whose methods are unsafe")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: the path's set")]

use super::Lanes;

/// Below it the result would be subnormal; it is zero instead.
const EXP_MIN: f32 = -87.3;
/// Above it the result would overflow; it stays at this power's.
const EXP_MAX: f32 = 88.3;
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
pub(in crate::kernels) unsafe fn exp<L: Lanes>(x: L) -> L {
    // SAFETY: the caller's promise is all that lanes need.
    unsafe {
        let clamped = L::splat(EXP_MAX).min(L::splat(EXP_MIN).max(x));
        let shifted = clamped.mul_add(L::splat(std::f32::consts::LOG2_E), L::splat(ROUND));
        let n = shifted.sub(L::splat(ROUND));
        let r = n.mul_add(L::splat(-LN2_HIGH), clamped);
        let r = n.mul_add(L::splat(-LN2_LOW), r);
        let mut sum = L::splat(1.0 / 5040.0);
        for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            sum = sum.mul_add(r, L::splat(coefficient));
        }
        sum.scale_by_power(shifted).keep_where_ge(x, L::splat(EXP_MIN))
    }
}

/// e^x for weights that are rounded to bf16 next: relative error below 1e-5. 0 below -87.3, `x` at
/// most about 88, NaN for NaN. Two thirds of the work of [`exp`].
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
pub(in crate::kernels) unsafe fn exp_rough<L: Lanes>(x: L) -> L {
    /// Powers of ln 2 over factorials: the Taylor polynomial of 2^r, highest first.
    const TAYLOR: [f32; 5] = [0.009_618_13, 0.055_504_11, 0.240_226_5, std::f32::consts::LN_2, 1.0];
    // SAFETY: the caller's promise is all that lanes need.
    unsafe {
        let log2_e = L::splat(std::f32::consts::LOG2_E);
        let shifted = x.mul_add(log2_e, L::splat(ROUND));
        let r = x.mul_add(log2_e, L::splat(ROUND).sub(shifted));
        let mut sum = L::splat(0.001_333_356);
        for coefficient in TAYLOR {
            sum = sum.mul_add(r, L::splat(coefficient));
        }
        sum.scale_by_power(shifted).keep_where_ge(x, L::splat(EXP_MIN))
    }
}

/// 1 / (1 + e^-x), lane by lane.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
pub(in crate::kernels) unsafe fn sigmoid<L: Lanes>(x: L) -> L {
    // SAFETY: the caller's promise is all that lanes need.
    unsafe {
        let one = L::splat(1.0);
        one.div(one.add(exp(L::splat(0.0).sub(x))))
    }
}

/// GELU in its tanh form: x / 2 (1 + tanh(c (x + 0.044715 x^3))), c = sqrt(2 / pi), which is
/// x sigmoid(2 c (x + 0.044715 x^3)).
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
pub(in crate::kernels) unsafe fn gelu_tanh<L: Lanes>(x: L) -> L {
    const TWICE_C: f32 = 1.595_769;
    // SAFETY: the caller's promise is all that lanes need.
    unsafe {
        let cubic = x.mul(x).mul(x).mul_add(L::splat(0.044_715), x);
        x.mul(sigmoid(cubic.mul(L::splat(TWICE_C))))
    }
}
