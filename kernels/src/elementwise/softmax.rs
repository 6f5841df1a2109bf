//! The softmax of whole rows.
#![allow(unsafe_code, reason = "runs on SIMD lanes, whose methods are unsafe")]

use super::rows_of;
use crate::lanes::{LANES, Lanes, dispatch, exp2, load_some, store_some};
use crate::path::Path;

/// Replaces each row of `dim` scores by its softmax: `e^(scale * x)`, divided by the sum over the
/// row.
///
/// # Panics
/// If the length of `x` is not a multiple of `dim`, or `scale` is not above 0.
pub(crate) fn softmax(path: Path, x: &mut [f32], dim: usize, scale: f32) {
    assert!(scale > 0.0, "softmax: expected a scale above 0, got {scale}");
    let rows = rows_of(x.len(), dim);
    // SAFETY: `x` holds `rows * dim` values.
    unsafe { softmax_rows(path, x.as_mut_ptr(), rows, dim, scale * std::f32::consts::LOG2_E) }
}

/// # Safety
/// The instruction set of `L` is available, and `x` is valid for `rows * dim` values.
#[inline(always)]
unsafe fn softmax_lanes<L: Lanes>(x: *mut f32, rows: usize, dim: usize, scale: f32) {
    for row in 0..rows {
        // SAFETY: `row < rows`, so `dim` values are valid from `row * dim` on, and `i < dim`.
        unsafe {
            let x = x.add(row * dim);
            let mut largest = L::splat(f32::NEG_INFINITY);
            for i in (0..dim).step_by(LANES) {
                largest = largest.max(load_some(x.add(i), dim - i, f32::NEG_INFINITY));
            }
            let (scale, largest) = (L::splat(scale), L::splat(largest.reduce_max()));
            let mut sum = L::splat(0.0);
            for i in (0..dim).step_by(LANES) {
                // The power of minus infinity, with which a last vector is filled, is 0.
                let score = load_some::<L>(x.add(i), dim - i, f32::NEG_INFINITY);
                let power = exp2(score.sub(largest).mul(scale));
                sum = sum.add(power);
                store_some(power, x.add(i), dim - i);
            }
            let share = L::splat(1.0 / sum.reduce_add());
            for i in (0..dim).step_by(LANES) {
                let power = load_some::<L>(x.add(i), dim - i, 0.0);
                store_some(power.mul(share), x.add(i), dim - i);
            }
        }
    }
}
dispatch! {
    /// # Safety
    /// `x` is valid for `rows * dim` values.
    unsafe fn softmax_rows(x: *mut f32, rows: usize, dim: usize, scale: f32) = softmax_lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::random;

    /// Goal: the result is the softmax on every instruction set, also of large scores and of rows
    /// whose length is not a multiple of the vector width.
    #[test]
    fn softmax_is_the_documented_function() {
        for dim in [1, 16, 53] {
            let scores: Vec<f32> = random(1, 2 * dim).iter().map(|x| 300.0 * x).collect();
            for path in Path::supported() {
                let mut out = scores.clone();
                softmax(path, &mut out, dim, 0.125);
                for (scores, out) in scores.chunks(dim).zip(out.chunks(dim)) {
                    let scores: Vec<f64> = scores.iter().map(|s| 0.125 * f64::from(*s)).collect();
                    let largest = scores.iter().copied().fold(f64::MIN, f64::max);
                    let sum: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
                    for (score, got) in scores.iter().zip(out) {
                        let expected = (score - largest).exp() / sum;
                        assert!((f64::from(*got) - expected).abs() < 1e-6, "{path} {dim}");
                    }
                }
            }
        }
    }
}
