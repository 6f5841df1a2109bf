//! Parses the mixture of experts of a `config.json`.

use super::super::keys::Keys;
use super::super::{Architecture, ExpertsConfig, LayerConfig};
use crate::error::ModelError;

/// The defaults of transformers for keys that `config.json` lacks.
struct Defaults {
    count: usize,
    per_token: usize,
    /// `None`: the width is `intermediate_size`.
    width: Option<usize>,
    shared_width: Option<usize>,
    /// `None`: always normalized, without a key.
    normalized: Option<bool>,
    router_bias: bool,
}

/// The mixture of experts, if the architecture has one. Sets [`LayerConfig::experts`] of the layers
/// that have it. `intermediate_size` is the default of the key of that name.
pub(super) fn parse(
    architecture: Architecture,
    keys: &Keys<'_>,
    intermediate_size: usize,
    layers: &mut [LayerConfig],
) -> Result<Option<ExpertsConfig>, ModelError> {
    let mixtral = Defaults {
        count: 8,
        per_token: 2,
        width: None,
        shared_width: None,
        normalized: None,
        router_bias: false,
    };
    let defaults = match architecture {
        Architecture::Mixtral => mixtral,
        Architecture::GptOss => Defaults { count: 128, per_token: 4, router_bias: true, ..mixtral },
        Architecture::Qwen2Moe => Defaults {
            count: 60,
            per_token: 4,
            width: Some(1408),
            shared_width: Some(5632),
            normalized: Some(false),
            ..mixtral
        },
        Architecture::Qwen3Moe => Defaults {
            count: 128,
            per_token: 8,
            width: Some(768),
            normalized: Some(false),
            ..mixtral
        },
        _ => return Ok(None),
    };
    // transformers accepts both keys.
    let count = match keys.count("num_local_experts")? {
        Some(count) => count,
        None => keys.count("num_experts")?.unwrap_or(defaults.count),
    };
    let (step, dense) = match defaults.width {
        Some(_) => (
            keys.size("decoder_sparse_step")?.unwrap_or(1),
            keys.counts("mlp_only_layers")?.unwrap_or_default(),
        ),
        None => (1, Vec::new()),
    };
    for layer in (step - 1..layers.len()).step_by(step) {
        layers[layer].experts = count > 0;
    }
    for layer in dense {
        if let Some(layer) = layers.get_mut(layer) {
            layer.experts = false;
        }
    }
    if layers.iter().all(|layer| !layer.experts) {
        return Ok(None);
    }
    let width = match defaults.width {
        Some(width) => keys.size("moe_intermediate_size")?.unwrap_or(width),
        None => keys.size("intermediate_size")?.unwrap_or(intermediate_size),
    };
    let shared_width = match defaults.shared_width {
        Some(width) => Some(keys.size("shared_expert_intermediate_size")?.unwrap_or(width)),
        None => None,
    };
    let normalized = match defaults.normalized {
        Some(default) => keys.flag("norm_topk_prob")?.unwrap_or(default),
        None => true,
    };
    let per_token = keys.size("num_experts_per_tok")?.unwrap_or(defaults.per_token);
    let router_bias = defaults.router_bias;
    Ok(Some(ExpertsConfig { count, per_token, width, normalized, router_bias, shared_width }))
}
