//! Slow and obvious reference implementations in f64, and random data, for the tests.

pub(super) mod blocks;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// `count` values in -1..1 that depend on the seed alone.
pub(super) fn random(seed: u64, count: usize) -> Vec<f32> {
    let mut rng = SmallRng::seed_from_u64(seed);
    (0..count).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// Matrix product: `out[r, o] = sum_k x[r, k] * w[o, k]`, with `x` of shape `[rows, inner]` and `w`
/// of shape `[features, inner]`.
pub(super) fn product(x: &[f32], w: &[f32], rows: usize, inner: usize) -> Vec<f64> {
    let features = w.len() / inner;
    let mut out = vec![0.0; rows * features];
    for row in 0..rows {
        for feature in 0..features {
            out[row * features + feature] = (0..inner)
                .map(|k| f64::from(x[row * inner + k]) * f64::from(w[feature * inner + k]))
                .sum();
        }
    }
    out
}

/// Rounds each value to bf16 and widens it to f32 again.
pub(super) fn to_bf16(values: &[f32]) -> Vec<f32> {
    values.iter().map(|&value| half::bf16::from_f32(value).to_f32()).collect()
}

/// The largest absolute difference and its index. A NaN counts as an infinite difference.
pub(super) fn worst(got: &[f32], want: &[f64]) -> (f64, usize) {
    assert_eq!(got.len(), want.len());
    let difference = |index: usize| {
        let difference = (f64::from(got[index]) - want[index]).abs();
        if difference.is_nan() { f64::INFINITY } else { difference }
    };
    (0..got.len())
        .map(|index| (difference(index), index))
        .fold((0.0, 0), |a, b| if b.0 > a.0 { b } else { a })
}
