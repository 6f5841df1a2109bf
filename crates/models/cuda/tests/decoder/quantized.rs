//! Weights of every type: the logits match those of the CPU backend, which keeps the same blocks.

use std::borrow::Cow;

use candle_core::quantized::QTensor;
use stolon_backend::Backend;
use stolon_checkpoint::{KvType, LoadedModel, Tensor, Weights, random_model};
use stolon_cuda::{CandleOptions, ComputeType};
use stolon_kernels::TensorType;

use super::fixture;
use crate::candle_types::candle_type;
use crate::suite::fixture::{relative_error as error, wide_rows};
use crate::suite::{adapters, run};

/// A random model whose matrices are stored in the types that `dtype_of` says: quantized by candle.
fn model(dtype_of: impl Fn(&str) -> TensorType) -> LoadedModel {
    let mut model = fixture::model("qwen3");
    model.config = wide_rows();
    let weights = random_model(&model.config, 3).expect("a valid configuration");
    let tensors = model.config.tensors().into_iter().map(|spec| {
        let tensor = weights.tensor(&spec.name, &spec.shape).expect("a tensor of the model");
        let bytes = tensor.bytes.to_vec();
        let (dtype, bytes) = match spec.role.is_matrix() {
            true => {
                let device = candle_core::Device::Cpu;
                let values = candle_core::Tensor::from_raw_buffer(
                    &bytes,
                    candle_core::DType::F32,
                    &spec.shape,
                    &device,
                );
                let dtype = dtype_of(&spec.name);
                let packed = QTensor::quantize(
                    &values.expect("a tensor"),
                    candle_type(dtype).expect("a type of candle"),
                );
                let packed = packed.expect("whole blocks");
                (dtype, packed.data().expect("bytes").into_owned())
            }
            false => (TensorType::F32, bytes),
        };
        Tensor { name: spec.name, dtype, shape: spec.shape, bytes: Cow::Owned(bytes) }
    });
    let tensors: Vec<_> = tensors.collect();
    model.weights = Weights::from_tensors("memory", tensors).expect("valid tensors");
    model
}

/// The logits match those of the CPU backend on the same bytes, with at most the relative error
/// `error_max`, and are the same when computed in chunks.
fn check(what: &str, error_max: f32, dtype_of: impl Fn(&str) -> TensorType) {
    let tokens: Vec<u32> = (0..40).map(|i| i * 37 % 300).collect();
    let table = run::table(0, tokens.len(), 16);
    let mut cpu = fixture::cpu_backend(model(&dtype_of), 16, KvType::F32);
    let mut candle = fixture::backend(model(&dtype_of), fixture::options(16));
    let expected = run::rows(&mut cpu, &tokens, 0, 40, &table).concat();
    let got = run::rows(&mut candle, &tokens, 0, 40, &table);
    for chunk in [1, 7] {
        let chunks = run::rows(&mut candle, &tokens, 0, chunk, &table);
        assert!(chunks == got, "{what}: chunks of {chunk} differ");
    }
    let distance = error(&got.concat(), &expected);
    assert!(distance < error_max, "{what}: error {distance}");
}

/// Goal: for each type, the logits match those of the CPU backend, within the error of rounding
/// activations to 8 bits, which both do for quantized types; they are the same when computed in
/// chunks; and the embedding, which is dense, gives the same rows.
#[test]
fn every_type_matches_the_cpu_backend() {
    for (dtype, most) in [
        (TensorType::F16, 0.01),
        (TensorType::Bf16, 0.01),
        (TensorType::Q8_0, 0.03),
        (TensorType::Q6K, 0.03),
        (TensorType::Q5K, 0.03),
        (TensorType::Q4K, 0.03),
        (TensorType::Q3K, 0.03),
        (TensorType::Q2K, 0.03),
        (TensorType::Q5_1, 0.03),
        (TensorType::Q5_0, 0.03),
        (TensorType::Q4_1, 0.03),
        (TensorType::Q4_0, 0.03),
    ] {
        check(&format!("{dtype:?}"), most, |_| dtype);
    }
}

/// Goal: projections that read the same rows may have different types, also dense ones next to
/// quantized ones, as llama.cpp's mixed quantizations have.
#[test]
fn types_may_be_mixed() {
    check("values in Q6_K", 0.03, |name| match name.contains("v_proj") {
        true => TensorType::Q6K,
        false => TensorType::Q4K,
    });
    check("dense keys and gates", 0.03, |name| {
        match name.contains("k_proj") || name.contains("gate_proj") {
            true => TensorType::F16,
            false => TensorType::Q8_0,
        }
    });
}

/// Goal: in a batch with adapters, rows of the model itself keep their bits also if an activation
/// is rounded to the compute type between a dense and a quantized matrix.
#[test]
fn adapters_do_not_change_the_rounding_of_other_rows() {
    let dtype = |name: &str| match name.contains("down_proj") {
        true => TensorType::Q8_0,
        false => TensorType::F16,
    };
    let options = CandleOptions { compute_type: Some(ComputeType::F16), ..fixture::options(16) };
    let open = || Box::new(fixture::backend(model(dtype), options)) as Box<dyn Backend>;
    adapters::check_mixed_batch("mixed types", &wide_rows(), &open);
}

/// Goal: checkpoints in formats that candle does not have are computed from the dequantized values,
/// as transformers computes them.
#[test]
fn formats_that_candle_lacks_are_widened() {
    // FP8 is rounded to bf16 when the model is read.
    for (name, most) in [
        ("quantized/awq", 2e-3),
        ("quantized/gptq8", 2e-3),
        ("quantized/int4", 2e-3),
        ("quantized/fp8_block", 0.01),
    ] {
        let (prompt, expected) = fixture::prompt_and_logits(name);
        let mut backend = fixture::backend(fixture::model(name), CandleOptions::default());
        let rows = run::rows(&mut backend, &prompt, 0, 1000, &run::table(0, prompt.len(), 32));
        let distance = error(&rows.concat(), &expected);
        println!("{name}: error {distance}");
        assert!(distance < most, "{name}: error {distance}");
    }
}
