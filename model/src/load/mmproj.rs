//! The image encoder of a GGUF model, which llama.cpp's converter writes to a file of its own
//! (`mmproj`).

use std::path::Path;

use serde_json::Value;
use stolon_text::{TextSource, TokenizerSource};

use super::images::{ImageModel, qwen3_vl};
use super::model::LoadedModel;
use crate::config::{Architecture, DecoderConfig, TowerConfig, gguf};
use crate::error::ModelError;
use crate::gguf::split;
use crate::weights::Weights;

/// The numbers of pixels of the published processor, which files of encoders do not have.
const PIXELS: [usize; 2] = [1 << 16, 1 << 24];

/// Adds the encoder in the file `path` to a model.
///
/// # Errors
/// As for [`check`] and [`read`].
pub(super) fn add(model: &mut LoadedModel, path: &Path) -> Result<(), ModelError> {
    check(&model.config, model.images.is_some())?;
    model.images = Some(read(path, &model.config, &mut model.weights, &model.text)?);
    Ok(())
}

fn refused(expected: &str, got: String) -> ModelError {
    ModelError::InvalidOption { name: "mmproj".into(), expected: expected.to_owned(), got }
}

/// Checks that a model takes an encoder from another file: its decoder has to be that of Qwen3-VL.
///
/// # Errors
/// [`ModelError::InvalidOption`] if it takes no encoder, or has one.
pub(crate) fn check(config: &DecoderConfig, has_encoder: bool) -> Result<(), ModelError> {
    if !matches!(config.architecture, Architecture::Qwen3Vl | Architecture::Qwen3VlMoe) {
        let got = format!("a model with the architecture {}", config.architecture.name());
        return Err(refused("a model with the architecture qwen3_vl or qwen3_vl_moe", got));
    }
    match has_encoder {
        true => Err(refused("a GGUF model", "a model whose files have an encoder".to_owned())),
        false => Ok(()),
    }
}

/// Reads the encoder in the file `path` for a model that [`check`] has accepted. Its tensors are
/// added to `weights`.
///
/// # Errors
/// [`ModelError`] with the key or tensor of the file that is missing or wrong.
pub(crate) fn read(
    path: &Path,
    config: &DecoderConfig,
    weights: &mut Weights,
    text: &TextSource,
) -> Result<ImageModel, ModelError> {
    let (header, contents) = split::open(path)?;
    let encoder = gguf::encoder(&header, config)?;
    weights.add_gguf(&header, contents, |_| 0, |name| gguf::encoder_tensor_name(&encoder, name))?;
    let patches = encoder.tensors().swap_remove(0);
    weights.add_up(&patches, &format!("{}.1", patches.name))?;
    weights.split_thirds("model.vision_tower.encoder.layers.")?;
    weights.check_encoder(&encoder)?;
    weights.check_disjoint()?;
    let Some(image_token_id) = token_id(text, qwen3_vl::IMAGE_TOKEN) else {
        let expected = format!("a tokenizer with the token {}", qwen3_vl::IMAGE_TOKEN);
        return Err(refused(&expected, "none".to_owned()));
    };
    let [min, max] = gguf::pixels(&header)?;
    let TowerConfig { patch_size, .. } = encoder.tower;
    let square_edge = patch_size * encoder.projector.factor();
    let pixels_max = max.unwrap_or(PIXELS[1]).max(square_edge * square_edge);
    let pixels_min = min.unwrap_or(PIXELS[0]).min(pixels_max);
    let tiles = qwen3_vl::bounded(square_edge, [pixels_min, pixels_max]);
    let processor = qwen3_vl::describe(image_token_id, tiles);
    Ok(ImageModel { encoder, processor })
}

/// The id of a special token.
fn token_id(text: &TextSource, token: &str) -> Option<u32> {
    match &text.tokenizer {
        TokenizerSource::Gguf(tokenizer) => {
            let index = tokenizer.tokens.iter().position(|own| own == token)?;
            u32::try_from(index).ok()
        }
        TokenizerSource::Json { bytes, .. } => {
            let json: Value = serde_json::from_slice(bytes).ok()?;
            let added = json.get("added_tokens")?.as_array()?;
            let found = added.iter().find(|added| added["content"] == token)?;
            u32::try_from(found["id"].as_u64()?).ok()
        }
        _ => None,
    }
}
