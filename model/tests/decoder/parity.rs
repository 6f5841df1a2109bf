//! Compares logits and greedy tokens with Hugging Face transformers.

use serde_json::{Value, json};
use stolon_kernels::Path;
use stolon_model::{LoadOptions, LoadedModel, ModelSource, load};

use super::fixture::{self, Setup};
use super::run;

fn deviation(values: &[f32]) -> f32 {
    let count = values.len() as f32;
    let mean = values.iter().sum::<f32>() / count;
    (values.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / count).sqrt()
}

/// Checks one fixture on every instruction set of this machine.
fn check(name: &str) {
    let expected = fixture::expected(name);
    for path in Path::supported() {
        let setup = Setup { path: Some(path), ..Setup::default() };
        let mut backend = fixture::backend(fixture::model(name), setup);
        let table = run::table(5, expected.prompt.len(), 16);
        let rows = run::rows(&mut backend, &expected.prompt, 0, usize::MAX / 2, &table);
        assert_eq!(rows.len(), expected.prompt.len());
        for (&row, logits) in expected.rows.iter().zip(&expected.logits) {
            let difference =
                rows[row].iter().zip(logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let share = difference / deviation(logits);
            assert!(share < 1e-3, "{name}, {path:?}, row {row}: {share} standard deviations");
        }
        let greedy = run::greedy(&mut backend, &expected.prompt, expected.greedy.len());
        assert_eq!(greedy, expected.greedy, "{name}, {path:?}");
    }
}

/// Goal: the results match with biases on all projections, grouped heads and an untied output
/// matrix.
#[test]
fn llama_matches_transformers() {
    check("llama");
}

/// Goal: the results match with Llama 3's rope scaling, one KV head and a tied output matrix.
#[test]
fn llama3_matches_transformers() {
    check("llama3");
}

/// Goal: the results match with a sliding window that is shorter than the prompt.
#[test]
fn mistral_matches_transformers() {
    check("mistral");
}

/// Goal: the results match with biases on q, k and v only, and with linear rope scaling.
#[test]
fn qwen2_matches_transformers() {
    check("qwen2");
}

/// Goal: the results match with norms of q and k, and heads wider than `hidden_size / num_heads`.
#[test]
fn qwen3_matches_transformers() {
    check("qwen3");
}

/// Goal: the results match with YaRN beyond the context of the original training.
#[test]
fn yarn_matches_transformers() {
    check("yarn");
}

/// Goal: the results match with factors of embeddings, scores, residuals and logits.
#[test]
fn granite_matches_transformers() {
    check("granite");
}

/// Goal: the results match with norms of the outputs only, and of all heads of q and k together.
#[test]
fn olmo2_matches_transformers() {
    check("olmo2");
}

/// Goal: the results match with a layer without a rotary embedding.
#[test]
fn smollm3_matches_transformers() {
    check("smollm3");
}

/// Goal: the results match with fused projections, rotated parts of heads, LongRoPE and a sliding
/// window.
#[test]
fn phi3_matches_transformers() {
    check("phi3");
}

/// Goal: the results match with soft-capped scores and logits, and alternating windows.
#[test]
fn gemma2_matches_transformers() {
    check("gemma2");
}

/// Goal: the results match with four norms per layer, local and global layers with different rotary
/// embeddings, and scaled embeddings and attention.
#[test]
fn gemma3_matches_transformers() {
    check("gemma3");
}

/// Goal: the results match with experts in all layers and a sliding window.
#[test]
fn mixtral_matches_transformers() {
    check("mixtral");
}

/// Goal: the results match with a shared expert, weights that do not add up to 1, and experts in
/// some layers only.
#[test]
fn qwen2_moe_matches_transformers() {
    check("qwen2_moe");
}

/// Goal: the results match with many narrow experts, and norms of q and k.
#[test]
fn qwen3_moe_matches_transformers() {
    check("qwen3_moe");
}

/// Goal: the results match with attention sinks, clamped gates, biases of router and experts, YaRN,
/// and a window in every other layer.
#[test]
fn gpt_oss_matches_transformers() {
    check("gpt_oss");
}

/// The model of the fixture `gpt_oss` with experts in MXFP4, as in the published checkpoints.
fn gpt_oss_in_mxfp4() -> LoadedModel {
    let fixture = fixture::directory("gpt_oss");
    let dir = tempfile::tempdir().expect("a directory");
    for file in ["rest.safetensors", "mxfp4.safetensors"] {
        std::fs::copy(fixture.join(file), dir.path().join(file)).expect("a copy");
    }
    let read = |name: &str| -> Value {
        let text = std::fs::read(fixture.join(name)).expect("a file of the fixture");
        serde_json::from_slice(&text).expect("JSON")
    };
    let mut config = read("config.json");
    config["quantization_config"] = json!({ "quant_method": "mxfp4" });
    let mut index = read("model.safetensors.index.json");
    let files = index["weight_map"].as_object_mut().expect("an object");
    for name in files.keys().cloned().collect::<Vec<_>>() {
        if files[&name] == "experts.safetensors" {
            files.remove(&name);
            for part in ["blocks", "scales"] {
                files.insert(format!("{name}_{part}"), "mxfp4.safetensors".into());
            }
        }
    }
    for (name, value) in [("config.json", config), ("model.safetensors.index.json", index)] {
        std::fs::write(dir.path().join(name), value.to_string()).expect("a file");
    }
    let source = ModelSource::Directory(dir.path().to_owned());
    load(&source, &LoadOptions::default()).expect("a valid model")
}

/// Goal: experts in MXFP4 have the same values as the experts in floats, which MXFP4 can represent,
/// and the model can be computed.
#[test]
fn mxfp4_experts_equal_experts_in_floats() {
    let (floats, packed) = (fixture::model("gpt_oss"), gpt_oss_in_mxfp4());
    assert_eq!(floats.config, packed.config);
    for spec in floats.config.tensors() {
        let [floats, packed] = [&floats, &packed].map(|model| {
            let tensor = model.weights.tensor(&spec.name, &spec.shape).expect("a tensor");
            let mut values = vec![0.0; spec.shape.iter().product()];
            stolon_kernels::widen(tensor.dtype, &tensor.bytes, &mut values);
            values
        });
        assert_eq!(floats, packed, "{}", spec.name);
    }
    let name = "model.layers.1.mlp.experts.3.up_proj.weight";
    let dtype = packed.weights.tensor(name, &[32, 64]).expect("a tensor").dtype;
    assert_eq!(dtype.name(), "MXFP4");
    let mut backend = fixture::backend(packed, Setup::default());
    let rows = run::rows(&mut backend, &[5, 6, 7], 0, 3, &run::table(0, 3, 16));
    assert!(rows.iter().flatten().all(|logit| logit.is_finite()));
}
