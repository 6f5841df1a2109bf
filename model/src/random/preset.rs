//! Presets: the shapes of models with random weights.

use serde_json::Value;

use crate::config::DecoderConfig;
use crate::error::ModelError;

/// The names of all presets of [`ModelSource::Random`](crate::ModelSource::Random), smallest first:
/// `tiny` (about 0.1 M parameters, f32), `hybrid-tiny` (the same with recurrent layers, in the shape
/// of Qwen3.5), `20m`, `100m` (Llama shapes, bf16), `474m` (Qwen3 0.6B
/// with a vocabulary of 32,768), `moe-1b` (a mixture of experts in the shape of Qwen3-MoE: 1.3 B
/// parameters, of which a token uses 0.26 B), and the shapes of published models (bf16).
pub const PRESETS: [&str; 17] = [
    "tiny",
    "hybrid-tiny",
    "20m",
    "100m",
    "474m",
    "moe-1b",
    "lfm2-350m",
    "qwen2.5-0.5b",
    "qwen3-0.6b",
    "qwen3.5-0.8b",
    "gemma3-1b",
    "lfm2-1.2b",
    "llama3.2-1b",
    "gemma2-2b",
    "smollm3-3b",
    "phi4-mini",
    "mistral-7b",
];

/// The configuration of the preset `name`.
///
/// # Errors
/// [`ModelError::InvalidOption`] if there is no preset with this name.
pub fn preset(name: &str) -> Result<DecoderConfig, ModelError> {
    let value = preset_json(name).ok_or_else(|| ModelError::InvalidOption {
        name: "random model".into(),
        expected: format!("one of {}", PRESETS.join(", ")),
        got: format!("`{name}`"),
    })?;
    DecoderConfig::from_json(&format!("random:{name}"), &value)
}

/// The preset in the format of a `config.json`.
fn preset_json(name: &str) -> Option<Value> {
    let presets: Value = serde_json::from_str(include_str!("presets.json")).ok()?;
    presets.get(name).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the file has exactly the presets of the list, and all are valid.
    #[test]
    fn every_preset_is_valid() {
        let presets: Value = serde_json::from_str(include_str!("presets.json")).unwrap();
        assert_eq!(presets.as_object().unwrap().len(), PRESETS.len());
        for name in PRESETS {
            preset(name).unwrap();
        }
    }
}
