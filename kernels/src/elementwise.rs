//! The steps between products: norms, gates, rotary embedding, softmax. Serial; callers split rows
//! over [`Threads`](super::Threads).
//!
//! A reduction's order depends on its length alone, so a row's result does not depend on the rows
//! beside it. Sizes that do not fit together are the caller's bug and panic.
#![allow(unsafe_code, reason = "runs on lanes, whose methods are unsafe")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: the path's set")]

use super::Path;
use super::lanes::{self, LANES, Lanes, dispatch};

/// RMS norm of each row: `out = x / sqrt(mean(x^2) + eps) * (weight + offset)`.
///
/// `x` and `out` are `[rows, weight.len()]`; `offset` is 0, or 1 for models that store the weight's
/// difference from one.
///
/// # Panics
/// If `x` is no whole number of rows or `out` is of another size.
pub fn rms_norm(path: Path, x: &[f32], weight: &[f32], eps: f32, offset: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "rms_norm: out must be as large as x");
    let rows = rows_of(x.len(), weight.len());
    // SAFETY: both hold `rows * weight.len()` values.
    unsafe { norm_rows(path, x.as_ptr(), rows, weight, eps, offset, out.as_mut_ptr()) }
}

/// [`rms_norm`] that overwrites `x`.
///
/// # Panics
/// If `x` is no whole number of rows.
pub fn rms_norm_in_place(path: Path, x: &mut [f32], weight: &[f32], eps: f32, offset: f32) {
    let rows = rows_of(x.len(), weight.len());
    let data = x.as_mut_ptr();
    // SAFETY: x holds `rows * weight.len()` values; a row's values are read before it is written
    // at the same place.
    unsafe { norm_rows(path, data, rows, weight, eps, offset, data) }
}

/// `gate = silu(gate) * up`, with `silu(x) = x / (1 + e^-x)`.
///
/// # Panics
/// If the two differ in size.
pub fn silu_mul(path: Path, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "silu_mul: gate and up must be of one size");
    // SAFETY: both hold `gate.len()` values.
    unsafe { silu_mul_dispatch(path, gate.as_mut_ptr(), up.as_ptr(), gate.len()) }
}

/// `gate = gelu(gate) * up`, GELU in its tanh form.
///
/// # Panics
/// If the two differ in size.
pub fn gelu_tanh_mul(path: Path, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "gelu_tanh_mul: gate and up must be of one size");
    // SAFETY: both hold `gate.len()` values.
    unsafe { gelu_mul_dispatch(path, gate.as_mut_ptr(), up.as_ptr(), gate.len()) }
}

/// `x += other`: a residual.
///
/// # Panics
/// If the two differ in size.
pub fn add(path: Path, x: &mut [f32], other: &[f32]) {
    assert_eq!(x.len(), other.len(), "add: both must be of one size");
    // SAFETY: both hold `x.len()` values.
    unsafe { add_dispatch(path, x.as_mut_ptr(), other.as_ptr(), x.len()) }
}

/// Adds `bias` to each row of `x`: `[rows, bias.len()]`.
///
/// # Panics
/// If `x` is no whole number of rows.
pub fn add_bias(path: Path, x: &mut [f32], bias: &[f32]) {
    rows_of(x.len(), bias.len());
    for row in x.chunks_exact_mut(bias.len()) {
        add(path, row, bias);
    }
}

/// Rotates the heads of one position: `x` is `[heads, head_dim]`; of each head the first
/// `2 * cos.len()` values turn, value `i` with value `i + cos.len()` ("rotate half").
///
/// # Panics
/// If `cos` and `sin` differ in size, or do not fit a head, or `x` is no whole number of heads.
pub fn rope(path: Path, x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
    assert_eq!(cos.len(), sin.len(), "rope: cos and sin must be of one size");
    assert!(2 * cos.len() <= head_dim, "rope: {} values do not fit {head_dim}", 2 * cos.len());
    let heads = rows_of(x.len(), head_dim);
    // SAFETY: x holds `heads * head_dim` values and a head at least twice `cos.len()`.
    unsafe {
        rope_dispatch(path, x.as_mut_ptr(), heads, head_dim, cos.as_ptr(), sin.as_ptr(), cos.len());
    }
}

/// Softmax in place; a row of one size always gives the same bits. Does nothing to an empty row.
pub fn softmax(path: Path, x: &mut [f32]) {
    // SAFETY: x holds `x.len()` values.
    unsafe { softmax_dispatch(path, x.as_mut_ptr(), x.len()) }
}

/// `ln(sum(e^x))`, minus infinity for an empty row.
#[must_use]
pub fn log_sum_exp(path: Path, x: &[f32]) -> f32 {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return max;
    }
    // SAFETY: x holds `x.len()` values, and is only read as `out` is null.
    max + unsafe { sum_exp_dispatch(path, x.as_ptr(), x.len(), max, std::ptr::null_mut()) }.ln()
}

fn rows_of(len: usize, dim: usize) -> usize {
    assert!(dim > 0 && len.is_multiple_of(dim), "{len} values are no whole rows of {dim}");
    len / dim
}

/// Reads lanes `from..from + min(16, left)`, the rest filled with `fill`.
#[inline(always)]
pub(super) unsafe fn load_some<L: Lanes>(from: *const f32, left: usize, fill: f32) -> L {
    // SAFETY: the caller's promise: `left` values are readable.
    unsafe {
        if left >= LANES {
            return L::load(from);
        }
        let mut padded = [fill; LANES];
        std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), left);
        L::load(padded.as_ptr())
    }
}

/// Writes the first `min(16, left)` lanes.
#[inline(always)]
pub(super) unsafe fn store_some<L: Lanes>(value: L, to: *mut f32, left: usize) {
    // SAFETY: the caller's promise: `left` values are writable.
    unsafe {
        if left >= LANES {
            return value.store(to);
        }
        let mut padded = [0.0; LANES];
        value.store(padded.as_mut_ptr());
        std::ptr::copy_nonoverlapping(padded.as_ptr(), to, left);
    }
}

/// `x = f(x, y)` over `len` values.
#[inline(always)]
unsafe fn zip_in_place<L: Lanes>(
    x: *mut f32,
    y: *const f32,
    len: usize,
    f: impl Fn(L, L) -> L + Copy,
) {
    let mut i = 0;
    while i < len {
        // The only call of `f`: inlined, it is compiled for the set like everything around it.
        // SAFETY: i is below len; the caller gives `len` values each.
        unsafe {
            let value = f(load_some(x.add(i), len - i, 0.0), load_some(y.add(i), len - i, 0.0));
            store_some(value, x.add(i), len - i);
        }
        i += LANES;
    }
}

/// The sum of squares, in four chains of lanes that are added up at the end.
#[inline(always)]
pub(super) unsafe fn sum_of_squares<L: Lanes>(x: *const f32, len: usize) -> f32 {
    // SAFETY: the caller gives `len` values; lanes run on the enabled set.
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

#[inline(always)]
unsafe fn silu_mul_lanes<L: Lanes>(gate: *mut f32, up: *const f32, len: usize) {
    // SAFETY: the caller's promise; lanes run on the enabled set.
    unsafe { zip_in_place::<L>(gate, up, len, |g, u| g.mul(lanes::sigmoid(g)).mul(u)) }
}
dispatch! {
    /// # Safety
    /// Both pointers are valid for `len` values.
    unsafe fn silu_mul_dispatch(gate: *mut f32, up: *const f32, len: usize) = silu_mul_lanes
}

#[inline(always)]
unsafe fn gelu_mul_lanes<L: Lanes>(gate: *mut f32, up: *const f32, len: usize) {
    // SAFETY: the caller's promise; lanes run on the enabled set.
    unsafe { zip_in_place::<L>(gate, up, len, |g, u| lanes::gelu_tanh(g).mul(u)) }
}
dispatch! {
    /// # Safety
    /// Both pointers are valid for `len` values.
    unsafe fn gelu_mul_dispatch(gate: *mut f32, up: *const f32, len: usize) = gelu_mul_lanes
}

#[inline(always)]
unsafe fn add_lanes<L: Lanes>(x: *mut f32, other: *const f32, len: usize) {
    // SAFETY: the caller's promise; lanes run on the enabled set.
    unsafe { zip_in_place::<L>(x, other, len, |a, b| a.add(b)) }
}
dispatch! {
    /// # Safety
    /// Both pointers are valid for `len` values.
    unsafe fn add_dispatch(x: *mut f32, other: *const f32, len: usize) = add_lanes
}

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
        // SAFETY: the caller gives `rows * dim` values; lanes run on the enabled set.
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
    /// `x` and `out` are valid for `rows * weight.len()` values; they may be the same.
    unsafe fn norm_rows(
        x: *const f32, rows: usize, weight: &[f32], eps: f32, offset: f32, out: *mut f32,
    ) = norm_lanes
}

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
            // SAFETY: the caller gives `heads * head_dim` values, `2 * half <= head_dim`, and
            // `half` values of cos and sin; lanes run on the enabled set.
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
    /// `x` is valid for `heads * head_dim` values, `2 * half <= head_dim`, `cos` and `sin` for `half`.
    unsafe fn rope_dispatch(
        x: *mut f32, heads: usize, head_dim: usize, cos: *const f32, sin: *const f32, half: usize,
    ) = rope_lanes
}

/// The sum of `e^(x - max)`, whose terms go to `out` unless that is null.
#[inline(always)]
unsafe fn sum_exp_lanes<L: Lanes>(x: *const f32, len: usize, max: f32, out: *mut f32) -> f32 {
    // SAFETY: the caller gives `len` values each; lanes run on the enabled set.
    unsafe {
        let mut sum = L::splat(0.0);
        let mut i = 0;
        while i < len {
            let value = load_some::<L>(x.add(i), len - i, f32::NEG_INFINITY);
            let term = lanes::exp(value.sub(L::splat(max)));
            sum = sum.add(term);
            if !out.is_null() {
                store_some(term, out.add(i), len - i);
            }
            i += LANES;
        }
        sum.reduce_add()
    }
}
dispatch! {
    /// # Safety
    /// `x` is valid for `len` values; so is `out`, or it is null.
    unsafe fn sum_exp_dispatch(x: *const f32, len: usize, max: f32, out: *mut f32) -> f32
        = sum_exp_lanes
}

#[inline(always)]
unsafe fn softmax_lanes<L: Lanes>(x: *mut f32, len: usize) {
    // SAFETY: the caller gives `len` values; lanes run on the enabled set.
    unsafe {
        let mut max = L::splat(f32::NEG_INFINITY);
        let mut i = 0;
        while i < len {
            max = max.max(load_some(x.add(i), len - i, f32::NEG_INFINITY));
            i += LANES;
        }
        let factor = L::splat(1.0 / sum_exp_lanes::<L>(x, len, max.reduce_max(), x));
        zip_in_place::<L>(x, x, len, |value, _| value.mul(factor));
    }
}
dispatch! {
    /// # Safety
    /// `x` is valid for `len` values.
    unsafe fn softmax_dispatch(x: *mut f32, len: usize) = softmax_lanes
}

#[cfg(test)]
mod tests;
