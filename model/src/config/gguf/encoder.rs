//! The image encoder in a file of its own, as llama.cpp's converter writes it (`mmproj`): that of
//! Qwen3-VL.

use super::Metadata;
use crate::config::{DecoderConfig, PatchPositions, ProjectorConfig, TowerConfig, VisionConfig};
use crate::error::ModelError;
use crate::gguf::{Header, Value};
use crate::weights::in_block;

/// The kind of projector that is supported.
const PROJECTOR: &str = "qwen3vl_merger";

/// The names of the modules of a layer in files, and here.
const LAYER: [(&str, &str); 6] = [
    ("ln1", "layer_norm1"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_out", "self_attn.out_proj"),
    ("ln2", "layer_norm2"),
    ("ffn_up", "mlp.fc1"),
    ("ffn_down", "mlp.fc2"),
];

/// The names of other modules.
const MODULES: [(&str, &str); 5] = [
    ("v.patch_embd", "embeddings.patch_embedding"),
    ("v.position_embd", "embeddings.position_embedding"),
    ("v.post_ln", "post_layernorm"),
    ("mm.0", "merger.linear_fc1"),
    ("mm.2", "merger.linear_fc2"),
];

/// The configuration of the encoder in the file with the header `header`, for this decoder. The
/// kernels of the two frames of a patch, which are both the picture, count as their sum.
///
/// # Errors
/// [`ModelError::Unsupported`] for another encoder, and [`ModelError::InvalidKey`] for a wrong value.
pub(crate) fn encoder(
    header: &Header,
    decoder: &DecoderConfig,
) -> Result<VisionConfig, ModelError> {
    let clip = Metadata { header, prefix: "clip" };
    let own = clip.value("projector_type").or_else(|| clip.value("vision.projector_type"));
    if own.and_then(Value::as_text) != Some(PROJECTOR) {
        let got = own.map_or_else(|| "nothing".to_owned(), Value::shown);
        return Err(clip.unsupported("projector_type", PROJECTOR, got));
    }
    let keys = Metadata { header, prefix: "clip.vision" };
    let output_size = keys.required_size("projection_dim")?;
    if output_size != decoder.hidden_size {
        let expected = format!("{} (embedding_length of the model)", decoder.hidden_size);
        return Err(keys.invalid("projection_dim", &expected, output_size));
    }
    let channels = |key: &str| match keys.value(key) {
        Some(Value::Floats(numbers)) if numbers.len() == 3 => {
            Ok([numbers[0], numbers[1], numbers[2]])
        }
        other => {
            let got = other.map_or_else(|| "nothing".to_owned(), Value::shown);
            Err(keys.invalid(key, "3 numbers", got))
        }
    };
    let layers = keys.required_size("block_count")?;
    let config = VisionConfig {
        tower: TowerConfig {
            prefix: "model.vision_tower.".to_owned(),
            hidden_size: keys.required_size("embedding_length")?,
            intermediate_size: keys.required_size("feed_forward_length")?,
            layers,
            heads: keys.required_size("attention.head_count")?,
            patch_size: keys.required_size("patch_size")?,
            frames: 1,
            image_size: keys.required_size("image_size")?,
            positions: PatchPositions::Rotary { theta: 1e4 },
            norm_eps: keys.required_float("attention.layer_norm_epsilon")? as f32,
        },
        projector: ProjectorConfig::Merger {
            factor: keys.size("spatial_merge_size")?.unwrap_or(2),
            deepstack: deepstack(&keys, layers)?,
        },
        output_size,
        mean: channels("image_mean")?,
        deviation: channels("image_std")?,
        first_token: None,
        regions: None,
    };
    config.check(&header.file)?;
    Ok(config)
}

/// The layers whose features the decoder gets.
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

/// The smallest and the largest number of pixels of a picture, if the file has them.
///
/// # Errors
/// [`ModelError::InvalidKey`] for a number that is not one.
pub(crate) fn pixels(header: &Header) -> Result<[Option<usize>; 2], ModelError> {
    let keys = Metadata { header, prefix: "clip.vision" };
    Ok([keys.size("image_min_pixels")?, keys.size("image_max_pixels")?])
}

/// The name here of the tensor `name` of an encoder; `None` if it is not used. The kernel of the
/// second frame keeps its number.
pub(crate) fn encoder_tensor_name(config: &VisionConfig, name: &str) -> Option<String> {
    let prefix = &config.tower.prefix;
    if name == "v.patch_embd.weight.1" {
        return Some(format!("{prefix}embeddings.patch_embedding.weight.1"));
    }
    if let Some(rest) = name.strip_prefix("v.blk.") {
        return in_block(rest, &LAYER).map(|rest| format!("{prefix}encoder.layers.{rest}"));
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
