//! Quantized products on every dot-product set are compared with each other and with f64.

use super::*;
use crate::matrix::Matrix;
use crate::matrix::tests::bytes_of;
use crate::path::Path;
use crate::quant;
use crate::quant::SUB_BLOCK;
use crate::reference::{product, random, worst};

/// Rows, output features and blocks per row: groups of every size, full tiles and remainders.
const SHAPES: [(usize, usize, usize); 9] = [
    (1, 1, 1),
    (1, 70, 3),
    (3, 33, 1),
    (5, 130, 2),
    (8, 16, 3),
    (13, 48, 1),
    (16, 17, 2),
    (37, 100, 1),
    (250, 40, 1),
];

/// A packed random matrix and its dequantized values.
fn weights(dtype: TensorType, out: usize, inner: usize) -> (Matrix, Vec<f32>) {
    let bytes = bytes_of(dtype, &random(2, out * inner));
    let matrix = Matrix::pack(dtype, out, inner, &bytes, Path::PORTABLE).unwrap();
    let mut values = vec![0.0; out * inner];
    quant::widen(dtype, &bytes, &mut values);
    (matrix, values)
}

fn multiply(set: DotSet, matrix: &Matrix, x: &[f32]) -> Vec<f32> {
    let rows = x.len() / matrix.in_features();
    let mut out = vec![f32::NAN; rows * matrix.out_features()];
    matrix.with_set(set).matmul(&Threads::new(2), x, rows, &mut out);
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Goal: all dot-product sets give the same bits, and these are close to the product of the
/// quantized values in f64.
#[test]
fn all_sets_agree_and_are_near_f64() {
    for dtype in TensorType::ALL.into_iter().filter(|dtype| dtype.is_quantized()) {
        for (rows, out, blocks) in SHAPES {
            let inner = blocks * dtype.block_len();
            let (matrix, values) = weights(dtype, out, inner);
            let x = random(3, rows * inner);
            let plain = multiply(DotSet::supported()[0], &matrix, &x);
            let (difference, at) = worst(&plain, &product(&rounded(&x), &values, rows, inner));
            let tolerance = 1e-6 + 6e-8 * inner as f64;
            let shape = format!("{dtype:?} [{rows}, {inner}] x [{out}]");
            assert!(difference < tolerance, "{shape}: off by {difference} at {at}");
            for set in DotSet::supported() {
                let got = multiply(set, &matrix, &x);
                assert_eq!(bits(&got), bits(&plain), "{set:?} {shape}");
            }
        }
    }
}

/// Goal: quantized activations differ from the originals by at most half a step of their sub-block.
#[test]
fn rounding_is_to_the_nearest_step() {
    let mut x: Vec<f32> = random(7, 320).iter().map(|x| x * x * x * 50.0).collect();
    x[..32].fill(0.0);
    x[32..64].iter_mut().for_each(|x| *x *= 1e-39);
    for (x, got) in x.as_chunks::<SUB_BLOCK>().0.iter().zip(rounded(&x).as_chunks::<SUB_BLOCK>().0)
    {
        let largest = x.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
        let step =
            if largest / 127.0 < f32::MIN_POSITIVE { 2.0 * largest } else { largest / 127.0 };
        for (x, got) in x.iter().zip(got) {
            assert!((x - got).abs() <= step * 0.500_01, "{x} became {got}, step {step}");
        }
    }
}

/// Goal: NaN or an infinity in a row of activations makes the results of that row NaN on every set,
/// and does not change other rows.
#[test]
fn nan_affects_only_its_own_row() {
    let (matrix, _) = weights(TensorType::Q8_0, 20, 64);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (rows, row) in [(3, 1), (20, 17)] {
            let mut x = random(4, rows * 64);
            let good = multiply(DotSet::supported()[0], &matrix, &x);
            x[row * 64 + 5] = bad;
            for set in DotSet::supported() {
                let got = multiply(set, &matrix, &x);
                for (index, (got, good)) in got.iter().zip(&good).enumerate() {
                    let same = got.to_bits() == good.to_bits();
                    assert!(if index / 20 == row { got.is_nan() } else { same }, "{set:?} {index}");
                }
            }
        }
    }
}

/// Goal: every set quantizes zeroes, values whose scale would be subnormal, values halfway between
/// two steps, and the largest numbers in the same way.
#[test]
fn edges_are_quantized_alike() {
    let (matrix, _) = weights(TensorType::Q4K, 20, 256);
    let halves = |i: usize| if i.is_multiple_of(32) { 127.0 } else { i as f32 - 127.5 };
    let rows: [fn(usize) -> f32; 5] = [
        |_| 0.0,
        |i| i as f32 * 1e-40,
        halves,
        |i| if i % 2 == 0 { f32::MAX } else { f32::MIN },
        |i| 1.3e-36 * (i as f32 - 128.0),
    ];
    let x: Vec<f32> = rows.iter().flat_map(|value| (0..256).map(value)).collect();
    let plain = multiply(DotSet::supported()[0], &matrix, &x);
    for set in DotSet::supported() {
        assert_eq!(bits(&multiply(set, &matrix, &x)), bits(&plain), "{set:?}");
    }
}
