//! Loads the models of `model/tests/fixtures` and the logits that transformers computes for them.

use std::path::PathBuf;

use safetensors::SafeTensors;
use stolon_cuda::{CandleBackend, CandleOptions};
use stolon_model::{
    CpuBackend, CpuOptions, KvBudget, KvType, LoadOptions, LoadedModel, ModelSource, load,
};

/// The names of all fixtures. There is at least one per architecture.
pub(super) const NAMES: [&str; 16] = [
    "llama",
    "llama3",
    "mistral",
    "qwen2",
    "yarn",
    "qwen3",
    "granite",
    "olmo2",
    "smollm3",
    "phi3",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
];

/// The results of transformers for a model.
pub(super) struct Expected {
    /// Token ids of the prompt.
    pub(super) prompt: Vec<u32>,
    /// The positions of the prompt whose logits are known.
    pub(super) rows: Vec<usize>,
    /// `[rows, vocab_size]`: the logits at the positions `rows`.
    pub(super) logits: Vec<Vec<f32>>,
    /// Token ids of the greedy continuation.
    pub(super) greedy: Vec<u32>,
}

/// The directory of the fixture `name`.
pub(super) fn directory(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", "model", "tests", "fixtures", name].iter().collect()
}

/// Loads the model of the fixture `name`.
pub(super) fn model(name: &str) -> LoadedModel {
    load(&ModelSource::Directory(directory(name)), &LoadOptions::default()).expect("a valid model")
}

/// Reads the expected results of the fixture `name`.
pub(super) fn expected(name: &str) -> Expected {
    let bytes = std::fs::read(directory(name).join("expected.safetensors")).expect("a fixture");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let integers = |key: &str| -> Vec<u32> {
        let data = file.tensor(key).expect("a tensor of the script").data().as_chunks().0;
        data.iter().map(|bytes| i64::from_le_bytes(*bytes) as u32).collect()
    };
    let logits = file.tensor("logits").expect("a tensor of the script");
    let values: Vec<f32> =
        logits.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    Expected {
        prompt: integers("prompt"),
        rows: integers("rows").into_iter().map(|row| row as usize).collect(),
        logits: values.chunks_exact(logits.shape()[1]).map(<[f32]>::to_vec).collect(),
        greedy: integers("greedy"),
    }
}

/// Options with a KV store of at least 1,024 positions.
pub(super) fn options(block_size: usize) -> CandleOptions {
    let kv_budget = KvBudget::Blocks(1024 / block_size + 16);
    CandleOptions { block_size, kv_budget, ..CandleOptions::default() }
}

/// A backend of `model` on `Device::Cpu`.
pub(super) fn backend(model: LoadedModel, options: CandleOptions) -> CandleBackend {
    CandleBackend::open(model.config, model.weights, options).expect("a valid model")
}

/// The CPU backend of `model` with exact keys and values.
pub(super) fn cpu_backend(model: LoadedModel) -> CpuBackend {
    let options = CpuOptions {
        kv_budget: KvBudget::Blocks(80),
        kv_type: Some(KvType::F32),
        threads: Some(1),
        ..CpuOptions::default()
    };
    CpuBackend::new(model.config, model.weights, options).expect("a valid model")
}

/// Maximum difference of the elements of two rows, in standard deviations of `expected`.
pub(super) fn difference(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    let count = expected.len() as f32;
    let mean = expected.iter().sum::<f32>() / count;
    let variance = expected.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / count;
    let differences = got.iter().zip(expected).map(|(a, b)| (a - b).abs());
    // A NaN must not be lost in the maximum.
    let largest = differences.fold(0.0, |largest, d| if d <= largest { largest } else { d });
    largest / variance.sqrt()
}

/// The prompt of a fixture whose expected logits are those of all positions.
pub(super) fn prompt(name: &str) -> Vec<u32> {
    let bytes = std::fs::read(directory(name).join("expected.safetensors")).expect("a fixture");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let data = file.tensor("prompt").expect("a tensor of the script").data().as_chunks().0;
    data.iter().map(|bytes| i64::from_le_bytes(*bytes) as u32).collect()
}

/// The logits of all positions of the prompt of a fixture, in one list.
pub(super) fn expected_logits(name: &str) -> Vec<f32> {
    let bytes = std::fs::read(directory(name).join("expected.safetensors")).expect("a fixture");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let data = file.tensor("logits").expect("a tensor of the script").data().as_chunks().0;
    data.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}
