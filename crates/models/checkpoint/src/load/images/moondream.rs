//! Moondream 2 and 3. Missing keys have the defaults of the published code. There is no
//! configuration of a processor.

use stolon_vision::{MoondreamTiles, ProcessorConfig, Resampling, Tiling};

use super::ImageModel;
use crate::config::{
    Architecture, DecoderConfig, Keys, PatchPositions, ProjectorConfig, RegionConfig, TowerConfig,
    VisionConfig,
};
use crate::error::ModelError;

/// An id that no token has, because the place of an image is known before the prompt is tokenized.
const IMAGE_TOKEN: u32 = u32::MAX;

pub(super) fn parse(config: &Keys<'_>, decoder: &DecoderConfig) -> Result<ImageModel, ModelError> {
    let parts = config.object("config")?;
    let part = |name: &str| match &parts {
        Some(parts) => parts.object(name),
        None => Ok(None),
    };
    let (vision, text, tokenizer) = (part("vision")?, part("text")?, part("tokenizer")?);
    let regions = Some(regions(part("region")?.as_ref(), decoder)?);
    let encoder = encoder(vision.as_ref(), tokenizer.as_ref(), decoder)?;
    let encoder = VisionConfig { regions, ..encoder };
    encoder.check(config.file)?;
    let TowerConfig { image_size: tile_edge, patch_size, .. } = encoder.tower;
    let ProjectorConfig::Tiles { margin, tiles_max, .. } = encoder.projector else {
        unreachable!("`encoder` returns this projector")
    };
    let rows = encoder
        .rows_of([tile_edge, 2 * tile_edge])
        .map_err(|expected| config.invalid("config", &expected))?;
    if let Some(text) = text
        && text.size("prefix_attn")?.is_some_and(|prefix| prefix != rows)
    {
        let expected = format!("{rows}, the positions of an image and of the token before it");
        return Err(text.unsupported("prefix_attn", &expected));
    }
    let tiles = MoondreamTiles { tile_edge, margin: margin * patch_size, tiles_max, rows };
    let processor = ProcessorConfig {
        placeholder: "<image>".to_owned(),
        image_token: "<image>".to_owned(),
        image_token_id: IMAGE_TOKEN,
        resampling: Resampling::Lanczos,
        tiling: Tiling::Moondream(tiles),
    };
    Ok(ImageModel { encoder, processor })
}

/// The configuration of coordinates and sizes as tokens.
fn regions(region: Option<&Keys<'_>>, decoder: &DecoderConfig) -> Result<RegionConfig, ModelError> {
    let size = |key: &str, default: usize| match region {
        Some(region) => region.size(key).map(|given| given.unwrap_or(default)),
        None => Ok(default),
    };
    if let Some(region) = region
        && region.size("dim")?.is_some_and(|dim| dim != decoder.hidden_size)
    {
        let expected = format!("{} (text.dim)", decoder.hidden_size);
        return Err(region.invalid("dim", &expected));
    }
    let is_linear = is_linear(region, decoder)?;
    Ok(RegionConfig {
        coordinate_bins: size("coord_out_dim", 1024)?,
        size_bins: size("size_out_dim", 2048)? / 2,
        coordinate_features: size("coord_feat_dim", 256)?,
        size_features: size("size_feat_dim", 512)?,
        inner_size: if is_linear { None } else { Some(size("inner_dim", 8192)?) },
    })
}

/// Whether projections of the normalized residual stream compute the bins (Moondream 3), instead of
/// MLPs.
fn is_linear(region: Option<&Keys<'_>>, decoder: &DecoderConfig) -> Result<bool, ModelError> {
    let default = decoder.architecture == Architecture::Moondream3;
    let Some(region) = region else { return Ok(default) };
    let is_linear = match region.text("decoder_arch")? {
        Some("linear") => true,
        Some("mlp") => false,
        Some(_) => return Err(region.unsupported("decoder_arch", "linear or mlp")),
        None => default,
    };
    match region.flag("use_ln")?.unwrap_or(is_linear) == is_linear {
        true => Ok(is_linear),
        false => Err(region.unsupported("use_ln", "true with linear decoders, false with MLPs")),
    }
}

fn encoder(
    vision: Option<&Keys<'_>>,
    tokenizer: Option<&Keys<'_>>,
    decoder: &DecoderConfig,
) -> Result<VisionConfig, ModelError> {
    let size = |key: &str, default: usize| match vision {
        Some(vision) => vision.size(key).map(|given| given.unwrap_or(default)),
        None => Ok(default),
    };
    let tower = TowerConfig {
        prefix: "model.vision.".to_owned(),
        hidden_size: size("enc_dim", 1152)?,
        intermediate_size: size("enc_ff_dim", 4304)?,
        layers: size("enc_n_layers", 27)?,
        heads: size("enc_n_heads", 16)?,
        patch_size: size("enc_patch_size", 14)?,
        frames: 1,
        image_size: size("crop_size", 378)?,
        positions: PatchPositions::Nearest,
        norm_eps: 1e-5,
    };
    if let Some(vision) = vision {
        // The published code uses the number of layers as the number of patches along an edge.
        let layers = tower.layers;
        if !tower.image_size.is_multiple_of(tower.patch_size) || tower.grid() != layers {
            let expected = format!("{layers} patches, as many as layers");
            return Err(vision.unsupported("crop_size", &expected));
        }
        if vision.size("in_channels")?.is_some_and(|channels| channels != 3) {
            return Err(vision.unsupported("in_channels", "3"));
        }
        if vision.size("proj_out_dim")?.is_some_and(|width| width != decoder.hidden_size) {
            let expected = format!("{} (text.dim)", decoder.hidden_size);
            return Err(vision.invalid("proj_out_dim", &expected));
        }
    }
    let first = match tokenizer {
        Some(tokenizer) => tokenizer.token_ids("bos_id")?,
        None => None,
    };
    let first = first.and_then(|ids| ids.first().copied()).unwrap_or(0);
    if let (Some(tokenizer), true) = (tokenizer, first as usize >= decoder.vocab_size) {
        let expected = format!("an id below vocab_size, {}", decoder.vocab_size);
        return Err(tokenizer.invalid("bos_id", &expected));
    }
    let margin = match vision {
        Some(vision) => vision.count("overlap_margin")?.unwrap_or(4),
        None => 4,
    };
    Ok(VisionConfig {
        tower,
        projector: ProjectorConfig::Tiles {
            margin,
            tiles_max: size("max_crops", 12)?,
            inner_size: size("proj_inner_dim", 8192)?,
        },
        output_size: decoder.hidden_size,
        mean: [0.5; 3],
        deviation: [0.5; 3],
        first_token: Some(first),
        regions: None,
    })
}
