//! The kernels of the gate of an MLP.

use half::{bf16, f16};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::host::Program;

const ALPHA: f32 = 1.7;
const LIMIT: f32 = 7.0;

/// A number as a type stores it.
type Stored = fn(f32) -> f32;

/// What the kernel of a type returns for `x`, `[rows, 2 * width]`. It must leave the element after
/// the last one as it was, 0.
fn run(
    program: &Program,
    element: &str,
    [kind, rows, width]: [usize; 3],
    launch: [usize; 3],
    x: &[f32],
) -> Vec<f32> {
    let numbers = [kind, rows, width].into_iter().chain(launch).map(|number| number.to_string());
    let arguments: Vec<String> = std::iter::once(element.to_owned()).chain(numbers).collect();
    let mut input: Vec<u8> = [ALPHA, LIMIT].iter().flat_map(|value| value.to_ne_bytes()).collect();
    let pair = |bytes: &[u8; 2]| u16::from_ne_bytes(*bytes);
    let output: Vec<f32> = match element {
        "f32" => {
            input.extend(x.iter().flat_map(|x| x.to_ne_bytes()));
            let output = program.run(&arguments, &input);
            output.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
        }
        "f16" => {
            input.extend(x.iter().flat_map(|x| f16::from_f32(*x).to_bits().to_ne_bytes()));
            let output = program.run(&arguments, &input);
            output.as_chunks().0.iter().map(|b| f16::from_bits(pair(b)).to_f32()).collect()
        }
        _ => {
            input.extend(x.iter().flat_map(|x| bf16::from_f32(*x).to_bits().to_ne_bytes()));
            let output = program.run(&arguments, &input);
            output.as_chunks().0.iter().map(|b| bf16::from_bits(pair(b)).to_f32()).collect()
        }
    };
    let (last, output) = output.split_last().expect("an element");
    assert_eq!((output.len(), *last), (rows * width, 0.0));
    output.to_vec()
}

/// The activations in double precision.
fn expected(kind: usize, gate: f64, up: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match kind {
        0 => gate * sigmoid(gate) * up,
        1 => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044_715 * gate.powi(3));
            0.5 * gate * (1.0 + inner.tanh()) * up
        }
        _ => {
            let limit = f64::from(LIMIT);
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            gate * sigmoid(f64::from(ALPHA) * gate) * (up + 1.0)
        }
    }
}

/// Goal: for each activation and type, for grids that are smaller and larger than the rows, the
/// kernels return the formula's values, rounded to the nearest element.
#[test]
fn gates_are_as_the_formulas_say() {
    let program = Program::compile("gate.cpp");
    let mut random = SmallRng::seed_from_u64(5);
    let types: [(&str, Stored, f64); 3] = [
        ("f32", |x| x, 0.0),
        ("f16", |x| f16::from_f32(x).to_f32(), 2.0_f64.powi(-11)),
        ("bf16", |x| bf16::from_f32(x).to_f32(), 2.0_f64.powi(-8)),
    ];
    for (rows, width, launch) in [(1, 1, [1, 1, 1]), (5, 37, [2, 2, 16]), (3, 100, [4, 7, 32])] {
        for (element, stored, rounding) in types {
            for kind in 0..3 {
                let x: Vec<f32> =
                    (0..2 * rows * width).map(|_| stored(random.random_range(-9.0..9.0))).collect();
                let got = run(&program, element, [kind, rows, width], launch, &x);
                for (i, got) in got.into_iter().enumerate() {
                    let at = i / width * 2 * width + i % width;
                    let value = expected(kind, x[at].into(), x[at + width].into());
                    // GELU of a negative number is a difference of almost equal ones.
                    let error = value.abs() * (rounding + 2e-6) + 2e-6;
                    assert!(
                        (f64::from(got) - value).abs() <= error,
                        "{element}, {kind}: {got}, {value}"
                    );
                }
            }
        }
    }
}

/// Goal: infinities and NaN are what they are in f32 arithmetic, and no NaN becomes an infinity.
#[test]
fn a_nan_stays_a_nan() {
    let program = Program::compile("gate.cpp");
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    // Gates, then the other factors.
    let x = [nan, 1.0, -inf, inf, 60_000.0, 1.0, nan, 2.0, 2.0, 60_000.0];
    for element in ["f32", "f16", "bf16"] {
        for kind in 0..2 {
            let got = run(&program, element, [kind, 1, 5], [1, 1, 8], &x);
            assert!(
                got[0].is_nan() && got[1].is_nan() && got[3] == inf,
                "{element}, {kind}: {got:?}"
            );
            assert!(
                got[4] > 3e9 || element == "f16" && got[4] == inf,
                "{element}, {kind}: {got:?}"
            );
        }
        let got = run(&program, element, [2, 1, 5], [1, 1, 8], &x);
        assert!(got[0].is_nan() && got[1].is_nan(), "{element}: {got:?}");
        assert!(got[3..].iter().all(|value| value.is_finite()), "{element}: {got:?}");
    }
}
