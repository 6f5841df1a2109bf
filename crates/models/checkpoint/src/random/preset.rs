//! Presets: the shapes of models with random weights.

use serde_json::Value;

use crate::config::{DecoderConfig, Keys};
use crate::error::ModelError;
use crate::load::images::{self, ImageModel};
use crate::load::skills::{self, SkillPrompts};

/// The names of all presets of [`ModelSource::Random`](crate::ModelSource::Random), smallest first:
/// `tiny` (about 0.1 M parameters, f32), `hybrid-tiny` (the same with recurrent layers, in the
/// shape of Qwen3.5), `smolvlm-tiny`, `moondream2-tiny`, `moondream3-tiny`, `qwen3-vl-tiny` and
/// `qwen3.5-vl-tiny` (the same with an image encoder, in the shapes of SmolVLM, Moondream 2 and 3,
/// Qwen3-VL and Qwen3.5), `20m`, `100m` (Llama shapes, bf16), `474m` (Qwen3 0.6B with a vocabulary
/// of 32,768), `mla-519m` (the same with the latent attention of DeepSeek-V2-Lite), `kda-546m` (the
/// same with Kimi Delta Attention in three of four layers), `moe-1b` (a mixture of experts in the
/// shape of Qwen3-MoE: 1.3 B parameters, of which a token uses 0.26 B), and the shapes of published
/// models (bf16).
pub const PRESETS: [&str; 27] = [
    "tiny",
    "hybrid-tiny",
    "smolvlm-tiny",
    "moondream2-tiny",
    "moondream3-tiny",
    "qwen3-vl-tiny",
    "qwen3.5-vl-tiny",
    "20m",
    "100m",
    "474m",
    "mla-519m",
    "kda-546m",
    "moe-1b",
    "smolvlm-256m",
    "lfm2-350m",
    "qwen2.5-0.5b",
    "qwen3-0.6b",
    "qwen3.5-0.8b",
    "gemma3-1b",
    "lfm2-1.2b",
    "llama3.2-1b",
    "moondream2",
    "qwen3-vl-2b",
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
    with_images(name).map(|preset| preset.decoder)
}

/// The configurations of a preset.
#[derive(Debug)]
pub(super) struct Preset {
    pub(super) decoder: DecoderConfig,
    /// How the model reads images, if it does.
    pub(super) images: Option<ImageModel>,
    /// The prompts of its skills, if it has any.
    pub(super) skills: Option<SkillPrompts>,
}

/// The preset `name`.
///
/// # Errors
/// The errors of [`preset`].
pub(super) fn with_images(name: &str) -> Result<Preset, ModelError> {
    let value =
        preset_json(name).ok_or_else(|| ModelError::not_one_of("random model", &PRESETS, name))?;
    let file = format!("random:{name}");
    let decoder = DecoderConfig::from_json(&file, &value)?;
    let images = match value.get("processor") {
        Some(processor) => images::of_json((&file, &value), (&file, processor), &decoder)?,
        None => None,
    };
    let skills = skills::of_config(&Keys::root(&file, &value)?, &decoder)?;
    Ok(Preset { decoder, images, skills })
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
