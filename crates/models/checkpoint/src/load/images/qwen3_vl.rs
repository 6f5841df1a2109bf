//! Qwen3-VL, and Qwen3.5, which has the same encoder without DeepStack. Missing keys have the
//! defaults of transformers, except for the mean and the deviation, whose defaults are the values
//! of published models.

use stolon_vision::{ProcessorConfig, Qwen3VlTiles, Resampling, Tiling};

use super::{ImageModel, Sources};
use crate::config::{
    Architecture, DecoderConfig, Keys, PatchPositions, ProjectorConfig, TowerConfig, VisionConfig,
};
use crate::error::ModelError;

/// Maximum number of positions of an image, which only narrow images can exceed. The published
/// processors allow 16,384 positions, which would take minutes on a CPU and hundreds of megabytes
/// for activations. A smaller `longest_edge` in the model's files applies.
const POSITIONS_MAX: usize = 4096;

pub(super) fn parse(sources: &Sources<'_>) -> Result<ImageModel, ModelError> {
    let Sources { config, processor, decoder, .. } = sources;
    sources.refuse_activations()?;
    for key in ["image_mean", "image_std"] {
        if processor.value(key).is_none() {
            return Err(processor.invalid(key, "3 numbers"));
        }
    }
    let (mean, deviation) = sources.normalization()?;
    let encoder = encoder(sources)?;
    let encoder = VisionConfig { mean, deviation, ..encoder };
    encoder.check(config.file)?;
    check_decoder(config.file, &encoder, decoder)?;
    let processor = ProcessorConfig {
        resampling: sources.resampling(Resampling::Bicubic)?,
        ..describe(
            sources.image_token(["image_token_id", "image_token_index"])?,
            tiles(processor, &encoder)?,
        )
    };
    Ok(ImageModel { encoder, processor })
}

/// Checks that this decoder can read the images of `encoder`. `file` is the file's name in error
/// messages.
pub(in crate::load) fn check_decoder(
    file: &str,
    encoder: &VisionConfig,
    decoder: &DecoderConfig,
) -> Result<(), ModelError> {
    let (layers, got) = (decoder.layers.len(), encoder.deepstack_layers());
    let refused = match has_deepstack(decoder.architecture) {
        true => (got >= layers).then(|| format!("fewer than the {layers} layers of the decoder")),
        false => (got > 0).then(|| format!("no layers for {}", decoder.architecture.name())),
    };
    if let Some(expected) = refused {
        return Err(ModelError::key(file, "deepstack_visual_indexes", expected, got));
    }
    if decoder.ropes.iter().all(|rope| rope.sections.is_none()) {
        let rotary_dim = decoder.rope_dim(0).unwrap_or(0);
        let expected = format!("numbers of pairs whose sum is {}", rotary_dim / 2);
        return Err(ModelError::key(file, "mrope_section", expected, "nothing"));
    }
    Ok(())
}

/// Whether decoders of this architecture add the outputs of several layers of the encoder to the
/// outputs of their own first layers.
fn has_deepstack(architecture: Architecture) -> bool {
    matches!(architecture, Architecture::Qwen3Vl | Architecture::Qwen3VlMoe)
}

/// How pictures are prepared for a model with this image token.
pub(in crate::load) fn describe(image_token_id: u32, tiles: Qwen3VlTiles) -> ProcessorConfig {
    ProcessorConfig {
        placeholder: "<|vision_start|><|image_pad|><|vision_end|>".to_owned(),
        image_token: IMAGE_TOKEN.to_owned(),
        image_token_id,
        resampling: Resampling::Bicubic,
        tiling: Tiling::Qwen3Vl(tiles),
    }
}

/// The token that stands for an image in a prompt.
pub(in crate::load) const IMAGE_TOKEN: &str = "<|image_pad|>";

fn encoder(sources: &Sources<'_>) -> Result<VisionConfig, ModelError> {
    let Sources { vision, decoder, .. } = sources;
    let size = |key: &str, default: usize| vision.size(key).map(|given| given.unwrap_or(default));
    let output_size = size("out_hidden_size", 3584)?;
    if output_size != decoder.hidden_size {
        let expected = format!("{} (text_config.hidden_size)", decoder.hidden_size);
        return Err(vision.invalid("out_hidden_size", &expected));
    }
    if size("in_channels", 3)? != 3 {
        return Err(vision.unsupported("in_channels", "3"));
    }
    let learned = size("num_position_embeddings", 2304)?;
    if learned.isqrt().pow(2) != learned {
        return Err(vision.invalid("num_position_embeddings", "the square of an integer"));
    }
    let patch_size = size("patch_size", 16)?;
    let theta = match vision.object("rope_parameters")? {
        Some(rope) => match rope.text("rope_type")? {
            None | Some("axial" | "default") => rope.positive("rope_theta")?,
            Some(_) => return Err(rope.unsupported("rope_type", "axial")),
        },
        None => None,
    };
    let deepstack = match vision.counts("deepstack_visual_indexes")? {
        None if has_deepstack(decoder.architecture) => vec![8, 16, 24],
        given => given.unwrap_or_default(),
    };
    Ok(VisionConfig {
        tower: TowerConfig {
            prefix: "model.vision_tower.".to_owned(),
            hidden_size: size("hidden_size", 1152)?,
            intermediate_size: size("intermediate_size", 4304)?,
            layers: size("depth", 27)?,
            heads: size("num_heads", 16)?,
            patch_size,
            frames: size("temporal_patch_size", 2)?,
            image_size: learned.isqrt().saturating_mul(patch_size),
            positions: PatchPositions::Rotary { theta: theta.unwrap_or(1e4) },
            norm_eps: 1e-6,
        },
        projector: ProjectorConfig::Merger { factor: size("spatial_merge_size", 2)?, deepstack },
        output_size,
        mean: [0.5; 3],
        deviation: [0.5; 3],
        first_token: None,
        regions: None,
    })
}

/// How pictures are resized.
fn tiles(processor: &Keys<'_>, encoder: &VisionConfig) -> Result<Qwen3VlTiles, ModelError> {
    let TowerConfig { patch_size, frames, .. } = encoder.tower;
    let factor = encoder.projector.factor();
    for (key, default, expected) in [
        ("patch_size", 14, patch_size),
        ("temporal_patch_size", 2, frames),
        ("merge_size", 2, factor),
    ] {
        if processor.size(key)?.unwrap_or(default) != expected {
            return Err(processor.unsupported(key, &format!("{expected} (vision_config)")));
        }
    }
    if processor.flag("do_resize")? == Some(false) {
        return Err(processor.unsupported("do_resize", "true"));
    }
    let size = processor.object("size")?;
    // Older files have the numbers of pixels under other names, which take precedence.
    let pixels = |older: &str, member: &str, default: usize| {
        let given = match &size {
            Some(size) => size.size(member)?.or(size.size(older)?),
            None => None,
        };
        Ok::<_, ModelError>(processor.size(older)?.or(given).unwrap_or(default))
    };
    let pixels_min = pixels("min_pixels", "shortest_edge", 56 * 56)?;
    let pixels_max = pixels("max_pixels", "longest_edge", 28 * 28 * 1280)?;
    let square_edge = patch_size * factor;
    if pixels_min > pixels_max || pixels_max < square_edge * square_edge {
        let expected = format!("at least {} (a square of patches)", square_edge * square_edge);
        let expected = format!("a longest_edge of {expected} and of shortest_edge, {pixels_min}");
        return Err(processor.invalid("size", &expected));
    }
    Ok(bounded(square_edge, [pixels_min, pixels_max]))
}

/// Squares of this edge, with the minimum and maximum number of pixels limited to what the engine
/// allows.
pub(in crate::load) fn bounded(square_edge: usize, pixels: [usize; 2]) -> Qwen3VlTiles {
    let limit = POSITIONS_MAX * square_edge * square_edge;
    let [pixels_min, pixels_max] = pixels.map(|pixels| pixels.min(limit));
    Qwen3VlTiles { square_edge, pixels_min, pixels_max }
}
