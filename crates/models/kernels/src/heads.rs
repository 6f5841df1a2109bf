//! RMS norm and rotary position embedding of query and key heads, fused into one pass.
//!
//! The operations and their order are those of
//! [`rms_norm_in_place`](crate::elementwise::rms_norm_in_place) followed by
//! [`rope`](crate::elementwise::rope), so the result has the same bits. The fused form reads each
//! value twice and writes it once.
#![allow(unsafe_code, reason = "calls the methods of `Lanes`, which are unsafe")]

use crate::elementwise::{rope, sum_of_squares};
use crate::lanes::{LANES, Lanes, dispatch, load_some, store_some};
use crate::path::Path;

/// Parameters of an RMS norm that is applied to each head separately (Qwen3 and Gemma 3 norm
/// queries and keys this way).
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm<'a> {
    /// The learned weights, `[head_dim]`, shared by all heads.
    pub weight: &'a [f32],
    /// Added to the mean square before the root is taken.
    pub eps: f32,
    /// Added to each weight: 0, or 1 for models that store weights minus one (Gemma).
    pub offset: f32,
}

/// Applies `norm`, if there is one, to each head of one position and then the rotary position
/// embedding (Su et al., 2021).
///
/// `x` is `[heads, head_dim]`. `cos` and `sin` are `[rotated / 2]`, where `rotated <= head_dim` is
/// the number of leading values per head that are rotated. Value `i` is rotated with value `i +
/// rotated / 2` (the "rotate half" pairing of GPT-NeoX).
///
/// # Panics
/// If `x` is not a whole number of heads, `norm.weight` is not `[head_dim]`, `cos` and `sin` differ
/// in length, or they are longer than `head_dim / 2`.
pub fn norm_and_rope(
    path: Path,
    x: &mut [f32],
    head_dim: usize,
    norm: Option<HeadNorm<'_>>,
    (cos, sin): (&[f32], &[f32]),
) {
    let Some(norm) = norm else {
        return rope(path, x, head_dim, cos, sin);
    };
    assert!(
        head_dim > 0 && x.len().is_multiple_of(head_dim),
        "expected whole heads of {head_dim} values, got {} values",
        x.len()
    );
    assert_eq!(norm.weight.len(), head_dim, "the weight of a head norm must be [head_dim]");
    assert_eq!(cos.len(), sin.len(), "cos and sin must have the same length");
    assert!(
        2 * cos.len() <= head_dim,
        "expected at most {head_dim} rotated values per head, got {}",
        2 * cos.len()
    );
    // SAFETY: the assertions above are the conditions of `norm_and_rope_simd`.
    unsafe { norm_and_rope_simd(path, x, head_dim, norm, cos, sin) }
}

/// The `min(left, LANES)` values of a head from index `i` on, normed; the other lanes are
/// unspecified.
///
/// # Safety
/// The instruction set of `L` is available. `x` and `norm.weight` are readable from index `i` on
/// for `min(left, LANES)` values.
#[inline(always)]
unsafe fn normed<L: Lanes>(
    x: *const f32,
    norm: &HeadNorm<'_>,
    i: usize,
    left: usize,
    scale: L,
) -> L {
    // SAFETY: `load_some` reads `min(left, LANES)` values, which the function's conditions allow
    // from both pointers; the instruction set of `L` is available.
    unsafe {
        let factor = load_some::<L>(norm.weight.as_ptr().add(i), left, 0.0);
        let value = load_some::<L>(x.add(i), left, 0.0);
        value.mul(scale).mul(factor.add(L::splat(norm.offset)))
    }
}

/// # Safety
/// The instruction set of `L` is available, `norm.weight` has `head_dim` values, and `cos` and
/// `sin` have the same length, at most `head_dim / 2`.
#[inline(always)]
unsafe fn norm_and_rope_lanes<L: Lanes>(
    x: &mut [f32],
    head_dim: usize,
    norm: HeadNorm<'_>,
    cos: &[f32],
    sin: &[f32],
) {
    let half = cos.len();
    for head in x.chunks_exact_mut(head_dim) {
        let x = head.as_mut_ptr();
        // SAFETY: `x` points to the `head_dim` values of `head`, and `norm.weight` has as many. In
        // the first loop `i < half`, and the loads and stores at `i` and `half + i` reach at most
        // `2 * half <= head_dim`; `cos` and `sin` have `half` values. The second loop stays below
        // `head_dim`. The instruction set of `L` is available.
        unsafe {
            #[allow(clippy::cast_precision_loss, reason = "a head is far shorter than 2^24")]
            let mean = sum_of_squares::<L>(x, head_dim) / head_dim as f32;
            let scale = L::splat(1.0 / (mean + norm.eps).sqrt());
            let mut i = 0;
            while i < half {
                let left = half - i;
                let a = normed(x, &norm, i, left, scale);
                let b = normed(x, &norm, half + i, left, scale);
                let c = load_some::<L>(cos.as_ptr().add(i), left, 0.0);
                let s = load_some::<L>(sin.as_ptr().add(i), left, 0.0);
                store_some(a.mul(c).sub(b.mul(s)), x.add(i), left);
                store_some(b.mul(c).add(a.mul(s)), x.add(half + i), left);
                i += LANES;
            }
            let mut i = 2 * half;
            while i < head_dim {
                store_some(normed(x, &norm, i, head_dim - i, scale), x.add(i), head_dim - i);
                i += LANES;
            }
        }
    }
}
dispatch! {
    /// Norms and rotates heads on the instruction set of `path`.
    ///
    /// # Safety
    /// `norm.weight` has `head_dim` values, and `cos` and `sin` have the same length, at most
    /// `head_dim / 2`.
    unsafe fn norm_and_rope_simd(
        x: &mut [f32], head_dim: usize, norm: HeadNorm<'_>, cos: &[f32], sin: &[f32],
    ) = norm_and_rope_lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elementwise::rms_norm_in_place;
    use crate::reference::random;

    /// Goal: the fused form has the same bits as the norm followed by the rotation, also for sizes
    /// that are not multiples of the vector width.
    #[test]
    fn fused_form_equals_norm_then_rope() {
        for path in Path::supported() {
            for (head_dim, half) in
                [(2, 1), (6, 3), (20, 7), (64, 32), (80, 40), (128, 64), (130, 17)]
            {
                let x = random(1, 3 * head_dim);
                let (weight, cos, sin) = (random(2, head_dim), random(3, half), random(4, half));
                for offset in [0.0, 1.0] {
                    let mut separate = x.clone();
                    rms_norm_in_place(path, &mut separate, &weight, 1e-5, offset);
                    rope(path, &mut separate, head_dim, &cos, &sin);
                    let norm = HeadNorm { weight: &weight, eps: 1e-5, offset };
                    let mut fused = x.clone();
                    norm_and_rope(path, &mut fused, head_dim, Some(norm), (&cos, &sin));
                    assert_eq!(fused, separate, "{path} [{head_dim}], {half} pairs rotated");
                }
                let mut separate = x.clone();
                rope(path, &mut separate, head_dim, &cos, &sin);
                let mut fused = x;
                norm_and_rope(path, &mut fused, head_dim, None, (&cos, &sin));
                assert_eq!(fused, separate, "{path} [{head_dim}] without a norm");
            }
        }
    }
}
