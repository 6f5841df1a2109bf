//! Gates, which multiply values with a function of others, and activations without a gate.
#![allow(unsafe_code, reason = "runs on SIMD lanes, whose methods are unsafe")]

use super::{map_in_place, zip_in_place};
use crate::lanes::math::{gelu, gelu_tanh, sigmoid, softplus, squared_relu};
use crate::lanes::{Lanes, dispatch, exp2};
use crate::path::Path;

/// `x *= silu(gate)`, elementwise, with `silu(x) = x / (1 + e^-x)`.
///
/// # Panics
/// If `x` and `gate` have different lengths.
pub fn mul_silu(path: Path, x: &mut [f32], gate: &[f32]) {
    assert_eq!(x.len(), gate.len(), "mul_silu: x and gate must have the same length");
    // SAFETY: both slices hold `x.len()` values, as asserted above.
    unsafe { mul_silu_dispatch(path, x.as_mut_ptr(), gate.as_ptr(), x.len()) }
}

/// `x *= sigmoid(gate)`, elementwise, with `sigmoid(x) = 1 / (1 + e^-x)`.
///
/// # Panics
/// If `x` and `gate` have different lengths.
pub fn mul_sigmoid(path: Path, x: &mut [f32], gate: &[f32]) {
    assert_eq!(x.len(), gate.len(), "mul_sigmoid: x and gate must have the same length");
    // SAFETY: both slices hold `x.len()` values, as asserted above.
    unsafe { mul_sigmoid_dispatch(path, x.as_mut_ptr(), gate.as_ptr(), x.len()) }
}

/// `gate = gelu(gate) * up`, elementwise, with the tanh approximation of GELU.
///
/// # Panics
/// If `gate` and `up` have different lengths.
pub fn gelu_tanh_mul(path: Path, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "gelu_tanh_mul: gate and up must have the same length");
    // SAFETY: `gate` and `up` each hold `gate.len()` values, as asserted above.
    unsafe { gelu_tanh_mul_dispatch(path, gate.as_mut_ptr(), up.as_ptr(), gate.len()) }
}

/// `gate = gelu(gate) * up`, elementwise, with the error function.
///
/// # Panics
/// If `gate` and `up` have different lengths.
pub fn gelu_mul(path: Path, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "gelu_mul: gate and up must have the same length");
    // SAFETY: `gate` and `up` each hold `gate.len()` values, as asserted above.
    unsafe { gelu_mul_dispatch(path, gate.as_mut_ptr(), up.as_ptr(), gate.len()) }
}

/// # Safety
/// The instruction set of `L` is available, and `gate` and `up` are valid for `len` values.
#[inline(always)]
unsafe fn gelu_mul_lanes<L: Lanes>(gate: *mut f32, up: *const f32, len: usize) {
    // SAFETY: `zip_in_place` requires exactly what this function requires; the closure only
    // computes in registers.
    unsafe { zip_in_place::<L>(gate, up, len, |g, u| gelu(g).mul(u)) }
}
dispatch! {
    /// # Safety
    /// Both pointers are valid for `len` values.
    unsafe fn gelu_mul_dispatch(gate: *mut f32, up: *const f32, len: usize) = gelu_mul_lanes
}

/// `x = gelu(x)`, elementwise, with the tanh approximation of GELU.
pub fn gelu_tanh_in_place(path: Path, x: &mut [f32]) {
    // SAFETY: `x` holds `x.len()` values.
    unsafe { gelu_tanh_dispatch(path, x.as_mut_ptr(), x.len()) }
}

/// # Safety
/// The instruction set of `L` is available, and `x` is valid for `len` values.
#[inline(always)]
unsafe fn gelu_tanh_lanes<L: Lanes>(x: *mut f32, len: usize) {
    // SAFETY: `map_in_place` requires exactly what this function requires; the closure only
    // computes in registers.
    unsafe { map_in_place::<L>(x, len, |x| gelu_tanh(x)) }
}
dispatch! {
    /// # Safety
    /// `x` is valid for `len` values.
    unsafe fn gelu_tanh_dispatch(x: *mut f32, len: usize) = gelu_tanh_lanes
}

/// `x = max(x, 0)^2`, elementwise.
pub fn squared_relu_in_place(path: Path, x: &mut [f32]) {
    // SAFETY: `x` holds `x.len()` values.
    unsafe { squared_relu_dispatch(path, x.as_mut_ptr(), x.len()) }
}

/// # Safety
/// The instruction set of `L` is available, and `x` is valid for `len` values.
#[inline(always)]
unsafe fn squared_relu_lanes<L: Lanes>(x: *mut f32, len: usize) {
    // SAFETY: `map_in_place` requires exactly what this function requires; the closure only
    // computes in registers.
    unsafe { map_in_place::<L>(x, len, |x| squared_relu(x)) }
}
dispatch! {
    /// # Safety
    /// `x` is valid for `len` values.
    unsafe fn squared_relu_dispatch(x: *mut f32, len: usize) = squared_relu_lanes
}

/// `x = e^(rate * softplus(x + bias))`, elementwise, with `softplus(x) = ln(1 + e^x)`: the decays of
/// a recurrent state at the time steps `x`. They are at most 1, also if `rate` is above 0.
///
/// # Panics
/// If `x` and `bias` have different lengths.
pub fn decay_in_place(path: Path, x: &mut [f32], bias: &[f32], rate: f32) {
    assert_eq!(x.len(), bias.len(), "decay_in_place: x and bias must have the same length");
    // SAFETY: both slices hold `x.len()` values, as asserted above.
    unsafe { decay_dispatch(path, x.as_mut_ptr(), bias.as_ptr(), x.len(), rate) }
}

/// # Safety
/// The instruction set of `L` is available, and `x` and `bias` are valid for `len` values.
#[inline(always)]
unsafe fn decay_lanes<L: Lanes>(x: *mut f32, bias: *const f32, len: usize, rate: f32) {
    // SAFETY: `zip_in_place` requires exactly what this function requires; the closure only
    // computes in registers.
    unsafe {
        let rate = L::splat(rate * std::f32::consts::LOG2_E);
        zip_in_place::<L>(x, bias, len, |x, bias| {
            exp2(L::splat(0.0).min(softplus(x.add(bias)).mul(rate)))
        });
    }
}
dispatch! {
    /// # Safety
    /// Both pointers are valid for `len` values.
    unsafe fn decay_dispatch(x: *mut f32, bias: *const f32, len: usize, rate: f32) = decay_lanes
}

/// `x = gelu(x)`, elementwise, with the error function.
pub fn gelu_in_place(path: Path, x: &mut [f32]) {
    // SAFETY: `x` holds `x.len()` values.
    unsafe { gelu_dispatch(path, x.as_mut_ptr(), x.len()) }
}

/// # Safety
/// The instruction set of `L` is available, and `x` is valid for `len` values.
#[inline(always)]
unsafe fn gelu_lanes<L: Lanes>(x: *mut f32, len: usize) {
    // SAFETY: `map_in_place` requires exactly what this function requires; the closure only
    // computes in registers.
    unsafe { map_in_place::<L>(x, len, |x| gelu(x)) }
}
dispatch! {
    /// # Safety
    /// `x` is valid for `len` values.
    unsafe fn gelu_dispatch(x: *mut f32, len: usize) = gelu_lanes
}

/// # Safety
/// The instruction set of `L` is available, and `x` and `gate` are valid for `len` values.
#[inline(always)]
unsafe fn mul_silu_lanes<L: Lanes>(x: *mut f32, gate: *const f32, len: usize) {
    // SAFETY: `zip_in_place` requires exactly what this function requires; the closure only
    // computes in registers.
    unsafe { zip_in_place::<L>(x, gate, len, |x, gate| x.mul(gate.mul(sigmoid(gate)))) }
}
dispatch! {
    /// # Safety
    /// Both pointers are valid for `len` values.
    unsafe fn mul_silu_dispatch(x: *mut f32, gate: *const f32, len: usize) = mul_silu_lanes
}

/// # Safety
/// The instruction set of `L` is available, and `x` and `gate` are valid for `len` values.
#[inline(always)]
unsafe fn mul_sigmoid_lanes<L: Lanes>(x: *mut f32, gate: *const f32, len: usize) {
    // SAFETY: `zip_in_place` requires exactly what this function requires; the closure only
    // computes in registers.
    unsafe { zip_in_place::<L>(x, gate, len, |x, gate| x.mul(sigmoid(gate))) }
}
dispatch! {
    /// # Safety
    /// Both pointers are valid for `len` values.
    unsafe fn mul_sigmoid_dispatch(x: *mut f32, gate: *const f32, len: usize) = mul_sigmoid_lanes
}

/// # Safety
/// The instruction set of `L` is available, and `gate` and `up` are valid for `len` values.
#[inline(always)]
unsafe fn gelu_tanh_mul_lanes<L: Lanes>(gate: *mut f32, up: *const f32, len: usize) {
    // SAFETY: `zip_in_place` requires exactly what this function requires; the closure only
    // computes in registers.
    unsafe { zip_in_place::<L>(gate, up, len, |g, u| gelu_tanh(g).mul(u)) }
}
dispatch! {
    /// # Safety
    /// Both pointers are valid for `len` values.
    unsafe fn gelu_tanh_mul_dispatch(gate: *mut f32, up: *const f32, len: usize) = gelu_tanh_mul_lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::random;

    /// The error function, by its Taylor series.
    fn erf(x: f64) -> f64 {
        let mut term = x;
        let mut sum = x;
        for n in 1..200 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI
    }

    /// Goal: GELU is the documented function with the documented error on every instruction set,
    /// keeps large numbers, and propagates NaN.
    #[test]
    fn gelu_is_the_documented_function() {
        let inputs: Vec<f32> = (-577..=577).map(|step| step as f32 / 99.0).collect();
        for path in Path::supported() {
            let mut got = inputs.clone();
            gelu_in_place(path, &mut got);
            for (x, got) in inputs.iter().zip(got) {
                let x = f64::from(*x);
                let expected = 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2));
                let error = (f64::from(got) - expected).abs();
                assert!(error < 4e-7 + 2e-7 * x.abs(), "{path} {x}: {error}");
            }
            let (mut gated, mut plain) = (inputs.clone(), inputs.clone());
            gelu_mul(path, &mut gated, &inputs);
            gelu_in_place(path, &mut plain);
            let expected = plain.iter().zip(&inputs).map(|(gelu, x)| gelu * x);
            assert!(gated.iter().copied().eq(expected), "{path}");
            let mut extremes = [0.0, 1e20, -1e20, f32::NAN];
            gelu_in_place(path, &mut extremes);
            assert_eq!(extremes[..3], [0.0, 1e20, 0.0], "{path}");
            assert!(extremes[3].is_nan(), "{path}");
        }
    }

    /// Goal: the squared ReLU is the documented function on every instruction set, exactly, also
    /// for lengths that are not multiples of the vector width, and propagates NaN.
    #[test]
    fn squared_relu_is_the_documented_function() {
        let inputs = [&random(3, 51)[..], &[0.0, -0.0, -7.0, 1e30, f32::NAN]].concat();
        for path in Path::supported() {
            let mut got = inputs.clone();
            squared_relu_in_place(path, &mut got);
            for (x, got) in inputs.iter().zip(got) {
                let expected = if *x < 0.0 { 0.0 } else { x * x };
                assert!(got == expected || x.is_nan() && got.is_nan(), "{path} {x}: {got}");
            }
        }
    }

    /// Goal: both gates are the documented functions on every instruction set, also for lengths
    /// that are not multiples of the vector width.
    #[test]
    fn gates_are_the_documented_functions() {
        for len in [1, 16, 53] {
            let (x, gate) = (random(1, len), random(2, len));
            let gate: Vec<f32> = gate.iter().map(|gate| 8.0 * gate).collect();
            for path in Path::supported() {
                let (mut silu, mut plain) = (x.clone(), x.clone());
                mul_silu(path, &mut silu, &gate);
                mul_sigmoid(path, &mut plain, &gate);
                for i in 0..len {
                    let (x, gate) = (f64::from(x[i]), f64::from(gate[i]));
                    let sigmoid = 1.0 / (1.0 + (-gate).exp());
                    assert!((f64::from(plain[i]) - x * sigmoid).abs() < 1e-6, "{path} {i}");
                    assert!((f64::from(silu[i]) - x * gate * sigmoid).abs() < 1e-5, "{path} {i}");
                }
            }
        }
    }
}
