//! Parses which layers of a `config.json` have a sliding window and a rotary embedding.

use super::super::keys::Keys;
use super::super::{Architecture, LAYERS_MAX, LayerConfig};
use super::defaults::Defaults;
use crate::error::ModelError;

/// The sliding window and the rotary embedding of each layer. `local` is the index of the rotary
/// embedding of layers with a sliding window.
pub(super) fn parse(
    architecture: Architecture,
    keys: &Keys<'_>,
    defaults: &Defaults,
    local: usize,
) -> Result<Vec<LayerConfig>, ModelError> {
    let count = keys.size("num_hidden_layers")?.unwrap_or(defaults.num_layers);
    if count > LAYERS_MAX {
        return Err(keys.invalid("num_hidden_layers", &format!("at most {}", LAYERS_MAX)));
    }
    // Without this flag, these architectures ignore the window, which may then be 0.
    let windowless = match architecture {
        Architecture::Qwen2
        | Architecture::Qwen3
        | Architecture::Qwen2Moe
        | Architecture::Qwen3Moe
        | Architecture::SmolLm3 => !keys.flag("use_sliding_window")?.unwrap_or(false),
        _ => false,
    };
    let window = match keys.given("sliding_window") {
        _ if windowless => None,
        true => keys.size("sliding_window")?,
        false => defaults.sliding_window,
    };
    let full = LayerConfig { rope: Some(0), sliding_window: None, experts: false };
    let sliding = LayerConfig { rope: Some(local), sliding_window: window, experts: false };
    let kinds = match keys.texts("layer_types")? {
        // In these architectures all layers are of the same kind, and transformers ignores the key.
        _ if matches!(
            architecture,
            Architecture::Llama | Architecture::Granite | Architecture::Olmo2
        ) =>
        {
            return Ok(vec![full; count]);
        }
        _ if matches!(
            architecture,
            Architecture::Mistral
                | Architecture::Mixtral
                | Architecture::Qwen3Moe
                | Architecture::Phi3
        ) =>
        {
            return Ok(vec![sliding; count]);
        }
        Some(kinds) if kinds.len() != count => {
            return Err(keys.invalid("layer_types", &format!("{count} entries, one per layer")));
        }
        kinds => kinds,
    };
    let rotated = match architecture {
        Architecture::SmolLm3 => rotated_layers(keys, count)?,
        _ => vec![true; count],
    };
    let layer = |(kind, rotated): (LayerConfig, bool)| LayerConfig {
        rope: kind.rope.filter(|_| rotated),
        ..kind
    };
    if let Some(kinds) = kinds {
        let kind = |kind| match kind {
            "full_attention" => Ok(full),
            "sliding_attention" => Ok(sliding),
            _ => Err(keys.unsupported("layer_types", "full_attention or sliding_attention")),
        };
        let kinds = kinds.into_iter().map(kind).collect::<Result<Vec<_>, _>>()?;
        return Ok(kinds.into_iter().zip(rotated).map(layer).collect());
    }
    let is_sliding: Box<dyn Fn(usize) -> bool> = match architecture {
        Architecture::Gemma2 | Architecture::GptOss => Box::new(|layer| layer % 2 == 0),
        Architecture::SmolLm3 => Box::new(|layer| !rotated[layer]),
        Architecture::Qwen2Moe => {
            let windows = keys.count("max_window_layers")?.unwrap_or(28);
            Box::new(move |layer| layer % 2 == 0 && layer < windows)
        }
        Architecture::Gemma3 => {
            let pattern = keys.size("sliding_window_pattern")?.unwrap_or(6);
            Box::new(move |layer| (layer + 1) % pattern != 0)
        }
        _ => {
            let first = keys.count("max_window_layers")?.unwrap_or(28);
            Box::new(move |layer| layer >= first)
        }
    };
    let kinds = (0..count).map(|layer| if is_sliding(layer) { sliding } else { full });
    Ok(kinds.zip(rotated.iter().copied()).map(layer).collect())
}

/// Which layers have a rotary embedding (SmolLM3).
fn rotated_layers(keys: &Keys<'_>, count: usize) -> Result<Vec<bool>, ModelError> {
    // Despite its name, the list has 1 for layers with a rotary embedding.
    let key = "no_rope_layers";
    match keys.flags(key)? {
        Some(rotated) if rotated.len() >= count => Ok(rotated[..count].to_vec()),
        Some(_) => Err(keys.invalid(key, &format!("at least {count} entries, one per layer"))),
        None => {
            let interval = keys.size("no_rope_layer_interval")?.unwrap_or(4);
            Ok((1..=count).map(|number| number % interval != 0).collect())
        }
    }
}
