//! Safetensors files in quantized formats: the weights and logits are those that a script has
//! computed from the codes, scales and zero points before it packed them.

use safetensors::SafeTensors;
use stolon_checkpoint::{LoadedModel, TensorType, Weights};

use super::fixture::{self, Setup};
use crate::suite::run;

const FORMATS: [&str; 12] = [
    "fp8_block",
    "fp8_channel",
    "fp8_tensor",
    "awq",
    "awq_fused",
    "gptq4",
    "gptq4_rows",
    "gptq4_act_order",
    "gptq8",
    "int8",
    "int4",
    "int4_zero_points",
];

fn model(format: &str) -> LoadedModel {
    fixture::model(&format!("quantized/{format}"))
}

/// The rows of a matrix as floats.
fn floats(weights: &Weights, name: &str) -> Vec<f32> {
    let shape = weights.shape(name).expect("a matrix");
    let tensor = weights.tensor(name, shape).expect("a matrix");
    let mut values = vec![0.0; shape.iter().product()];
    stolon_kernels::widen(tensor.dtype, &tensor.bytes, &mut values);
    values
}

/// Goal: formats stay quantized in memory where a type of the kernels is exact, and only there.
#[test]
fn matrices_stay_quantized_where_that_is_exact() {
    use TensorType::{Bf16, F16, I8Group32, U4Group32, U4Group128};
    // `q_proj` has 64 columns, `down_proj` 128.
    for (format, q, down) in [
        ("fp8_block", Bf16, Bf16),
        ("fp8_channel", Bf16, Bf16),
        ("awq", U4Group32, U4Group32),
        ("awq_fused", U4Group32, U4Group32),
        ("gptq4", U4Group32, U4Group32),
        ("gptq4_rows", U4Group32, U4Group128),
        ("gptq4_act_order", F16, F16),
        ("gptq8", I8Group32, I8Group32),
        ("int8", I8Group32, I8Group32),
        ("int4_zero_points", U4Group32, U4Group32),
    ] {
        let weights = model(format).weights;
        for (module, dtype) in [("self_attn.q_proj", q), ("mlp.down_proj", down)] {
            let name = format!("model.layers.0.{module}.weight");
            let shape = weights.shape(&name).expect("a matrix");
            assert_eq!(weights.tensor(&name, shape).expect("a matrix").dtype, dtype, "{format}");
        }
    }
}

/// The relative error of a type that the format does not fit in exactly.
fn rounding(dtype: TensorType) -> f64 {
    match dtype {
        TensorType::Bf16 => 2_f64.powi(-9),
        TensorType::F16 => 2_f64.powi(-12),
        _ => 2_f64.powi(-22),
    }
}

/// Goal: each dequantized matrix has the products with three vectors that the script has computed.
/// A wrong order, scale or zero point would be far off.
#[test]
fn matrices_are_those_of_the_script() {
    for format in FORMATS {
        let loaded = model(format);
        let bytes = fixture::file(&format!("quantized/{format}"), "expected.safetensors");
        let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let mut matrices = 0;
        for (name, expected) in file.tensors() {
            let Some(module) = name.strip_prefix("products.") else { continue };
            let name = format!("{module}.weight");
            let [rows, columns] = *loaded.weights.shape(&name).expect("a matrix") else {
                panic!("two dimensions")
            };
            let dtype = loaded.weights.tensor(&name, &[rows, columns]).expect("a matrix").dtype;
            let values = floats(&loaded.weights, &name);
            let products = expected.data().chunks_exact(8);
            let products = products.map(|b| f64::from_le_bytes(b.try_into().expect("8 bytes")));
            for (index, expected) in products.enumerate() {
                let (row, vector) = (index / 3, index % 3);
                let (mut sum, mut size) = (0.0, 0.0);
                for (column, value) in values[row * columns..][..columns].iter().enumerate() {
                    let factor = ((7919 * column + 104_729 * vector) % 17) as f64 - 8.0;
                    sum += f64::from(*value) * factor;
                    size += (f64::from(*value) * factor).abs();
                }
                let allowed = size * rounding(dtype);
                assert!(
                    (sum - expected).abs() <= allowed,
                    "{format} {name} row {row}: {sum}, {expected}"
                );
            }
            matrices += 1;
        }
        assert_eq!(matrices, 7, "{format}");
    }
}

/// The logits of the prompt.
fn logits(model: LoadedModel, prompt: &[u32]) -> Vec<f32> {
    let mut backend = fixture::backend(model, Setup::default());
    let table = run::table(5, prompt.len(), 16);
    run::rows(&mut backend, prompt, 0, usize::MAX / 2, &table).concat()
}

/// The same model with its matrices as F32.
fn dense(mut model: LoadedModel) -> LoadedModel {
    let specs = model.config.tensors();
    let tensors = specs.iter().map(|spec| stolon_checkpoint::Tensor {
        name: spec.name.clone(),
        dtype: TensorType::F32,
        shape: spec.shape.clone(),
        bytes: floats(&model.weights, &spec.name).iter().flat_map(|v| v.to_le_bytes()).collect(),
    });
    let tensors: Vec<_> = tensors.collect();
    model.weights = Weights::from_tensors("dense", tensors).expect("unique names");
    model
}

/// Goal: the logits are close to those that transformers computes from the dequantized weights, and
/// to those of the same weights as F32.
#[test]
fn logits_are_those_of_the_dequantized_model() {
    for format in FORMATS {
        let (prompt, expected) = fixture::prompt_and_logits(&format!("quantized/{format}"));
        let got = logits(model(format), &prompt);
        let dense = logits(dense(model(format)), &prompt);
        let deviation = deviation(&expected);
        let largest = |other: &[f32]| {
            assert_eq!(got.len(), other.len());
            let differences = got.iter().zip(other).map(|(a, b)| (a - b).abs());
            differences.fold(0.0, f32::max) / deviation
        };
        // Activations are rounded to int8 where weights stay quantized, and to bf16 with bf16. Both
        // weigh more in such a small model than in a large one.
        let allowed = match format {
            "gptq4_act_order" => 0.005,
            _ if format.starts_with("fp8") => 0.03,
            _ => 0.08,
        };
        assert!(largest(&expected) < allowed, "{format}");
        assert!(largest(&dense) < allowed, "{format}");
    }
}

fn deviation(values: &[f32]) -> f32 {
    let mean = values.iter().sum::<f32>() / values.len() as f32;
    (values.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / values.len() as f32).sqrt()
}
