//! Queries and keys after their product, head by head: norm and rotation in one go.
//!
//! The same operations in the same order as [`rms_norm_in_place`](super::rms_norm_in_place) and then
//! [`rope`](super::rope), so the same bits; a value is read twice and written once.
#![allow(unsafe_code, reason = "runs on lanes, whose methods are unsafe")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: the path's set")]

use super::Path;
use super::elementwise::{load_some, rope, store_some, sum_of_squares};
use super::lanes::{LANES, Lanes, dispatch};

/// An RMS norm of each head.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm<'a> {
    /// `[head_dim]`.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
    /// Added to each weight.
    pub offset: f32,
}

/// Norms the heads of one position, if there is a norm, and rotates them: `x` is `[heads, head_dim]`,
/// `cos` and `sin` are as [`rope`](super::rope) takes them.
///
/// # Panics
/// If the sizes do not fit together.
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
    assert!(head_dim > 0 && x.len().is_multiple_of(head_dim), "whole heads");
    assert_eq!(norm.weight.len(), head_dim, "a norm's weight is [head_dim]");
    assert_eq!(cos.len(), sin.len(), "cos and sin must be of one size");
    assert!(2 * cos.len() <= head_dim, "{} values do not fit {head_dim}", 2 * cos.len());
    // SAFETY: x holds whole heads, the others what was just checked.
    unsafe { heads_dispatch(path, x, head_dim, norm, cos, sin) }
}

/// Values from `i` on, normed.
#[inline(always)]
unsafe fn normed<L: Lanes>(
    x: *const f32,
    norm: &HeadNorm<'_>,
    i: usize,
    left: usize,
    scale: L,
) -> L {
    // SAFETY: the caller gives `left` values of x from i on, and of the weight.
    unsafe {
        let factor = load_some::<L>(norm.weight.as_ptr().add(i), left, 0.0);
        let value = load_some::<L>(x.add(i), left, 0.0);
        value.mul(scale).mul(factor.add(L::splat(norm.offset)))
    }
}

#[inline(always)]
unsafe fn heads_lanes<L: Lanes>(
    x: &mut [f32],
    head_dim: usize,
    norm: HeadNorm<'_>,
    cos: &[f32],
    sin: &[f32],
) {
    let half = cos.len();
    for head in x.chunks_exact_mut(head_dim) {
        let x = head.as_mut_ptr();
        // SAFETY: a head has `head_dim` values, at least `2 * half`; lanes run on the enabled set.
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
    /// # Safety
    /// `x` holds whole heads, the norm's weight `head_dim` values, `cos` and `sin` at most half as many.
    unsafe fn heads_dispatch(
        x: &mut [f32], head_dim: usize, norm: HeadNorm<'_>, cos: &[f32], sin: &[f32],
    ) = heads_lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::random;
    use crate::rms_norm_in_place;

    /// Goal: to the last bit what a norm and then a rotation give, at sizes that fill no vector.
    #[test]
    fn as_norm_and_rope_apart() {
        for path in Path::supported() {
            for (head_dim, half) in
                [(2, 1), (6, 3), (20, 7), (64, 32), (80, 40), (128, 64), (130, 17)]
            {
                let x = random(1, 3 * head_dim);
                let (weight, cos, sin) = (random(2, head_dim), random(3, half), random(4, half));
                for offset in [0.0, 1.0] {
                    let mut apart = x.clone();
                    rms_norm_in_place(path, &mut apart, &weight, 1e-5, offset);
                    rope(path, &mut apart, head_dim, &cos, &sin);
                    let norm = HeadNorm { weight: &weight, eps: 1e-5, offset };
                    let mut together = x.clone();
                    norm_and_rope(path, &mut together, head_dim, Some(norm), (&cos, &sin));
                    assert_eq!(together, apart, "{path} [{head_dim}], {half} turn");
                }
                let mut apart = x.clone();
                rope(path, &mut apart, head_dim, &cos, &sin);
                let mut together = x;
                norm_and_rope(path, &mut together, head_dim, None, (&cos, &sin));
                assert_eq!(together, apart, "{path} [{head_dim}] without a norm");
            }
        }
    }
}
