//! Keys and values of 4 bits: their rotation, their levels, and the rounding of a head to them.
//!
//! A head is multiplied by a normalized Walsh-Hadamard matrix before it is rounded (QuaRot, Ashkboos
//! et al., 2024). That spreads the few large values of a head over all of them, and what remains is
//! close to normally distributed. The matrix is orthogonal and its own inverse: products with
//! queries that are rotated in the same way do not change, and a sum of rotated values becomes the
//! sum of the values if it is rotated once more.
//!
//! A head has one scale, and a value is one of 16 [`LEVELS`] times this scale. The levels are those
//! with the least squared error for normally distributed values (Lloyd, 1982), as integers of 8
//! bits, which bf16 represents exactly. With one scale per head, kernels apply scales as they do for
//! bytes.
//!
//! The bits of a head depend on its values alone, and are the same on every instruction set.
#![allow(unsafe_code, reason = "calls functions compiled for an instruction set")]

use crate::lanes::{LANES, Lanes, dispatch};
use crate::path::Path;

/// The levels by their codes, in ascending order.
pub(crate) const LEVELS: [i8; 16] =
    [-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127];

/// The positive levels.
const POSITIVE: [f32; 8] = [6.0, 18.0, 31.0, 44.0, 58.0, 75.0, 96.0, 127.0];

/// Maximum number of values that are rotated together.
const ROTATED_MAX: usize = 256;

/// The shares of a head's largest magnitude that are tried as the magnitude of the largest level.
const SHARES: [f32; 3] = [1.0, 0.9, 0.8];

/// Heads whose largest magnitude is not above this number are stored as zeroes, because the inverse
/// of their scale would overflow.
const NEGLIGIBLE: f32 = 1e-36;

/// Number of successive values of a head that are rotated together: the largest power of two up to
/// 256 that divides the length of a head.
pub(crate) fn rotated_len(head_dim: usize) -> usize {
    (1 << head_dim.trailing_zeros()).min(ROTATED_MAX)
}

/// Multiplies each group of `len` values by the Walsh-Hadamard matrix divided by `sqrt(len)`. `len`
/// is a power of two up to 256, and the number of values is a multiple of it.
#[inline(always)]
unsafe fn rotate_lanes<L: Lanes>(values: &mut [f32], len: usize) {
    let mut sums = [0.0; ROTATED_MAX];
    let sums = &mut sums[..len];
    let factor = 1.0 / (len as f32).sqrt();
    for group in values.chunks_exact_mut(len) {
        // Each step transforms the lowest bit of the index and makes it the highest. After all
        // steps the bits have their order again.
        for _ in 0..len.trailing_zeros() {
            let (first, second) = sums.split_at_mut(len / 2);
            for ((a, b), pair) in first.iter_mut().zip(second).zip(group.as_chunks::<2>().0) {
                (*a, *b) = (pair[0] + pair[1], pair[0] - pair[1]);
            }
            group.copy_from_slice(sums);
        }
        for value in group {
            *value *= factor;
        }
    }
}
dispatch! {
    /// [`rotate_lanes`], compiled for the instruction set of `path`.
    ///
    /// # Safety
    /// There are no conditions; `dispatch!` makes unsafe functions only.
    unsafe fn rotate_dispatch(values: &mut [f32], len: usize) = rotate_lanes
}

/// Rotates heads of `head_dim` values in place. It is its own inverse.
pub(crate) fn rotate(path: Path, heads: &mut [f32], head_dim: usize) {
    // SAFETY: the function has no conditions.
    unsafe { rotate_dispatch(path, heads, rotated_len(head_dim)) }
}

/// Heads that were rotated and rounded.
pub(crate) struct RoundedHeads {
    /// `[heads, head_dim / 2]`: the codes of two successive values in each byte, the first one in
    /// the low bits.
    pub(crate) packed: Vec<u8>,
    /// `[heads]`; NaN for a head that contains a NaN or an infinity.
    pub(crate) scales: Vec<f32>,
}

impl RoundedHeads {
    /// Rotates and rounds heads of `head_dim` values, an even number.
    pub(crate) fn new(path: Path, heads: &[f32], head_dim: usize) -> RoundedHeads {
        let mut rotated = heads.to_vec();
        rotate(path, &mut rotated, head_dim);
        let mut packed = vec![0; heads.len() / 2];
        let parts = rotated.chunks_exact(head_dim).zip(packed.chunks_exact_mut(head_dim / 2));
        // SAFETY: the function has no conditions.
        let scales = parts.map(|(head, packed)| unsafe { round_dispatch(path, head, packed) });
        let scales = scales.collect();
        RoundedHeads { packed, scales }
    }
}

/// Rounds a rotated head to levels and returns its scale. `packed` has half its length.
#[inline(always)]
unsafe fn round_lanes<L: Lanes>(head: &[f32], packed: &mut [u8]) -> f32 {
    // The bits of non-negative floats have the same order as the floats; infinity and NaN come
    // last.
    let largest = head.iter().fold(0, |largest, value| largest.max(value.abs().to_bits()));
    let largest = f32::from_bits(largest);
    if !largest.is_finite() || largest <= NEGLIGIBLE {
        return if largest.is_finite() { 0.0 } else { f32::NAN };
    }
    let (mut best, mut inverse, mut scale) = (f32::NEG_INFINITY, 0.0, 0.0);
    for share in SHARES {
        let limit = largest * share;
        let tried = POSITIVE[7] / limit;
        let (products, squares) = fit(head, tried);
        // With the best scale for these levels, the squared error is the sum of the squared values
        // minus this number, in units of (largest / 127)^2.
        let gain = (products * share) * (products * share) / squares;
        if gain > best {
            (best, inverse) = (gain, tried);
            scale = products / squares * (limit / POSITIVE[7]);
        }
    }
    for (head, packed) in head.chunks(LANES).zip(packed.chunks_mut(LANES / 2)) {
        let mut codes = [0; LANES];
        for (code, value) in codes.iter_mut().zip(head) {
            let (above, _) = nearest(value * inverse);
            *code = if value.is_sign_negative() { 7 - above } else { 8 + above };
        }
        for (packed, pair) in packed.iter_mut().zip(codes.chunks_exact(2)) {
            *packed = pair[0] | pair[1] << 4;
        }
    }
    scale
}
dispatch! {
    /// [`round_lanes`], compiled for the instruction set of `path`.
    ///
    /// # Safety
    /// There are no conditions; `dispatch!` makes unsafe functions only.
    unsafe fn round_dispatch(head: &[f32], packed: &mut [u8]) -> f32 = round_lanes
}

/// The sum of the products of the values, times `inverse`, with their nearest levels, and the sum
/// of the squares of these levels.
#[inline(always)]
fn fit(head: &[f32], inverse: f32) -> (f32, f32) {
    // One sum for each lane, in the same order on every instruction set.
    let (mut products, mut squares) = ([0.0; LANES], [0.0; LANES]);
    let mut add = |values: &[f32; LANES], live: usize| {
        for lane in 0..LANES {
            let value = values[lane] * inverse;
            let level = if lane < live { nearest(value).1 } else { 0.0 };
            products[lane] += value.abs() * level;
            squares[lane] += level * level;
        }
    };
    let (whole, rest) = head.as_chunks::<LANES>();
    whole.iter().for_each(|values| add(values, LANES));
    if !rest.is_empty() {
        let mut values = [0.0; LANES];
        values[..rest.len()].copy_from_slice(rest);
        add(&values, rest.len());
    }
    (products.iter().sum(), squares.iter().sum())
}

/// The number of positive levels below the one nearest to the magnitude of `value`, and this level.
#[inline(always)]
fn nearest(value: f32) -> (u8, f32) {
    let magnitude = value.abs();
    let (mut above, mut level) = (0, POSITIVE[0]);
    for pair in POSITIVE.windows(2) {
        // Without a branch, so that the compiler vectorizes the loop.
        let is_above = magnitude > f32::midpoint(pair[0], pair[1]);
        above += u8::from(is_above);
        level += if is_above { pair[1] - pair[0] } else { 0.0 };
    }
    (above, level)
}

#[cfg(test)]
mod tests;
