//! The image encoder of a GGUF model, which llama.cpp's converter writes to a file of its own
//! (`mmproj`).

use std::path::Path;

use serde_json::Value;
use stolon_text::{TextSource, TokenizerSource};

use stolon_vision::{Gemma3Tiles, Idefics3Tiles, ProcessorConfig, Qwen3VlTiles};

use super::images::{ImageModel, gemma3, idefics3, qwen3_vl};
use super::model::LoadedModel;
use crate::config::gguf::{self, EncoderKind};
use crate::config::{DecoderConfig, TowerConfig, VisionConfig};
use crate::error::ModelError;
use crate::gguf::{Header, split};
use crate::weights::Weights;

/// Default minimum and maximum number of pixels of a picture for Qwen3-VL.
const PIXELS: [usize; 2] = [1 << 16, 1 << 24];

/// Adds the encoder in the file `path` to a model.
///
/// # Errors
/// The errors of [`check`] and [`read`].
pub(super) fn add(model: &mut LoadedModel, path: &Path) -> Result<(), ModelError> {
    let kind = check(&model.config, model.images.is_some())?;
    model.images = Some(read(path, kind, &model.config, &mut model.weights, &model.text)?);
    Ok(())
}

/// Checks that a model can use an encoder from another file, and returns the kind of encoder.
///
/// # Errors
/// [`ModelError::InvalidOption`] if it cannot use an encoder, or already has one.
pub(crate) fn check(config: &DecoderConfig, has_encoder: bool) -> Result<EncoderKind, ModelError> {
    let Some(kind) = EncoderKind::of(config.architecture) else {
        let got = format!("a model with the architecture {}", config.architecture.name());
        let expected = "a model with the architecture gemma3, llama, qwen3_vl or qwen3_5";
        return Err(ModelError::option("mmproj", expected, got));
    };
    match has_encoder {
        true => {
            let got = "a model whose files have an encoder";
            Err(ModelError::option("mmproj", "a GGUF model", got))
        }
        false => Ok(kind),
    }
}

/// Reads the encoder in the file `path`. `kind` is the result of [`check`] for the model. The
/// tensors are added to `weights`.
///
/// # Errors
/// [`ModelError`] with the key or tensor of the file that is missing or wrong.
pub(crate) fn read(
    path: &Path,
    kind: EncoderKind,
    config: &DecoderConfig,
    weights: &mut Weights,
    text: &TextSource,
) -> Result<ImageModel, ModelError> {
    let (header, contents) = split::open(path)?;
    let encoder = gguf::encoder(&header, kind, config)?;
    let name = |name: &str| gguf::encoder_tensor_name(&header, &encoder, name);
    weights.add_gguf(&header, contents, |_| 0, name)?;
    if kind == EncoderKind::Qwen3Vl {
        qwen3_vl::check_decoder(&header.file, &encoder, config)?;
        let patches = encoder.tensors().swap_remove(0);
        weights.add_up(&patches, &format!("{}.1", patches.name))?;
        weights.split_thirds("model.vision_tower.encoder.layers.")?;
    }
    weights.check_encoder(&encoder)?;
    weights.check_disjoint()?;
    let processor = processor(kind, &header, &encoder, text)?;
    Ok(ImageModel { encoder, processor })
}

/// How pictures are prepared. Values that are missing from the file are the same as in the
/// published processors.
fn processor(
    kind: EncoderKind,
    header: &Header,
    encoder: &VisionConfig,
    text: &TextSource,
) -> Result<ProcessorConfig, ModelError> {
    let token = |token: &str| {
        let expected = format!("a tokenizer with the token {token}");
        token_id(text, token).ok_or_else(|| ModelError::option("mmproj", &expected, "none"))
    };
    let edge = encoder.tower.image_size;
    let rows = || {
        let size =
            |expected| ModelError::key(&header.file, "clip.vision.image_size", expected, edge);
        encoder.rows_of([edge, edge]).map_err(size)
    };
    Ok(match kind {
        EncoderKind::Gemma3 => {
            let tiles = Gemma3Tiles { tile_edge: edge, tile_rows: rows()?, pan_and_scan: None };
            gemma3::describe(token(gemma3::IMAGE_TOKEN)?, tiles)
        }
        EncoderKind::Idefics3 => {
            let largest = gguf::largest_edge(header)?.unwrap_or(4 * edge);
            let tiles = Idefics3Tiles {
                longest_edge: Some(largest.min(idefics3::EDGE_MAX)),
                tile_edge: edge,
                splits: true,
                tile_rows: rows()?,
            };
            idefics3::describe(token(idefics3::IMAGE_TOKEN)?, tiles)
        }
        EncoderKind::Qwen3Vl => {
            qwen3_vl::describe(token(qwen3_vl::IMAGE_TOKEN)?, squares(header, encoder)?)
        }
    })
}

/// The sizes of pictures for Qwen3-VL.
fn squares(header: &Header, encoder: &VisionConfig) -> Result<Qwen3VlTiles, ModelError> {
    let [min, max] = gguf::pixels(header)?;
    let TowerConfig { patch_size, .. } = encoder.tower;
    let square_edge = patch_size * encoder.projector.factor();
    let pixels_max = max.unwrap_or(PIXELS[1]).max(square_edge * square_edge);
    let pixels_min = min.unwrap_or(PIXELS[0]).min(pixels_max);
    Ok(qwen3_vl::bounded(square_edge, [pixels_min, pixels_max]))
}

/// The id of a special token, if the tokenizer has it.
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
