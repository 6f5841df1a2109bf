//! Each operation is compared with its formula in f64 on every instruction set, at lengths that are
//! not multiples of the vector width.

use super::*;
use crate::reference::{random, worst};

const SIZES: [usize; 7] = [1, 7, 16, 17, 64, 100, 1023];

fn check(tolerance: f64, got: impl Fn(Path, usize) -> Vec<f32>, want: impl Fn(usize) -> Vec<f64>) {
    for path in Path::supported() {
        for size in SIZES {
            let (difference, at) = worst(&got(path, size), &want(size));
            assert!(difference < tolerance, "{path}, {size} values, at {at}: off by {difference}");
        }
    }
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

/// Goal: the RMS norm of several rows matches its formula with and without the offset of one, and
/// the in-place variant gives the same values.
#[test]
fn rms_norm_matches_its_formula() {
    for offset in [0.0_f32, 1.0] {
        let inputs = |size| (random(1, 3 * size), random(2, size));
        let want = |size: usize| {
            let (x, weight) = inputs(size);
            let mut out = Vec::new();
            for row in wide(&x).chunks_exact(size) {
                let mean = row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64;
                let scale = 1.0 / (mean + 1e-5).sqrt();
                out.extend(
                    row.iter().zip(&weight).map(|(v, w)| v * scale * f64::from(*w + offset)),
                );
            }
            out
        };
        let got = |path, size| {
            let (x, weight) = inputs(size);
            let mut out = vec![0.0; x.len()];
            rms_norm(path, &x, &weight, 1e-5, offset, &mut out);
            let mut in_place = x;
            rms_norm_in_place(path, &mut in_place, &weight, 1e-5, offset);
            assert_eq!(in_place, out);
            out
        };
        check(2e-6, got, want);
    }
}

/// Goal: both gated activations match their formulas, also where the exponential underflows or
/// overflows, and they propagate NaN.
#[test]
fn gates_match_their_formulas() {
    let inputs = |size| {
        let gate: Vec<f32> = random(3, size).iter().map(|v| v * 12.0).collect();
        (gate, random(4, size))
    };
    let apply = |gate: fn(Path, &mut [f32], &[f32]), path, size| {
        let (mut g, up) = inputs(size);
        gate(path, &mut g, &up);
        g
    };
    let formula = |f: fn(f64) -> f64, size| {
        let (g, up) = inputs(size);
        wide(&g).into_iter().zip(wide(&up)).map(|(g, u)| f(g) * u).collect()
    };
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let gelu = |x: f64| {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
        0.5 * x * (1.0 + inner.tanh())
    };
    check(3e-6, |path, size| apply(silu_mul, path, size), |size| formula(silu, size));
    check(3e-6, |path, size| apply(gelu_tanh_mul, path, size), |size| formula(gelu, size));
    for path in Path::supported() {
        let mut extremes = [-1000.0, 1000.0, f32::NAN];
        silu_mul(path, &mut extremes, &[1.0; 3]);
        assert!(extremes[0].abs() < 1e-30 && extremes[1] == 1000.0, "{path}: {extremes:?}");
        assert!(extremes[2].is_nan(), "{path}: NaN must propagate");
    }
}

/// Goal: decays match their formula also where the exponentials underflow or overflow, are from 0 to
/// 1, and propagate NaN.
#[test]
fn decays_match_their_formula() {
    for rate in [-3.0, -0.02] {
        let inputs = |size| {
            let steps: Vec<f32> = random(3, size).iter().map(|v| v * 12.0).collect();
            (steps, random(4, size))
        };
        let got = |path, size| {
            let (mut x, bias) = inputs(size);
            decay_in_place(path, &mut x, &bias, rate);
            x
        };
        let want = |size| {
            let (x, bias) = inputs(size);
            let sums = wide(&x).into_iter().zip(wide(&bias)).map(|(x, bias)| x + bias);
            sums.map(|sum| (f64::from(rate) * sum.exp().ln_1p()).exp()).collect()
        };
        check(1e-6, got, want);
    }
    for path in Path::supported() {
        let mut extremes = [-1000.0, 1000.0, f32::INFINITY, f32::NAN];
        decay_in_place(path, &mut extremes, &[0.0; 4], -1.0);
        assert_eq!(extremes[..3], [1.0, 0.0, 0.0], "{path}");
        assert!(extremes[3].is_nan(), "{path}: NaN must propagate");
        let mut all = [-1000.0, 0.0, 1000.0];
        decay_in_place(path, &mut all, &[0.0; 3], 2.0);
        assert_eq!(all, [1.0; 3], "{path}: nothing grows");
    }
}

/// Goal: scaling and soft-capping match their formulas, and soft-capping is exact at zero and
/// bounded for any input.
#[test]
fn scale_and_soft_cap_match_their_formulas() {
    let inputs = |size| -> Vec<f32> { random(11, size).iter().map(|v| v * 90.0).collect() };
    let apply = |f: fn(Path, &mut [f32], f32), path, size| {
        let mut x = inputs(size);
        f(path, &mut x, 30.0);
        x
    };
    let capped = |size| wide(&inputs(size)).iter().map(|x| 30.0 * (x / 30.0).tanh()).collect();
    check(2e-5, |path, size| apply(soft_cap, path, size), capped);
    for path in Path::supported() {
        let mut x = random(12, 37);
        let want: Vec<f32> = x.iter().map(|v| v * 0.3).collect();
        scale(path, &mut x, 0.3);
        assert_eq!(x, want, "{path}");
        let mut extremes = [0.0, f32::MAX, -f32::INFINITY, f32::NAN];
        soft_cap(path, &mut extremes, 5.0);
        assert_eq!(extremes[..3], [0.0, 5.0, -5.0], "{path}");
        assert!(extremes[3].is_nan(), "{path}: NaN must propagate");
    }
}

/// Goal: the clamped gate matches its formula within and beyond the limits, and propagates NaN.
#[test]
fn clamped_swiglu_matches_its_formula() {
    let inputs = |size| {
        let wide = |seed| random(seed, size).iter().map(|v| v * 4.0).collect::<Vec<_>>();
        (wide(3), wide(4))
    };
    let got = |path, size| {
        let (mut gate, up) = inputs(size);
        clamped_swiglu(path, &mut gate, &up, 1.7, 2.5);
        gate
    };
    let want = |size| {
        let (gate, up) = inputs(size);
        let pairs = wide(&gate).into_iter().zip(wide(&up));
        pairs
            .map(|(gate, up)| {
                let gate = gate.min(2.5);
                (up.clamp(-2.5, 2.5) + 1.0) * gate / (1.0 + (-1.7 * gate).exp())
            })
            .collect()
    };
    check(3e-6, got, want);
    for path in Path::supported() {
        for (gate, up) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
            let mut gate = [gate];
            clamped_swiglu(path, &mut gate, &[up], 1.7, 2.5);
            assert!(gate[0].is_nan(), "{path}: NaN must propagate");
        }
    }
}

/// Goal: value `i` is rotated with value `i + half`, and values beyond the rotary part do not
/// change.
#[test]
fn rope_rotates_pairs() {
    let (heads, head_dim) = (3, 52);
    for path in Path::supported() {
        for half in [1, 7, 16, 20, 26] {
            let x = random(5, heads * head_dim);
            let angles = random(6, half);
            let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
            let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
            let mut want = wide(&x);
            for head in want.chunks_exact_mut(head_dim) {
                for i in 0..half {
                    let (a, b) = (head[i], head[i + half]);
                    let (c, s) = (f64::from(cos[i]), f64::from(sin[i]));
                    head[i] = a * c - b * s;
                    head[i + half] = b * c + a * s;
                }
            }
            let mut got = x;
            rope(path, &mut got, head_dim, &cos, &sin);
            let (difference, at) = worst(&got, &want);
            assert!(difference < 1e-6, "{path}, half {half}, at {at}: off by {difference}");
        }
    }
}

/// Goal: a residual addition adds each value exactly once, also where the length is not a multiple
/// of the vector width.
#[test]
fn add_adds_each_value() {
    for path in Path::supported() {
        let x = random(8, 3 * 37);
        let mut got = x.clone();
        add(path, &mut got, &x);
        assert!((0..x.len()).all(|i| got[i] == 2.0 * x[i]), "{path}");
    }
}
