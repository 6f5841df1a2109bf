//! Layer norm: rows are shifted to the mean 0 and scaled to the variance 1.
#![allow(unsafe_code, reason = "runs on SIMD lanes, whose methods are unsafe")]

use super::rows_of;
use crate::lanes::{LANES, Lanes, dispatch, load_some, store_some};
use crate::path::Path;

/// The parameters of a layer norm over rows of `weight.len()` values.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm<'a> {
    /// Factors of the normalized values.
    pub weight: &'a [f32],
    /// Added to the result; as long as `weight`.
    pub bias: &'a [f32],
    /// Added to the variance, above 0.
    pub eps: f32,
}

/// Layer norm of each row: `out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`.
///
/// `x` and `out` have the shape `[rows, weight.len()]`.
///
/// # Panics
/// If the length of `x` is not a multiple of `weight.len()`, `out` has another length than `x`, or
/// `bias` has another length than `weight`.
pub fn layer_norm(path: Path, x: &[f32], norm: &LayerNorm<'_>, out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "layer_norm: out must have the length of x");
    assert_eq!(norm.weight.len(), norm.bias.len(), "layer_norm: bias must be as long as weight");
    let rows = rows_of(x.len(), norm.weight.len());
    // SAFETY: `x` and `out` each hold `rows * weight.len()` values, and `bias` holds `weight.len()`
    // values, as checked above.
    unsafe { norm_rows(path, x.as_ptr(), rows, norm, out.as_mut_ptr()) }
}

/// The sum of `f(x)` over `len` values. `fill` is a value for which `f` is 0: it fills the lanes
/// that the last vector lacks. Four independent vectors of partial sums hide the latency of the
/// additions.
///
/// # Safety
/// The instruction set of `L` is available, and `x` is readable for `len` values.
#[inline(always)]
unsafe fn sum_of<L: Lanes>(
    x: *const f32,
    len: usize,
    fill: f32,
    f: impl Fn(L, L) -> L + Copy,
) -> f32 {
    // SAFETY: at most `len - i` values are loaded from `x + i` on, where `i < len`.
    unsafe {
        let mut sums = [L::splat(0.0); 4];
        for (i, chain) in (0..len).step_by(LANES).zip((0..4).cycle()) {
            sums[chain] = f(load_some(x.add(i), len - i, fill), sums[chain]);
        }
        sums[0].add(sums[1]).add(sums[2].add(sums[3])).reduce_add()
    }
}

/// # Safety
/// The instruction set of `L` is available. `x` is readable and `out` is writable for
/// `rows * weight.len()` values, and `bias` holds `weight.len()` values.
#[inline(always)]
unsafe fn norm_lanes<L: Lanes>(x: *const f32, rows: usize, norm: &LayerNorm<'_>, out: *mut f32) {
    let dim = norm.weight.len();
    #[allow(clippy::cast_precision_loss, reason = "a row is far shorter than 2^24")]
    let count = dim as f32;
    for row in 0..rows {
        // SAFETY: `row < rows`, so `dim` values are valid from `row * dim` on, and `i < dim`.
        unsafe {
            let (x, out) = (x.add(row * dim), out.add(row * dim));
            let mean = sum_of::<L>(x, dim, 0.0, |value, sum| sum.add(value)) / count;
            let shift = L::splat(mean);
            let squares = sum_of::<L>(x, dim, mean, |value, sum| {
                let centered = value.sub(shift);
                centered.mul_add(centered, sum)
            });
            let scale = L::splat(1.0 / (squares / count + norm.eps).sqrt());
            for i in (0..dim).step_by(LANES) {
                let left = dim - i;
                let value = load_some::<L>(x.add(i), left, 0.0).sub(shift).mul(scale);
                let weight = load_some::<L>(norm.weight.as_ptr().add(i), left, 0.0);
                let bias = load_some::<L>(norm.bias.as_ptr().add(i), left, 0.0);
                store_some(value.mul_add(weight, bias), out.add(i), left);
            }
        }
    }
}
dispatch! {
    /// # Safety
    /// `x` is readable and `out` is writable for `rows * weight.len()` values, and `bias` holds
    /// `weight.len()` values.
    unsafe fn norm_rows(x: *const f32, rows: usize, norm: &LayerNorm<'_>, out: *mut f32)
        = norm_lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::random;

    /// Goal: the norm is the documented function on every instruction set, also for rows whose
    /// length is not a multiple of the vector width and whose mean is far from 0.
    #[test]
    fn layer_norm_is_the_documented_function() {
        for dim in [1_usize, 16, 53, 144] {
            let x: Vec<f32> = random(1, 3 * dim).iter().map(|x| 100.0 + x).collect();
            let (weight, bias) = (random(2, dim), random(3, dim));
            let norm = LayerNorm { weight: &weight, bias: &bias, eps: 1e-6 };
            for path in Path::supported() {
                let mut out = vec![0.0; x.len()];
                layer_norm(path, &x, &norm, &mut out);
                for (x, out) in x.chunks(dim).zip(out.chunks(dim)) {
                    let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
                    let mean = x.iter().sum::<f64>() / dim as f64;
                    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / dim as f64;
                    for i in 0..dim {
                        let normed = (x[i] - mean) / (variance + 1e-6).sqrt();
                        let expected = normed * f64::from(weight[i]) + f64::from(bias[i]);
                        let difference = (f64::from(out[i]) - expected).abs();
                        assert!(difference < 1e-4, "{path} {dim} {i}: {difference}");
                    }
                }
            }
        }
    }
}
