//! Loads the models of `tests/fixtures` and the logits that transformers computes for them.

use std::path::PathBuf;

use safetensors::SafeTensors;
use stolon_kernels::Path;
use stolon_model::{
    CpuBackend, CpuOptions, KvBudget, KvType, LoadOptions, LoadedModel, ModelSource, WeightType,
    load,
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
    [env!("CARGO_MANIFEST_DIR"), "tests", "fixtures", name].iter().collect()
}

/// Loads the model of the fixture `name`.
pub(super) fn model(name: &str) -> LoadedModel {
    load(&ModelSource::Directory(directory(name)), &LoadOptions::default()).expect("a valid model")
}

/// The content of a file of the fixture `name`.
pub(super) fn file(name: &str, file: &str) -> Vec<u8> {
    std::fs::read(directory(name).join(file)).expect("a fixture")
}

fn integers(file: &SafeTensors<'_>, key: &str) -> Vec<u32> {
    let data = file.tensor(key).expect("a tensor of the script").data().chunks_exact(8);
    data.map(|b| i64::from_le_bytes(b.try_into().expect("8 bytes")) as u32).collect()
}

fn logits(file: &SafeTensors<'_>) -> Vec<f32> {
    let data = file.tensor("logits").expect("a tensor of the script").data().chunks_exact(4);
    data.map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes"))).collect()
}

/// Reads the expected results of the fixture `name`.
pub(super) fn expected(name: &str) -> Expected {
    let bytes = file(name, "expected.safetensors");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let width = file.tensor("logits").expect("a tensor of the script").shape()[1];
    Expected {
        prompt: integers(&file, "prompt"),
        rows: integers(&file, "rows").into_iter().map(|row| row as usize).collect(),
        logits: logits(&file).chunks_exact(width).map(<[f32]>::to_vec).collect(),
        greedy: integers(&file, "greedy"),
    }
}

/// Reads the prompt of the fixture `name`, and the logits of all of its positions in one list.
pub(super) fn prompt_and_logits(name: &str) -> (Vec<u32>, Vec<f32>) {
    let bytes = file(name, "expected.safetensors");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    (integers(&file, "prompt"), logits(&file))
}

/// The options of a test's backend.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setup {
    pub(super) block_size: usize,
    pub(super) threads: usize,
    pub(super) kv_type: KvType,
    pub(super) path: Option<Path>,
    pub(super) weight_type: WeightType,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            block_size: 16,
            threads: 1,
            kv_type: KvType::F32,
            path: None,
            weight_type: WeightType::Stored,
        }
    }
}

/// Creates a backend of `model` with a KV store of at least 1,024 positions.
pub(super) fn backend(model: LoadedModel, setup: Setup) -> CpuBackend {
    let options = CpuOptions {
        block_size: setup.block_size,
        kv_budget: KvBudget::Blocks(1024 / setup.block_size + 16),
        kv_type: Some(setup.kv_type),
        threads: Some(setup.threads),
        path: setup.path,
        weight_type: setup.weight_type,
        ..CpuOptions::default()
    };
    CpuBackend::new(model.config, model.weights, options).expect("a valid model")
}
