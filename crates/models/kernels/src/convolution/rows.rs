//! Short causal convolutions over f32 rows, followed by SiLU, as before linear recurrences.
#![allow(unsafe_code, reason = "runs on SIMD lanes, whose methods are unsafe")]

use crate::lanes::math::sigmoid;
use crate::lanes::{LANES, Lanes, dispatch, load_some, store_some};
use crate::path::Path;

/// Computes one row of a convolution: `out[c] = silu(bias[c] + sum of taps[t][c] * inputs[t][c])`
/// over the taps `t` in ascending order, with `silu(x) = x / (1 + e^-x)`.
///
/// `inputs` are rows of `out.len()` values, the oldest first, `taps` has the shape `[inputs.len(),
/// out.len()]`, and `bias` is `[out.len()]`, or zero if there is none. Serial; the result depends
/// on nothing but these values.
///
/// # Panics
/// If the lengths do not match.
pub fn convolution_silu(
    path: Path,
    inputs: &[&[f32]],
    taps: &[f32],
    bias: Option<&[f32]>,
    out: &mut [f32],
) {
    let width = out.len();
    let fits = inputs.iter().all(|input| input.len() == width);
    assert!(fits, "convolution: expected rows of {width} values");
    assert_eq!(taps.len(), inputs.len() * width, "convolution: one weight for each tap and value");
    assert!(bias.is_none_or(|bias| bias.len() == width), "convolution: one bias for each value");
    // SAFETY: the lengths were checked above.
    unsafe { row_dispatch(path, inputs, taps, bias, out) }
}

/// # Safety
/// The instruction set of `L` is available, and the slices have the lengths that
/// [`convolution_silu`] documents.
#[inline(always)]
unsafe fn row<L: Lanes>(inputs: &[&[f32]], taps: &[f32], bias: Option<&[f32]>, out: &mut [f32]) {
    let width = out.len();
    for at in (0..width).step_by(LANES) {
        let left = width - at;
        // SAFETY: each input, each tap, the bias and `out` have `width` values, of which `left` are
        // at `at` and after it. No more than `left` are read or written.
        unsafe {
            let mut sum = match bias {
                Some(bias) => load_some::<L>(bias.as_ptr().add(at), left, 0.0),
                None => L::splat(0.0),
            };
            for (tap, input) in inputs.iter().enumerate() {
                let value = load_some::<L>(input.as_ptr().add(at), left, 0.0);
                let weight = load_some::<L>(taps.as_ptr().add(tap * width + at), left, 0.0);
                sum = value.mul_add(weight, sum);
            }
            store_some(sum.mul(sigmoid(sum)), out.as_mut_ptr().add(at), left);
        }
    }
}
dispatch! {
    /// # Safety
    /// The slices have the lengths that [`convolution_silu`] documents.
    unsafe fn row_dispatch(
        inputs: &[&[f32]], taps: &[f32], bias: Option<&[f32]>, out: &mut [f32],
    ) = row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::random;

    /// Goal: on every instruction set, with and without a bias, at widths with and without whole
    /// vectors, a row is the documented function of its inputs.
    #[test]
    fn a_row_is_silu_of_the_weighted_sum() {
        for width in [1, 15, 16, 53] {
            let (inputs, taps, bias) =
                (random(1, 3 * width), random(2, 3 * width), random(3, width));
            let rows: Vec<&[f32]> = inputs.chunks_exact(width).collect();
            for path in Path::supported() {
                for bias in [None, Some(&bias[..])] {
                    let mut out = vec![f32::NAN; width];
                    convolution_silu(path, &rows, &taps, bias, &mut out);
                    for (c, got) in out.iter().enumerate() {
                        let products = (0..3).map(|t| inputs[t * width + c] * taps[t * width + c]);
                        let sum = f64::from(bias.map_or(0.0, |b| b[c]) + products.sum::<f32>());
                        let want = sum / (1.0 + (-sum).exp());
                        assert!((f64::from(*got) - want).abs() < 1e-6, "{path} {width} {c}");
                    }
                }
            }
        }
    }

    /// Goal: rows of different lengths panic instead of reading other memory.
    #[test]
    #[should_panic(expected = "rows of 2 values")]
    fn shorter_rows_panic() {
        convolution_silu(Path::PORTABLE, &[&[0.0]], &[0.0; 2], None, &mut [0.0; 2]);
    }
}
