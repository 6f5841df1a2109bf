//! Describes the image encoder that llama.cpp's converter has written to a file of its own
//! (`mmproj`).

use super::Metadata;
use crate::config::{
    Architecture, DecoderConfig, PatchPositions, ProjectorConfig, TowerConfig, VisionConfig,
};
use crate::error::ModelError;
use crate::gguf::{Header, Value};
use crate::weights::in_block;

/// The kinds of encoders that are read from such files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EncoderKind {
    Gemma3,
    /// The encoder of Idefics 3 and SmolVLM, whose decoder is a Llama.
    Idefics3,
    /// The encoder of Qwen3-VL and Qwen3.5.
    Qwen3Vl,
}

impl EncoderKind {
    /// The kind of encoder for models with this architecture; `None` if they read no images.
    pub(crate) fn of(architecture: Architecture) -> Option<Self> {
        match architecture {
            Architecture::Gemma3 => Some(Self::Gemma3),
            Architecture::Llama => Some(Self::Idefics3),
            Architecture::Qwen3Vl
            | Architecture::Qwen3VlMoe
            | Architecture::Qwen35
            | Architecture::Qwen35Moe => Some(Self::Qwen3Vl),
            _ => None,
        }
    }

    /// The value of `clip.projector_type` for this kind.
    fn projector_type(self) -> &'static str {
        match self {
            Self::Gemma3 => "gemma3",
            Self::Idefics3 => "idefics3",
            Self::Qwen3Vl => "qwen3vl_merger",
        }
    }

    fn positions(self) -> PatchPositions {
        match self {
            Self::Gemma3 | Self::Idefics3 => PatchPositions::Nearest,
            Self::Qwen3Vl => PatchPositions::Rotary { theta: 1e4 },
        }
    }

    fn projector(self, keys: &Metadata<'_>, layers: usize) -> Result<ProjectorConfig, ModelError> {
        let factor = |key: &str, default| keys.size(key).map(|given| given.unwrap_or(default));
        Ok(match self {
            // The converter has added 1 to the weights of the norm.
            Self::Gemma3 => ProjectorConfig::AveragePooling {
                factor: factor("projector.scale_factor", 4)?,
                norm_offset: 0.0,
            },
            Self::Idefics3 => {
                ProjectorConfig::PixelShuffle { factor: factor("projector.scale_factor", 2)? }
            }
            Self::Qwen3Vl => ProjectorConfig::Merger {
                factor: factor("spatial_merge_size", 2)?,
                deepstack: deepstack(keys, layers)?,
            },
        })
    }
}

/// The names of the modules of a layer, in files and in this crate.
const LAYER: [(&str, &str); 9] = [
    ("ln1", "layer_norm1"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_out", "self_attn.out_proj"),
    ("ln2", "layer_norm2"),
    ("ffn_up", "mlp.fc1"),
    ("ffn_down", "mlp.fc2"),
];

/// The names of other modules of the tower, in files and in this crate.
const MODULES: [(&str, &str); 5] = [
    ("v.patch_embd", "embeddings.patch_embedding"),
    ("v.position_embd", "embeddings.position_embedding"),
    ("v.post_ln", "post_layernorm"),
    ("mm.0", "merger.linear_fc1"),
    ("mm.2", "merger.linear_fc2"),
];

/// The names of tensors of projectors, in files and in this crate, if they are not part of the
/// tower in this crate.
const PROJECTORS: [(&str, &str); 3] = [
    ("mm.soft_emb_norm.weight", "model.multi_modal_projector.mm_soft_emb_norm.weight"),
    ("mm.input_projection.weight", "model.multi_modal_projector.mm_input_projection_weight"),
    ("mm.model.fc.weight", "model.connector.modality_projection.proj.weight"),
];

/// The configuration of the encoder in the file with the header `header`, for this decoder. If a
/// patch has two frames, both show the same picture, so the sum of their kernels is used and
/// `frames` is 1.
///
/// # Errors
/// [`ModelError::Unsupported`] for another encoder, and [`ModelError::InvalidKey`] for a wrong value.
pub(crate) fn encoder(
    header: &Header,
    kind: EncoderKind,
    decoder: &DecoderConfig,
) -> Result<VisionConfig, ModelError> {
    let clip = Metadata { header, prefix: "clip" };
    let own = clip.value("projector_type").or_else(|| clip.value("vision.projector_type"));
    if own.and_then(Value::as_text) != Some(kind.projector_type()) {
        let got = own.map_or_else(|| "nothing".to_owned(), Value::shown);
        return Err(clip.unsupported("projector_type", kind.projector_type(), got));
    }
    let keys = Metadata { header, prefix: "clip.vision" };
    let output_size = keys.required_size("projection_dim")?;
    if output_size != decoder.hidden_size {
        let expected = format!("{} (embedding_length of the model)", decoder.hidden_size);
        return Err(keys.invalid("projection_dim", &expected, output_size));
    }
    let layers = keys.required_size("block_count")?;
    let config = VisionConfig {
        tower: TowerConfig {
            prefix: match kind {
                EncoderKind::Idefics3 => "model.vision_model.".to_owned(),
                EncoderKind::Gemma3 | EncoderKind::Qwen3Vl => "model.vision_tower.".to_owned(),
            },
            hidden_size: keys.required_size("embedding_length")?,
            intermediate_size: keys.required_size("feed_forward_length")?,
            layers,
            heads: keys.required_size("attention.head_count")?,
            patch_size: keys.required_size("patch_size")?,
            frames: 1,
            image_size: keys.required_size("image_size")?,
            positions: kind.positions(),
            norm_eps: keys.required_float("attention.layer_norm_epsilon")? as f32,
        },
        projector: kind.projector(&keys, layers)?,
        output_size,
        mean: channels(&keys, "image_mean")?,
        deviation: channels(&keys, "image_std")?,
        first_token: None,
        regions: None,
    };
    config.check(&header.file)?;
    Ok(config)
}

/// The numbers of the three channels under `key`.
fn channels(keys: &Metadata<'_>, key: &str) -> Result<[f32; 3], ModelError> {
    match keys.value(key) {
        Some(Value::Floats(numbers)) if numbers.len() == 3 => {
            Ok([numbers[0], numbers[1], numbers[2]])
        }
        other => {
            let got = other.map_or_else(|| "nothing".to_owned(), Value::shown);
            Err(keys.invalid(key, "3 numbers", got))
        }
    }
}

/// The layers of the tower whose features are passed to the decoder.
fn deepstack(keys: &Metadata<'_>, layers: usize) -> Result<Vec<usize>, ModelError> {
    let key = "is_deepstack_layers";
    match keys.value(key) {
        None => Ok(Vec::new()),
        Some(Value::Bools(flags)) if flags.len() == layers => {
            Ok((0..layers).filter(|layer| flags[*layer]).collect())
        }
        Some(other) => {
            Err(keys.invalid(key, &format!("{layers} booleans, one per layer"), other.shown()))
        }
    }
}

/// The minimum and the maximum number of pixels of a picture, if the file has them.
///
/// # Errors
/// [`ModelError::InvalidKey`] for an invalid number.
pub(crate) fn pixels(header: &Header) -> Result<[Option<usize>; 2], ModelError> {
    let keys = Metadata { header, prefix: "clip.vision" };
    Ok([keys.size("image_min_pixels")?, keys.size("image_max_pixels")?])
}

/// Length of the longer edge of a picture after it was resized, if the file has it.
///
/// # Errors
/// [`ModelError::InvalidKey`] for an invalid number.
pub(crate) fn largest_edge(header: &Header) -> Result<Option<usize>, ModelError> {
    Metadata { header, prefix: "clip.vision" }.size("preproc_image_size")
}

/// The name in this crate of an encoder's tensor `name`; `None` if it is not used. The kernel of
/// the second frame keeps its number in the name.
pub(crate) fn encoder_tensor_name(
    header: &Header,
    config: &VisionConfig,
    name: &str,
) -> Option<String> {
    let prefix = &config.tower.prefix;
    if name == "v.patch_embd.weight.1" {
        return Some(format!("{prefix}embeddings.patch_embedding.weight.1"));
    }
    if let Some((_, here)) = PROJECTORS.iter().find(|(own, _)| *own == name) {
        return Some((*here).to_owned());
    }
    if let Some(rest) = name.strip_prefix("v.blk.") {
        let rest = in_block(rest, &LAYER)?;
        let rest = match are_swapped(header, config) {
            true if rest.contains("fc1") => rest.replace("fc1", "fc2"),
            true => rest.replace("fc2", "fc1"),
            false => rest,
        };
        return Some(format!("{prefix}encoder.layers.{rest}"));
    }
    let (module, kind) = name.rsplit_once('.')?;
    if let Some((layer, part)) = module.strip_prefix("v.deepstack.").and_then(|m| m.split_once('.'))
    {
        let ProjectorConfig::Merger { deepstack, .. } = &config.projector else { return None };
        let index = deepstack.iter().position(|own| own.to_string() == layer)?;
        let here = match part {
            "norm" => "norm",
            "fc1" => "linear_fc1",
            "fc2" => "linear_fc2",
            _ => return None,
        };
        return Some(format!("{prefix}deepstack_merger_list.{index}.{here}.{kind}"));
    }
    let (_, here) = MODULES.iter().find(|(own, _)| *own == module)?;
    Some(format!("{prefix}{here}.{kind}"))
}

/// Whether the names of the two matrices of the MLPs are swapped, as in files of early converters.
/// If the matrices are square, the names are taken as they are, because the shapes do not tell.
fn are_swapped(header: &Header, config: &VisionConfig) -> bool {
    let TowerConfig { hidden_size, intermediate_size, .. } = config.tower;
    let down = header.tensors.get("v.blk.0.ffn_down.weight");
    hidden_size != intermediate_size
        && down.is_some_and(|down| down.shape == [intermediate_size, hidden_size])
}
