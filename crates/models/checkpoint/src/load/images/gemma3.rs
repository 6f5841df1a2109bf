//! Gemma 3. Missing keys have the defaults of transformers.

use stolon_vision::{Gemma3Tiles, PanAndScan, ProcessorConfig, Resampling, Tiling};

use super::{ImageModel, Sources};
use crate::config::{PatchPositions, ProjectorConfig, TowerConfig, VisionConfig};
use crate::error::ModelError;

pub(super) fn parse(sources: &Sources<'_>) -> Result<ImageModel, ModelError> {
    let Sources { config, processor, decoder, .. } = sources;
    sources.refuse_activations()?;
    let (mean, deviation) = sources.normalization()?;
    let tower = sources.tower(TowerConfig {
        prefix: "model.vision_tower.".to_owned(),
        hidden_size: 768,
        intermediate_size: 3072,
        layers: 12,
        heads: 12,
        patch_size: 16,
        frames: 1,
        image_size: 224,
        positions: PatchPositions::Nearest,
        norm_eps: 1e-6,
    })?;
    // The embeddings of an image form a square.
    let rows = config.size("mm_tokens_per_image")?.unwrap_or(256);
    let side = rows.isqrt();
    let grid = tower.image_size / tower.patch_size.max(1);
    if side * side != rows || !grid.is_multiple_of(side) || grid == 0 {
        let expected = format!("the square of a divisor of {grid} patches");
        return Err(config.invalid("mm_tokens_per_image", &expected));
    }
    let projector = ProjectorConfig::AveragePooling { factor: grid / side, norm_offset: 1.0 };
    let encoder = VisionConfig {
        tower,
        projector,
        output_size: decoder.hidden_size,
        mean,
        deviation,
        first_token: None,
        regions: None,
    };
    let edge = encoder.tower.image_size;
    for member in ["height", "width"] {
        if sources.size_in("size", member)?.unwrap_or(edge) != edge {
            let expected = format!("{edge} x {edge} (image_size)");
            return Err(processor.unsupported("size", &expected));
        }
    }
    let tiles = Gemma3Tiles {
        tile_edge: edge,
        tile_rows: sources.rows_of_tile(&encoder, "size", edge)?,
        pan_and_scan: pan_and_scan(sources)?,
    };
    let processor = ProcessorConfig {
        resampling: sources.resampling(Resampling::Bilinear)?,
        ..describe(sources.image_token(["image_token_id", "image_token_index"])?, tiles)
    };
    Ok(ImageModel { encoder, processor })
}

/// The token that stands for an image in a prompt.
pub(in crate::load) const IMAGE_TOKEN: &str = "<image_soft_token>";

/// How pictures are prepared for a model with this image token.
pub(in crate::load) fn describe(image_token_id: u32, tiles: Gemma3Tiles) -> ProcessorConfig {
    ProcessorConfig {
        placeholder: "<start_of_image>".to_owned(),
        image_token: IMAGE_TOKEN.to_owned(),
        image_token_id,
        resampling: Resampling::Bilinear,
        tiling: Tiling::Gemma3(tiles),
    }
}

fn pan_and_scan(sources: &Sources<'_>) -> Result<Option<PanAndScan>, ModelError> {
    let keys = &sources.processor;
    if !keys.flag("do_pan_and_scan")?.unwrap_or(false) {
        return Ok(None);
    }
    let max_crops = keys.size("pan_and_scan_max_num_crops")?.unwrap_or(4);
    if max_crops > 64 {
        return Err(keys.invalid("pan_and_scan_max_num_crops", "at most 64"));
    }
    Ok(Some(PanAndScan {
        min_crop_edge: keys.size("pan_and_scan_min_crop_size")?.unwrap_or(256),
        max_crops,
        min_ratio: keys.positive("pan_and_scan_min_ratio_to_activate")?.unwrap_or(1.2),
    }))
}
