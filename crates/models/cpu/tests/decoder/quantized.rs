//! Tests weights of every type: the logits match those of the same values in f32.

use std::borrow::Cow;

use candle_core::quantized::QTensor;
use candle_core::{Device, Tensor as CandleTensor};
use stolon_checkpoint::{DecoderConfig, Tensor, TensorType, WeightType, Weights, random_model};
use stolon_kernels::{Path, PathKind};

use super::fixture::{self, Setup};
use crate::candle_types::candle_type;
use crate::suite::fixture::{relative_error as error, wide_rows};
use crate::suite::run;

fn floats(bytes: &[u8]) -> Vec<f32> {
    let quads = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes")));
    quads.collect()
}

/// The f32 `weights` with matrices converted to `dtype`, and the same with the matrices converted
/// back to f32.
fn convert(config: &DecoderConfig, weights: &Weights, dtype: TensorType) -> (Weights, Weights) {
    let (stored, widened) = converted(config, weights, dtype);
    (of(stored), of(widened))
}

fn of(tensors: Vec<Tensor<'static>>) -> Weights {
    Weights::from_tensors("memory", tensors).expect("valid tensors")
}

/// The same as lists of tensors.
fn converted(
    config: &DecoderConfig,
    weights: &Weights,
    dtype: TensorType,
) -> (Vec<Tensor<'static>>, Vec<Tensor<'static>>) {
    let candle_type = candle_type(dtype).expect("a type that candle can quantize to");
    let mut stored = Vec::new();
    let mut widened = Vec::new();
    for spec in config.tensors() {
        let tensor = weights.tensor(&spec.name, &spec.shape).expect("a tensor of the model");
        let name = spec.name.clone();
        let plain = Tensor {
            name,
            dtype: TensorType::F32,
            shape: spec.shape.clone(),
            bytes: Cow::Owned(tensor.bytes.to_vec()),
        };
        if !spec.role.is_matrix() {
            stored.push(plain.clone());
            widened.push(plain);
            continue;
        }
        let values = floats(&tensor.bytes);
        let values =
            CandleTensor::from_vec(values, &spec.shape[..], &Device::Cpu).expect("a shape");
        let packed = QTensor::quantize(&values, candle_type).expect("whole blocks");
        let back = packed.dequantize(&Device::Cpu).and_then(|t| t.flatten_all()?.to_vec1::<f32>());
        let back = back.expect("f32 values").into_iter().flat_map(f32::to_le_bytes).collect();
        let bytes = packed.data().expect("bytes").into_owned();
        stored.push(Tensor { dtype, bytes: Cow::Owned(bytes), ..plain.clone() });
        widened.push(Tensor { bytes: Cow::Owned(back), ..plain });
    }
    (stored, widened)
}

/// The logits of 40 tokens. Also checks that they are bit-identical when computed in chunks.
fn logits(
    config: &DecoderConfig,
    weights: Weights,
    path: Path,
    weight_type: WeightType,
) -> Vec<f32> {
    let mut model = fixture::model("qwen3");
    model.config = config.clone();
    model.weights = weights;
    let setup = Setup { path: Some(path), threads: 2, weight_type, ..Setup::default() };
    let mut backend = fixture::backend(model, setup);
    let tokens: Vec<u32> = (0..40).map(|i| i * 37 % 300).collect();
    let table = run::table(0, tokens.len(), 16);
    let whole = run::rows(&mut backend, &tokens, 0, tokens.len(), &table);
    for chunk in [1, 7] {
        assert_eq!(run::rows(&mut backend, &tokens, 0, chunk, &table), whole, "{path:?}, {chunk}");
    }
    whole.concat()
}

/// Goal: an f32 model that is rounded to Q8_0 while it is loaded has the size and the accuracy of a
/// model stored in Q8_0, and its logits do not depend on the chunk size.
#[test]
fn rounding_at_load_matches_stored_q8_0() {
    let config = wide_rows();
    let weights = || random_model(&config, 3).expect("a valid configuration");
    let exact = logits(&config, weights(), Path::PORTABLE, WeightType::Stored);
    for path in Path::supported() {
        let (stored, _) = convert(&config, &weights(), TensorType::Q8_0);
        let stored = logits(&config, stored, path, WeightType::Stored);
        let rounded = logits(&config, weights(), path, WeightType::Q8_0);
        let (near, distance) = (error(&stored, &exact), error(&rounded, &exact));
        assert!(
            distance < 1.1 * near,
            "{path:?}: error {distance} against f32, but {near} if stored in Q8_0"
        );
        assert_ne!(rounded, exact, "{path:?}: nothing was rounded");
    }
    let bytes = |weight_type| {
        let mut model = fixture::model("qwen3");
        (model.config, model.weights) = (config.clone(), weights());
        fixture::backend(model, Setup { weight_type, ..Setup::default() }).weight_bytes()
    };
    assert_eq!(bytes(WeightType::Stored) * 34, bytes(WeightType::Q8_0) * 128);
}

/// Goal: on every instruction set, the logits of each type match those of the same values in f32,
/// within the error of the multiplication (bf16 instructions and quantized weights round the
/// activations), and match the original f32 model within the type's precision.
#[test]
fn every_type_matches_its_values_on_every_instruction_set() {
    let config = wide_rows();
    let weights = || random_model(&config, 3).expect("a valid configuration");
    let exact = logits(&config, weights(), Path::PORTABLE, WeightType::Stored);
    let original = weights();
    for (dtype, far) in [
        (TensorType::F16, 0.001),
        (TensorType::Bf16, 0.01),
        (TensorType::Q8_0, 0.02),
        (TensorType::Q6K, 0.1),
        (TensorType::Q5K, 0.2),
        (TensorType::Q4K, 0.4),
        (TensorType::Q3K, 0.8),
        (TensorType::Q2K, 1.6),
        (TensorType::Q5_1, 0.2),
        (TensorType::Q5_0, 0.2),
        (TensorType::Q4_1, 0.4),
        (TensorType::Q4_0, 0.4),
    ] {
        let (stored, widened) = converted(&config, &original, dtype);
        let expected = logits(&config, of(widened), Path::PORTABLE, WeightType::Stored);
        let distance = error(&expected, &exact);
        assert!(distance < far, "{dtype:?}: error {distance} against f32");
        for path in Path::supported() {
            let rounds = matches!(path.kind(), PathKind::Avx512Bf16 | PathKind::Amx);
            let near = if dtype.block_len() > 1 || rounds { 0.02 } else { 1e-4 };
            let distance =
                error(&logits(&config, of(stored.clone()), path, WeightType::Stored), &expected);
            println!("{dtype:?}, {path:?}: error {distance} against the same values in f32");
            assert!(distance < near, "{dtype:?}, {path:?}: error {distance} against f32");
        }
    }
}

/// Goal: a model in F16 that was made from one in BF16 has the logits of its numbers in BF16, bit
/// for bit. (Numbers below 2^-14 may have been rounded when it was made.)
#[test]
fn f16_of_bf16_numbers_is_computed_as_bf16() {
    let config = wide_rows();
    let weights = random_model(&config, 3).expect("a valid configuration");
    for path in Path::supported() {
        let (_, bf16_numbers) = convert(&config, &weights, TensorType::Bf16);
        let (f16, f16_numbers) = convert(&config, &bf16_numbers, TensorType::F16);
        let (bf16, _) = convert(&config, &f16_numbers, TensorType::Bf16);
        let [f16, bf16] =
            [f16, bf16].map(|weights| logits(&config, weights, path, WeightType::Stored));
        assert_eq!(f16, bf16, "{path:?}");
    }
}
