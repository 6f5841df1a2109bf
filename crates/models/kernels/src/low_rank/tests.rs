use super::*;
use crate::quant::widen;
use crate::reference::{random, worst};

/// Random weights of a type, as bytes and as numbers.
fn weights(dtype: TensorType, count: usize) -> (Vec<u8>, Vec<f32>) {
    let bytes: Vec<u8> = random(5, count)
        .iter()
        .flat_map(|&value| match dtype {
            TensorType::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
            TensorType::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
            _ => value.to_le_bytes().to_vec(),
        })
        .collect();
    let mut values = vec![0.0; count];
    widen(dtype, &bytes, &mut values);
    (bytes, values)
}

/// Goal: the update is the product in f64 on every instruction set, for every type and for sizes
/// that are not multiples of a panel, and its bits do not depend on which features are updated
/// together.
#[test]
fn updates_are_products_and_independent_of_their_neighbors() {
    for path in Path::supported() {
        for dtype in [TensorType::F32, TensorType::F16, TensorType::Bf16] {
            for (out_features, rank) in [(1, 1), (16, 4), (50, 7), (176, 16), (130, 64)] {
                let (bytes, values) = weights(dtype, out_features * rank);
                let matrix = LowRank::pack(dtype, out_features, rank, &bytes, path).unwrap();
                assert_eq!((matrix.out_features(), matrix.rank()), (out_features, rank));
                let (h, y) = (random(6, rank), random(7, out_features));
                let mut got = y.clone();
                matrix.add(0, &h, &mut got);
                let rows = values.chunks_exact(rank).zip(&y);
                let want = rows.map(|(row, y)| {
                    let products = row.iter().zip(&h).map(|(w, h)| f64::from(*w) * f64::from(*h));
                    f64::from(*y) + products.sum::<f64>()
                });
                let (difference, at) = worst(&got, &want.collect::<Vec<_>>());
                assert!(difference < 3e-6, "{path}, {dtype:?}, at {at}: off by {difference}");
                for part in [16, 48] {
                    let mut parts = y.clone();
                    for (index, part_y) in parts.chunks_mut(part).enumerate() {
                        matrix.add(index * part, &h, part_y);
                    }
                    assert_eq!(parts, got, "{path}, {dtype:?}, {part} features at a time");
                }
            }
        }
    }
}

/// Goal: shapes and types that do not fit are refused.
#[test]
fn wrong_shapes_are_refused() {
    let path = Path::detect().unwrap();
    let pack = |dtype, out_features, rank, bytes| {
        LowRank::pack(dtype, out_features, rank, &vec![0; bytes], path).unwrap_err()
    };
    assert!(matches!(pack(TensorType::F32, 0, 1, 0), KernelError::Empty { .. }));
    assert!(matches!(pack(TensorType::Q8_0, 1, 32, 34), KernelError::NotRounded { .. }));
    let error = pack(TensorType::F16, 3, 4, 25);
    assert!(matches!(error, KernelError::WrongByteCount { expected: 24, got: 25, .. }));
    let huge = pack(TensorType::F32, usize::MAX, 2, 8);
    assert!(matches!(huge, KernelError::WrongByteCount { got: 8, .. }));
}
