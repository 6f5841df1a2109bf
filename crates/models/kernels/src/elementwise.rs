//! Elementwise operations and row reductions between GEMMs: norms, activations and residual
//! additions.
//!
//! All functions are serial; callers split rows over [`Threads`](crate::Threads). The order of a
//! reduction depends only on the length of the row, so the result of a row does not depend on the
//! other rows of a batch. Functions panic if the lengths of their slices do not match.
#![allow(unsafe_code, reason = "runs on SIMD lanes, whose methods are unsafe")]

mod gates;
mod layer_norm;

use crate::lanes::math::sigmoid;
use crate::lanes::{self, LANES, Lanes, dispatch, load_some, store_some};
use crate::path::Path;

pub use gates::{
    decay_in_place, gelu_in_place, gelu_mul, gelu_tanh_in_place, gelu_tanh_mul, mul_sigmoid,
    mul_silu, squared_relu_in_place,
};
pub use layer_norm::{LayerNorm, layer_norm};

/// RMS norm of each row: `out = x / sqrt(mean(x^2) + eps) * (weight + offset)`.
///
/// `x` and `out` have the shape `[rows, weight.len()]`. `offset` is 0, or 1 for models (Gemma) that
/// store `weight - 1`.
///
/// # Panics
/// If the length of `x` is not a multiple of `weight.len()`, or `out` has another length than `x`.
pub fn rms_norm(path: Path, x: &[f32], weight: &[f32], eps: f32, offset: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "rms_norm: out must have the length of x");
    let rows = rows_of(x.len(), weight.len());
    // SAFETY: `x` and `out` each hold `rows * weight.len()` values, which `rows_of` and the
    // assertion above have checked.
    unsafe { norm_rows(path, x.as_ptr(), rows, weight, eps, offset, out.as_mut_ptr()) }
}

/// Computes [`rms_norm`] in place.
///
/// # Panics
/// If the length of `x` is not a multiple of `weight.len()`.
pub fn rms_norm_in_place(path: Path, x: &mut [f32], weight: &[f32], eps: f32, offset: f32) {
    let rows = rows_of(x.len(), weight.len());
    let data = x.as_mut_ptr();
    // SAFETY: `x` holds `rows * weight.len()` values, as `rows_of` has checked, and `norm_rows`
    // allows input and output to be the same memory.
    unsafe { norm_rows(path, data, rows, weight, eps, offset, data) }
}

/// `gate = silu(gate) * up`, elementwise, with `silu(x) = x / (1 + e^-x)`.
///
/// # Panics
/// If `gate` and `up` have different lengths.
pub fn silu_mul(path: Path, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "silu_mul: gate and up must have the same length");
    // SAFETY: `gate` and `up` each hold `gate.len()` values, as asserted above.
    unsafe { silu_mul_dispatch(path, gate.as_mut_ptr(), up.as_ptr(), gate.len()) }
}

/// `gate = (up + 1) * g * sigmoid(alpha * g)`, elementwise, where `g` is `gate`, at most `limit`,
/// and `up` is clamped to `-limit..=limit`: the gate function of gpt-oss.
///
/// # Panics
/// If `gate` and `up` have different lengths.
pub fn clamped_swiglu(path: Path, gate: &mut [f32], up: &[f32], alpha: f32, limit: f32) {
    assert_eq!(gate.len(), up.len(), "clamped_swiglu: gate and up must have the same length");
    let (to, len) = (gate.as_mut_ptr(), gate.len());
    // SAFETY: `gate` and `up` each hold `len` values, as asserted above.
    unsafe { clamped_swiglu_dispatch(path, to, up.as_ptr(), len, alpha, limit) }
}

/// `x += other`, elementwise: a residual connection.
///
/// # Panics
/// If `x` and `other` have different lengths.
pub fn add(path: Path, x: &mut [f32], other: &[f32]) {
    assert_eq!(x.len(), other.len(), "add: both slices must have the same length");
    // SAFETY: `x` and `other` each hold `x.len()` values, as asserted above.
    unsafe { add_dispatch(path, x.as_mut_ptr(), other.as_ptr(), x.len()) }
}

/// `x *= other`, elementwise.
///
/// # Panics
/// If `x` and `other` have different lengths.
pub fn mul(path: Path, x: &mut [f32], other: &[f32]) {
    assert_eq!(x.len(), other.len(), "mul: both slices must have the same length");
    // SAFETY: `x` and `other` each hold `x.len()` values, as asserted above.
    unsafe { mul_dispatch(path, x.as_mut_ptr(), other.as_ptr(), x.len()) }
}

/// `x = factor * x`, elementwise.
pub fn scale(path: Path, x: &mut [f32], factor: f32) {
    // SAFETY: `x` holds `x.len()` values.
    unsafe { scale_dispatch(path, x.as_mut_ptr(), x.len(), factor) }
}

/// `x = cap * tanh(x / cap)`, elementwise: soft-capping of logits (Gemma 2).
///
/// # Panics
/// If `cap` is not above 0.
pub fn soft_cap(path: Path, x: &mut [f32], cap: f32) {
    assert!(cap > 0.0, "soft_cap: expected a cap above 0, got {cap}");
    // SAFETY: `x` holds `x.len()` values.
    unsafe { soft_cap_dispatch(path, x.as_mut_ptr(), x.len(), cap) }
}

/// Applies rotary position embedding (RoPE) to the heads of one position.
///
/// `x` has the shape `[heads, head_dim]`. In each head, value `i` is rotated together with value
/// `i + cos.len()` (the "rotate half" form), for the first `2 * cos.len()` values.
///
/// # Panics
/// If `cos` and `sin` have different lengths, `2 * cos.len()` exceeds `head_dim`, or the length of
/// `x` is not a multiple of `head_dim`.
pub(crate) fn rope(path: Path, x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
    assert_eq!(cos.len(), sin.len(), "rope: cos and sin must have the same length");
    assert!(
        2 * cos.len() <= head_dim,
        "rope: {} rotated values exceed the head dimension {head_dim}",
        2 * cos.len()
    );
    let heads = rows_of(x.len(), head_dim);
    // SAFETY: `x` holds `heads * head_dim` values, `2 * cos.len()` is at most `head_dim`, and `cos`
    // and `sin` have the same length, as checked above.
    unsafe {
        rope_dispatch(path, x.as_mut_ptr(), heads, head_dim, cos.as_ptr(), sin.as_ptr(), cos.len());
    }
}

/// Number of rows of `dim` values in a slice of `len` values.
fn rows_of(len: usize, dim: usize) -> usize {
    assert!(dim > 0 && len.is_multiple_of(dim), "{len} values are not whole rows of {dim}");
    len / dim
}

/// `x = f(x, y)`, elementwise.
///
/// # Safety
/// The instruction set of `L` is available, `x` is readable and writable and `y` is readable for
/// `len` values.
#[inline(always)]
unsafe fn zip_in_place<L: Lanes>(
    x: *mut f32,
    y: *const f32,
    len: usize,
    f: impl Fn(L, L) -> L + Copy,
) {
    let mut i = 0;
    while i < len {
        // `f` is called only here, so that the compiler inlines it and compiles it for the
        // instruction set of the caller.
        // SAFETY: `i < len`, so `len - i` values from `x + i` and `y + i` on are valid.
        unsafe {
            let value = f(load_some(x.add(i), len - i, 0.0), load_some(y.add(i), len - i, 0.0));
            store_some(value, x.add(i), len - i);
        }
        i += LANES;
    }
}

/// The sum of squares of `len` values. Four independent vectors of partial sums hide the latency of
/// the additions; they are combined at the end.
///
/// # Safety
/// The instruction set of `L` is available, and `x` is readable for `len` values.
#[inline(always)]
pub(super) unsafe fn sum_of_squares<L: Lanes>(x: *const f32, len: usize) -> f32 {
    // SAFETY: vectors of the first loop end at `whole <= len`; the second loop loads at most `len -
    // i` values from `x + i` on.
    unsafe {
        let mut sums = [L::splat(0.0); 4];
        let whole = len / (4 * LANES) * (4 * LANES);
        for i in (0..whole).step_by(4 * LANES) {
            for (chain, sum) in sums.iter_mut().enumerate() {
                let value = L::load(x.add(i + chain * LANES));
                *sum = value.mul_add(value, *sum);
            }
        }
        for (i, sum) in (whole..len).step_by(LANES).zip(&mut sums) {
            let value = load_some::<L>(x.add(i), len - i, 0.0);
            *sum = value.mul_add(value, *sum);
        }
        sums[0].add(sums[1]).add(sums[2].add(sums[3])).reduce_add()
    }
}

/// # Safety
/// The instruction set of `L` is available, and `gate` and `up` are valid for `len` values.
#[inline(always)]
unsafe fn silu_mul_lanes<L: Lanes>(gate: *mut f32, up: *const f32, len: usize) {
    // SAFETY: `zip_in_place` requires exactly what this function requires; the closure only
    // computes in registers.
    unsafe { zip_in_place::<L>(gate, up, len, |g, u| g.mul(sigmoid(g)).mul(u)) }
}
dispatch! {
    /// # Safety
    /// Both pointers are valid for `len` values.
    unsafe fn silu_mul_dispatch(gate: *mut f32, up: *const f32, len: usize) = silu_mul_lanes
}

/// # Safety
/// The instruction set of `L` is available, and `gate` and `up` are valid for `len` values.
#[inline(always)]
unsafe fn clamped_swiglu_lanes<L: Lanes>(
    gate: *mut f32,
    up: *const f32,
    len: usize,
    alpha: f32,
    limit: f32,
) {
    // SAFETY: `zip_in_place` requires exactly what this function requires; the closure only
    // computes in registers.
    unsafe {
        let (alpha, limit, lowest) = (L::splat(alpha), L::splat(limit), L::splat(-limit));
        zip_in_place::<L>(gate, up, len, |g, u| {
            let g = limit.min(g);
            let u = lowest.max(limit.min(u)).add(L::splat(1.0));
            g.mul(sigmoid(g.mul(alpha))).mul(u)
        });
    }
}
dispatch! {
    /// # Safety
    /// Both pointers are valid for `len` values.
    unsafe fn clamped_swiglu_dispatch(
        gate: *mut f32, up: *const f32, len: usize, alpha: f32, limit: f32,
    ) = clamped_swiglu_lanes
}

/// # Safety
/// The instruction set of `L` is available, and `x` and `other` are valid for `len` values.
#[inline(always)]
unsafe fn add_lanes<L: Lanes>(x: *mut f32, other: *const f32, len: usize) {
    // SAFETY: `zip_in_place` requires exactly what this function requires; the closure only
    // computes in registers.
    unsafe { zip_in_place::<L>(x, other, len, |a, b| a.add(b)) }
}
dispatch! {
    /// # Safety
    /// Both pointers are valid for `len` values.
    unsafe fn add_dispatch(x: *mut f32, other: *const f32, len: usize) = add_lanes
}

/// # Safety
/// The instruction set of `L` is available, and `x` and `other` are valid for `len` values.
#[inline(always)]
unsafe fn mul_lanes<L: Lanes>(x: *mut f32, other: *const f32, len: usize) {
    // SAFETY: `zip_in_place` requires exactly what this function requires; the closure only
    // computes in registers.
    unsafe { zip_in_place::<L>(x, other, len, |a, b| a.mul(b)) }
}
dispatch! {
    /// # Safety
    /// Both pointers are valid for `len` values.
    unsafe fn mul_dispatch(x: *mut f32, other: *const f32, len: usize) = mul_lanes
}

/// `x = f(x)`, elementwise.
///
/// # Safety
/// The instruction set of `L` is available, and `x` is readable and writable for `len` values.
#[inline(always)]
unsafe fn map_in_place<L: Lanes>(x: *mut f32, len: usize, f: impl Fn(L) -> L + Copy) {
    for i in (0..len).step_by(LANES) {
        // SAFETY: `i < len`, so `len - i` values from `x + i` on are valid.
        unsafe { store_some(f(load_some(x.add(i), len - i, 0.0)), x.add(i), len - i) };
    }
}

/// # Safety
/// The instruction set of `L` is available, and `x` is valid for `len` values.
#[inline(always)]
unsafe fn scale_lanes<L: Lanes>(x: *mut f32, len: usize, factor: f32) {
    // SAFETY: `map_in_place` requires exactly what this function requires; the closure only
    // computes in registers.
    unsafe { map_in_place::<L>(x, len, |value| value.mul(L::splat(factor))) }
}
dispatch! {
    /// # Safety
    /// `x` is valid for `len` values.
    unsafe fn scale_dispatch(x: *mut f32, len: usize, factor: f32) = scale_lanes
}

/// # Safety
/// The instruction set of `L` is available, and `x` is valid for `len` values.
#[inline(always)]
unsafe fn soft_cap_all<L: Lanes>(x: *mut f32, len: usize, cap: f32) {
    // SAFETY: `map_in_place` requires exactly what this function requires; the closure only
    // computes in registers.
    unsafe { map_in_place::<L>(x, len, |value| lanes::soft_cap(value, cap)) }
}
dispatch! {
    /// # Safety
    /// `x` is valid for `len` values.
    unsafe fn soft_cap_dispatch(x: *mut f32, len: usize, cap: f32) = soft_cap_all
}

/// # Safety
/// The instruction set of `L` is available. `x` is readable and `out` is writable for
/// `rows * weight.len()` values. They may be equal, but must not overlap otherwise.
#[inline(always)]
unsafe fn norm_lanes<L: Lanes>(
    x: *const f32,
    rows: usize,
    weight: &[f32],
    eps: f32,
    offset: f32,
    out: *mut f32,
) {
    let dim = weight.len();
    for row in 0..rows {
        // SAFETY: `row < rows`, so `dim` values are valid from `row * dim` on, and `i < dim`. If
        // `x` and `out` are equal, the values at `i` are read before they are written.
        unsafe {
            let (x, out) = (x.add(row * dim), out.add(row * dim));
            #[allow(clippy::cast_precision_loss, reason = "a row is far shorter than 2^24")]
            let mean = sum_of_squares::<L>(x, dim) / dim as f32;
            let scale = L::splat(1.0 / (mean + eps).sqrt());
            let mut i = 0;
            while i < dim {
                let value = load_some::<L>(x.add(i), dim - i, 0.0);
                let factor = load_some::<L>(weight.as_ptr().add(i), dim - i, 0.0);
                let normed = value.mul(scale).mul(factor.add(L::splat(offset)));
                store_some(normed, out.add(i), dim - i);
                i += LANES;
            }
        }
    }
}
dispatch! {
    /// # Safety
    /// `x` is readable and `out` is writable for `rows * weight.len()` values. They may be equal,
    /// but must not overlap otherwise.
    unsafe fn norm_rows(
        x: *const f32, rows: usize, weight: &[f32], eps: f32, offset: f32, out: *mut f32,
    ) = norm_lanes
}

/// # Safety
/// The instruction set of `L` is available. `x` is readable and writable for `heads * head_dim`
/// values, `2 * half` is at most `head_dim`, and `cos` and `sin` are readable for `half` values.
#[inline(always)]
unsafe fn rope_lanes<L: Lanes>(
    x: *mut f32,
    heads: usize,
    head_dim: usize,
    cos: *const f32,
    sin: *const f32,
    half: usize,
) {
    for head in 0..heads {
        let mut i = 0;
        while i < half {
            // SAFETY: `i < half`, and `2 * half` values of each head exist, so `half - i` values
            // are valid at all four addresses.
            unsafe {
                let first = x.add(head * head_dim + i);
                let second = first.add(half);
                let left = half - i;
                let (c, s) =
                    (load_some::<L>(cos.add(i), left, 0.0), load_some(sin.add(i), left, 0.0));
                let (a, b) = (load_some::<L>(first, left, 0.0), load_some::<L>(second, left, 0.0));
                store_some(a.mul(c).sub(b.mul(s)), first, left);
                store_some(b.mul(c).add(a.mul(s)), second, left);
            }
            i += LANES;
        }
    }
}
dispatch! {
    /// # Safety
    /// `x` is readable and writable for `heads * head_dim` values, `2 * half` is at most
    /// `head_dim`, and `cos` and `sin` are readable for `half` values.
    unsafe fn rope_dispatch(
        x: *mut f32, heads: usize, head_dim: usize, cos: *const f32, sin: *const f32, half: usize,
    ) = rope_lanes
}

#[cfg(test)]
mod tests;
