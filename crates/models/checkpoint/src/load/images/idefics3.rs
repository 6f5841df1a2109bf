//! Idefics 3 and SmolVLM. Missing keys have the defaults of transformers.

use stolon_vision::{Idefics3Tiles, ProcessorConfig, Resampling, Tiling};

use super::{ImageModel, Sources};
use crate::config::{PatchPositions, ProjectorConfig, TowerConfig, VisionConfig};
use crate::error::ModelError;

pub(super) fn parse(sources: &Sources<'_>) -> Result<ImageModel, ModelError> {
    let Sources { config, processor, decoder, .. } = sources;
    sources.refuse_activations()?;
    let (mean, deviation) = sources.normalization()?;
    let encoder = VisionConfig {
        tower: sources.tower(TowerConfig {
            prefix: "model.vision_model.".to_owned(),
            hidden_size: 1152,
            intermediate_size: 3072,
            layers: 12,
            heads: 16,
            patch_size: 32,
            frames: 1,
            image_size: 224,
            positions: PatchPositions::Nearest,
            norm_eps: 1e-6,
        })?,
        projector: ProjectorConfig::PixelShuffle {
            factor: config.size("scale_factor")?.unwrap_or(2),
        },
        output_size: decoder.hidden_size,
        mean,
        deviation,
        first_token: None,
        regions: None,
    };
    let tile_edge = sources.size_in("max_image_size", "longest_edge")?.unwrap_or(364);
    let tile_rows = sources.rows_of_tile(&encoder, "max_image_size", tile_edge)?;
    let resizes = processor.flag("do_resize")?.unwrap_or(true);
    let longest_edge = sources.size_in("size", "longest_edge")?.unwrap_or(4 * 364);
    if longest_edge > EDGE_MAX {
        return Err(processor.invalid("size", &format!("at most {EDGE_MAX} pixels")));
    }
    let tiles = Idefics3Tiles {
        longest_edge: resizes.then_some(longest_edge),
        tile_edge,
        splits: processor.flag("do_image_splitting")?.unwrap_or(true),
        tile_rows,
    };
    let processor = ProcessorConfig {
        resampling: sources.resampling(Resampling::Lanczos)?,
        ..describe(sources.image_token(["image_token_id", "image_token_index"])?, tiles)
    };
    Ok(ImageModel { encoder, processor })
}

/// Maximum length of the longer edge of a picture after it was resized.
pub(in crate::load) const EDGE_MAX: usize = 1 << 14;

/// The token that stands for an image in a prompt.
pub(in crate::load) const IMAGE_TOKEN: &str = "<image>";

/// How pictures are prepared for a model with this image token.
pub(in crate::load) fn describe(image_token_id: u32, tiles: Idefics3Tiles) -> ProcessorConfig {
    ProcessorConfig {
        placeholder: IMAGE_TOKEN.to_owned(),
        image_token: IMAGE_TOKEN.to_owned(),
        image_token_id,
        resampling: Resampling::Lanczos,
        tiling: Tiling::Idefics3(tiles),
    }
}
