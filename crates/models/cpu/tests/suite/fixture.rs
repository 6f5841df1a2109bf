//! Loads the models of `stolon-fixtures` and the logits that transformers computes for them.

#[path = "../../../checkpoint/tests/it/support/difference.rs"]
mod difference;

use std::path::PathBuf;

use safetensors::SafeTensors;
use stolon_checkpoint::{
    DecoderConfig, FeedForwardConfig, LoadOptions, LoadedModel, MixerConfig, ModelSource,
    TensorType, load,
};

pub(crate) use difference::difference;

/// The names of all models that are compared with transformers, at least one per architecture: the
/// directories that `make_fixtures.py` has written.
pub(crate) fn names() -> Vec<String> {
    let entries = std::fs::read_dir(stolon_fixtures::path("")).expect("the fixtures");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let models = paths.filter(|path| path.join("expected.safetensors").exists());
    let name = |path: PathBuf| path.file_name().expect("a name").to_string_lossy().into_owned();
    let mut names: Vec<_> = models.map(name).collect();
    names.sort_unstable();
    names
}

/// The results of transformers for a model.
pub(crate) struct Expected {
    /// Token ids of the prompt.
    pub(crate) prompt: Vec<u32>,
    /// The positions of the prompt whose logits are known.
    pub(crate) rows: Vec<usize>,
    /// `[rows, vocab_size]`: the logits at the positions `rows`.
    pub(crate) logits: Vec<Vec<f32>>,
    /// Token ids of the greedy continuation.
    pub(crate) greedy: Vec<u32>,
}

/// The directory of the fixture `name`.
pub(crate) fn directory(name: &str) -> PathBuf {
    stolon_fixtures::path(name)
}

/// Loads the model of the fixture `name`.
pub(crate) fn model(name: &str) -> LoadedModel {
    load(&ModelSource::Directory(directory(name)), &LoadOptions::default()).expect("a valid model")
}

/// The content of a file of the fixture `name`.
pub(crate) fn file(name: &str, file: &str) -> Vec<u8> {
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
pub(crate) fn expected(name: &str) -> Expected {
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
pub(crate) fn prompt_and_logits(name: &str) -> (Vec<u32>, Vec<f32>) {
    let bytes = file(name, "expected.safetensors");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    (integers(&file, "prompt"), logits(&file))
}

/// The configuration of a model whose row lengths are multiples of 256, the size of a super-block.
pub(crate) fn wide_rows() -> DecoderConfig {
    let mut config = DecoderConfig {
        vocab_size: 300,
        hidden_size: 256,
        dtype: TensorType::F32,
        ..model("qwen3").config
    };
    for layer in &mut config.layers {
        if let Some(FeedForwardConfig::Dense(mlp)) = &mut layer.mlp {
            mlp.width = 512;
        }
        if let [MixerConfig::Attention(attention)] = &mut layer.mixers[..] {
            (attention.heads, attention.kv_heads) = (4, 2);
            (attention.head_dim, attention.rotary_dim, attention.scale) = (64, 64, 0.125);
        }
    }
    config
}

/// The relative error: the root mean square of the difference, divided by that of `expected`.
pub(crate) fn relative_error(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    let differences = got.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
    (differences / expected.iter().map(|value| value.powi(2)).sum::<f32>()).sqrt()
}
