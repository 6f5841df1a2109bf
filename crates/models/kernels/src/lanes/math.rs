//! Elementwise functions on vectors: powers of two, sigmoid, GELU and softplus.
//!
//! A power of two splits `x = n + r` with an integer `n` and `|r| <= 1/2`, evaluates a polynomial
//! in `r`, and adds `n` to the exponent of the result.
#![allow(unsafe_code, reason = "runs on SIMD lanes, whose methods are unsafe")]

use super::vector::Lanes;

/// Smallest exponent whose power of two is a normal number.
const EXP2_MIN: f32 = -126.0;
/// Largest exponent for which the intermediate results are finite.
const EXP2_MAX: f32 = 126.0;
/// 1.5 * 2^23. Adding it to a small number leaves the nearest integer in the low bits of the
/// significand.
const ROUND: f32 = 12_582_912.0;

/// 2^x for `x <= 126` with a relative error below 2e-7. Zero below -126, NaN for NaN.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
pub(crate) unsafe fn exp2<L: Lanes>(x: L) -> L {
    /// Coefficients of the Taylor polynomial of 2^r, highest degree first.
    const TAYLOR: [f32; 7] = [
        1.540_353e-4,
        1.333_355_8e-3,
        9.618_129e-3,
        5.550_411e-2,
        0.240_226_5,
        std::f32::consts::LN_2,
        1.0,
    ];
    // SAFETY: computes in registers; the instruction set of `L` is available.
    unsafe {
        power_of_two(x, L::splat(1.525_273_4e-5), &TAYLOR).keep_where_ge(x, L::splat(EXP2_MIN))
    }
}

/// 2^x for `x <= 126`, clamped to `x >= -126`, by a polynomial for 2^r whose coefficients are
/// `highest` and then `coefficients` in descending order of degree.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
unsafe fn power_of_two<L: Lanes>(x: L, highest: L, coefficients: &[f32]) -> L {
    // SAFETY: computes in registers; the instruction set of `L` is available.
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

/// 1 / (1 + e^-x). The relative error is below 3e-7 plus 1e-7 for each unit by which `x` is below
/// zero. About 1e-38 below -87.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
pub(crate) unsafe fn sigmoid<L: Lanes>(x: L) -> L {
    /// The minimax polynomial of 2^r for `|r| <= 1/2` that begins with `1 + r ln 2`. Its maximum
    /// relative error is 1.1e-7.
    const MINIMAX: [f32; 5] =
        [0.009_669_81, 0.055_505_604, 0.240_222_8, std::f32::consts::LN_2, 1.0];
    // SAFETY: computes in registers; the instruction set of `L` is available.
    unsafe {
        let power = x.mul(L::splat(-std::f32::consts::LOG2_E));
        let power = L::splat(EXP2_MAX).min(power);
        let exp = power_of_two(power, L::splat(0.001_330_018_9), &MINIMAX);
        L::splat(1.0).add(exp).reciprocal()
    }
}

/// `cap * tanh(x / cap)` for a positive `cap`, computed as `cap * (2 sigmoid(2 x / cap) - 1)`. The
/// absolute error is below `7e-7 * cap`; exactly 0 at zero.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
pub(crate) unsafe fn soft_cap<L: Lanes>(x: L, cap: f32) -> L {
    // SAFETY: computes in registers; the instruction set of `L` is available.
    unsafe {
        let share = sigmoid(x.mul(L::splat(2.0 / cap)));
        share.mul_add(L::splat(2.0 * cap), L::splat(-cap))
    }
}

/// GELU, `x / 2 (1 + erf(x / sqrt(2)))`. The absolute error is below 2e-7 plus a relative one of
/// 1e-7, by the rational approximation 7.1.26 of Abramowitz and Stegun: `1 - erf(z)` is about
/// `p(t) e^(-z^2)` with `t = 1 / (1 + 0.3275911 z)` for `z >= 0`, and erf is odd.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
pub(crate) unsafe fn gelu<L: Lanes>(x: L) -> L {
    /// Coefficients of `p`, highest degree first. It has no constant term.
    const COEFFICIENTS: [f32; 4] = [-1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6];
    const SLOPE: f32 = 0.327_591_1 * std::f32::consts::FRAC_1_SQRT_2;
    // SAFETY: computes in registers; the instruction set of `L` is available.
    unsafe {
        let magnitude = L::splat(0.0).sub(x).max(x);
        let t = magnitude.mul_add(L::splat(SLOPE), L::splat(1.0)).reciprocal();
        let mut sum = L::splat(1.061_405_4);
        for coefficient in COEFFICIENTS {
            sum = sum.mul_add(t, L::splat(coefficient));
        }
        let power = exp2(x.mul(x).mul(L::splat(-0.5 * std::f32::consts::LOG2_E)));
        let rest = sum.mul(t).mul(power).mul(magnitude).mul(L::splat(0.5));
        L::splat(0.0).max(x).sub(rest)
    }
}

/// `ln(1 + e^x)`. The relative error is below 1e-6. Zero below -87, NaN for NaN.
///
/// It is `max(x, 0) + ln(1 + u)` with `u = e^-|x|`, and the logarithm is the series of `2 artanh(z)`
/// with `z = u / (2 + u)`, which is at most a third.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
pub(crate) unsafe fn softplus<L: Lanes>(x: L) -> L {
    // SAFETY: computes in registers; the instruction set of `L` is available.
    unsafe {
        let magnitude = L::splat(0.0).sub(x).max(x);
        let u = exp2(magnitude.mul(L::splat(-std::f32::consts::LOG2_E)));
        let z = u.div(u.add(L::splat(2.0)));
        let square = z.mul(z);
        let mut sum = L::splat(2.0 / 15.0);
        for degree in [13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
            sum = sum.mul_add(square, L::splat(2.0 / degree));
        }
        sum.mul_add(z, L::splat(0.0).max(x))
    }
}

/// `max(x, 0)^2`.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
pub(crate) unsafe fn squared_relu<L: Lanes>(x: L) -> L {
    // SAFETY: computes in registers; the instruction set of `L` is available.
    unsafe {
        let positive = L::splat(0.0).max(x);
        positive.mul(positive)
    }
}

/// The tanh approximation of GELU, `x / 2 (1 + tanh(c (x + 0.044715 x^3)))` with `c = sqrt(2 /
/// pi)`, computed as `x sigmoid(2 c (x + 0.044715 x^3))`.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
pub(crate) unsafe fn gelu_tanh<L: Lanes>(x: L) -> L {
    const TWICE_C: f32 = 1.595_769;
    // SAFETY: computes in registers; the instruction set of `L` is available.
    unsafe {
        let cubic = x.mul(x).mul(x).mul_add(L::splat(0.044_715), x);
        x.mul(sigmoid(cubic.mul(L::splat(TWICE_C))))
    }
}
