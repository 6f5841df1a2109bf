//! The product is compared with f64 on irregular shapes, and its bits for every way to divide the
//! work.

use super::*;
use crate::reference::blocks::random_blocks;
use crate::reference::{product, random, to_bf16, worst};

/// The bytes of `weights` as a tensor of type `dtype`. For quantized types, these are other random
/// weights of the same number.
pub(crate) fn bytes_of(dtype: TensorType, weights: &[f32]) -> Vec<u8> {
    match dtype {
        TensorType::F32 => weights.iter().flat_map(|w| w.to_le_bytes()).collect(),
        TensorType::F16 => {
            weights.iter().flat_map(|&w| half::f16::from_f32(w).to_le_bytes()).collect()
        }
        TensorType::Bf16 => {
            weights.iter().flat_map(|&w| half::bf16::from_f32(w).to_le_bytes()).collect()
        }
        _ => {
            let seed = weights[0].to_bits().into();
            random_blocks(dtype, seed, weights.len() / dtype.block_len())
        }
    }
}

/// Rows, output features, inner size; the inner size is rounded up to whole blocks.
const SHAPES: [(usize, usize, usize); 12] = [
    (1, 1, 1),
    (1, 16, 32),
    (1, 70, 100),
    (2, 33, 65),
    (3, 64, 257),
    (5, 130, 31),
    (8, 17, 64),
    (13, 48, 96),
    (16, 64, 128),
    (17, 31, 33),
    (61, 100, 77),
    (250, 90, 64),
];

fn shapes(dtype: TensorType) -> impl Iterator<Item = (usize, usize, usize)> {
    SHAPES
        .into_iter()
        .map(move |(rows, out, inner)| (rows, out, inner.next_multiple_of(dtype.block_len())))
}

fn unpacked(matrix: &Matrix) -> Vec<f32> {
    let mut weights = vec![0.0; matrix.out_features() * matrix.in_features()];
    for (index, row) in weights.chunks_exact_mut(matrix.in_features()).enumerate() {
        matrix.row(index, row);
    }
    weights
}

fn multiply(matrix: &Matrix, threads: &Threads, x: &[f32]) -> Vec<f32> {
    let rows = x.len() / matrix.in_features();
    let mut out = vec![f32::NAN; rows * matrix.out_features()];
    matrix.matmul(threads, x, rows, &mut out);
    out
}

/// Goal: `row` returns exactly the weights that were packed, for types that are not quantized.
#[test]
fn rows_unpack_to_what_was_packed() {
    for (_, out, inner) in SHAPES {
        let weights = random(1, out * inner);
        for dtype in [TensorType::F32, TensorType::F16, TensorType::Bf16] {
            let bytes = bytes_of(dtype, &weights);
            let matrix = Matrix::pack(dtype, out, inner, &bytes, Path::PORTABLE).unwrap();
            let got = bytes_of(dtype, &unpacked(&matrix));
            assert_eq!(got, bytes, "{dtype:?} [{out}, {inner}]");
        }
    }
}

/// Goal: for every type on every path, the product is as close to the product in f64 as the
/// arithmetic of the path allows.
#[test]
fn product_matches_f64_on_irregular_shapes() {
    let threads = Threads::new(3);
    for path in Path::supported() {
        for dtype in TensorType::ALL {
            for (rows, out, inner) in shapes(dtype) {
                let weights = random(2, out * inner);
                let matrix =
                    Matrix::pack(dtype, out, inner, &bytes_of(dtype, &weights), path).unwrap();
                let x = random(3, rows * inner);
                let got = multiply(&matrix, &threads, &x);
                let seen = if dtype.is_quantized() {
                    int8::rounded(&x)
                } else if matrix.rounds_activations() {
                    to_bf16(&x)
                } else {
                    x
                };
                let (difference, at) =
                    worst(&got, &product(&seen, &unpacked(&matrix), rows, inner));
                // The products are below one and are added one after the other.
                let tolerance = 1e-6 + 6e-8 * inner as f64;
                assert!(
                    difference < tolerance,
                    "{path} {dtype:?} [{rows}, {inner}] x [{out}]: off by {difference} at {at}"
                );
            }
        }
    }
}

/// Goal, batch invariance: the result of a row has the same bits in every batch, at every place in
/// a batch, and with any number of threads.
#[test]
fn bits_do_not_depend_on_the_batch_or_the_threads() {
    let (one, three) = (Threads::new(1), Threads::new(3));
    for path in Path::supported() {
        for dtype in TensorType::ALL {
            let (rows, out, inner) = (70, 83, 173_usize.next_multiple_of(dtype.block_len()));
            let weights = random(4, out * inner);
            let matrix = Matrix::pack(dtype, out, inner, &bytes_of(dtype, &weights), path).unwrap();
            let x = random(5, rows * inner);
            let whole = multiply(&matrix, &three, &x);
            assert_eq!(whole, multiply(&matrix, &one, &x), "{path} {dtype:?}: threads");
            for cut in [1, 2, 3, 4, 5, 7, 11, 12, 15, 16, 17, 31, 32, 33, 47, 48] {
                let parts: Vec<f32> = x
                    .chunks(cut * inner)
                    .flat_map(|part| multiply(&matrix, &three, part))
                    .collect();
                assert!(
                    whole.iter().map(|v| v.to_bits()).eq(parts.iter().map(|v| v.to_bits())),
                    "{path} {dtype:?}: cut by {cut}"
                );
            }
        }
    }
}

/// Goal: bytes that do not match the shape are refused with an error that says what was expected.
#[test]
fn wrong_sizes_are_errors() {
    let pack = |dtype, out, inner, len: usize| {
        Matrix::pack(dtype, out, inner, &vec![0; len], Path::PORTABLE).map(|_| ()).unwrap_err()
    };
    assert!(pack(TensorType::F32, 2, 3, 23).to_string().contains("expected 24 bytes, got 23"));
    assert!(pack(TensorType::Q4K, 2, 100, 1).to_string().contains("a multiple of 256 columns"));
    assert!(matches!(pack(TensorType::F32, 0, 3, 0), KernelError::Empty { .. }));
}

/// Goal: a Q8_0 matrix rounds float rows to the nearest step of their block. Packing some rows at a
/// time on several threads gives the same matrix as packing all rows at once.
#[test]
fn float_rows_are_quantized_to_q8_0() {
    let (out, inner) = (83, 96);
    let weights = random(6, out * inner);
    for source in [TensorType::F32, TensorType::F16, TensorType::Bf16] {
        let bytes = bytes_of(source, &weights);
        let run = 32 * bytes.len() / out;
        let mut matrix = Matrix::zeroed(TensorType::Q8_0, out, inner, Path::PORTABLE).unwrap();
        for (index, rows) in bytes.chunks(run).enumerate() {
            matrix.fill(&Threads::new(3), 32 * index, source, rows).unwrap();
        }
        let mut whole = Matrix::zeroed(TensorType::Q8_0, out, inner, Path::PORTABLE).unwrap();
        whole.fill(&Threads::new(1), 0, source, &bytes).unwrap();
        assert_eq!(unpacked(&matrix), unpacked(&whole), "{source:?}");
        let mut values = vec![0.0; out * inner];
        quant::widen(source, &bytes, &mut values);
        for (values, got) in values.chunks(32).zip(unpacked(&matrix).chunks(32)) {
            let largest = values.iter().fold(0.0_f32, |max, value| max.max(value.abs()));
            // Half a step, plus the error of rounding the step to f16, times 127.
            let bound = largest / 127.0 * (0.5 + 127.0 / 2048.0);
            for (value, got) in values.iter().zip(got) {
                assert!((value - got).abs() <= bound, "{source:?}: {value} became {got}");
            }
        }
    }
}

/// Goal: a bf16 matrix that is filled with f16 rows equals one that is filled with bf16 rows. Where
/// weights are widened to f32, products have the bits of the f16 matrix.
#[test]
fn f16_rows_become_bf16_rows() {
    for (rows, out, inner) in shapes(TensorType::Bf16) {
        let weights = to_bf16(&random(6, out * inner));
        let x = random(7, rows * inner);
        let f16s = bytes_of(TensorType::F16, &weights);
        assert!(quant::is_bf16(&f16s), "random numbers are not that small");
        for path in Path::supported() {
            let of = |dtype| {
                let mut matrix = Matrix::zeroed(dtype, out, inner, path).unwrap();
                matrix.fill(&Threads::new(2), 0, TensorType::F16, &f16s).unwrap();
                matrix
            };
            let (f16, bf16) = (of(TensorType::F16), of(TensorType::Bf16));
            assert_eq!(unpacked(&bf16), weights, "{path:?}");
            if !bf16.rounds_activations() {
                let [f16, bf16] = [f16, bf16].map(|m| multiply(&m, &Threads::new(2), &x));
                assert_eq!(f16, bf16, "{path:?}");
            }
        }
    }
}

/// Goal: `fill` refuses rows at a wrong place, in a wrong number, or of a type that the matrix does
/// not accept.
#[test]
fn rows_that_do_not_fit_are_refused() {
    let mut matrix = Matrix::zeroed(TensorType::Q4K, 40, 256, Path::PORTABLE).unwrap();
    let mut fill = |first, source: TensorType, rows: usize| {
        let bytes = vec![0; source.bytes_of(rows * 256).unwrap()];
        matrix.fill(&Threads::new(1), first, source, &bytes).map_err(|error| error.to_string())
    };
    assert_eq!(fill(0, TensorType::Q4K, 32), Ok(()));
    assert_eq!(fill(32, TensorType::Q4K, 8), Ok(()));
    for (first, rows) in [(8, 16), (0, 8), (32, 16), (48, 16)] {
        assert!(fill(first, TensorType::Q4K, rows).unwrap_err().contains("bytes, got"));
    }
    assert!(fill(0, TensorType::F32, 40).unwrap_err().contains("expected Q4K weights"));
}

/// Goal: the product of zero rows is empty.
#[test]
fn product_of_zero_rows_is_empty() {
    let matrix = Matrix::pack(TensorType::F32, 2, 2, &[0; 16], Path::PORTABLE).unwrap();
    assert!(multiply(&matrix, &Threads::new(2), &[]).is_empty());
}
