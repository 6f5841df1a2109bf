//! Parses the mixture of experts of a `config.json`.

use super::super::architecture::{Description, ExpertLayers, ExpertsDefaults, Scores, Shared};
use super::super::keys::Keys;
use super::super::{ExpertScores, ExpertsConfig, LayerConfig, MlpKind};
use super::{gemma4, mlp};
use crate::error::ModelError;

/// The mixture of experts, if the architecture has one. Sets [`LayerConfig::mlp`] of the layers
/// that have it.
pub(super) fn parse(
    row: &Description,
    keys: &Keys<'_>,
    layers: &mut [LayerConfig],
) -> Result<Option<ExpertsConfig>, ModelError> {
    if row.gemma4 {
        return gemma4::experts(keys, layers);
    }
    let Some(defaults) = row.experts else { return Ok(None) };
    let count = count(&defaults, keys)?;
    mark_layers(&defaults, keys, count, layers)?;
    if !layers.iter().any(LayerConfig::has_experts) {
        return Ok(None);
    }
    let (key, width) = match defaults.width {
        Some(width) => ("moe_intermediate_size", width),
        None => ("intermediate_size", row.defaults.intermediate_size),
    };
    let width = keys.size(key)?.unwrap_or(width);
    let shared_width = match defaults.shared {
        Shared::None => None,
        Shared::Gated(width) => {
            Some(keys.size("shared_expert_intermediate_size")?.unwrap_or(width))
        }
        Shared::Dense => Some(mlp::width(row, keys)?),
        Shared::Times(times) => match keys.count("n_shared_experts")?.unwrap_or(times) {
            0 => None,
            times => Some(width.saturating_mul(times)),
        },
        Shared::Width(width) => {
            Some(keys.size("moe_shared_expert_intermediate_size")?.unwrap_or(width))
        }
    };
    let normalized = match defaults.normalized {
        Some(default) => keys.flag("norm_topk_prob")?.unwrap_or(default),
        None => true,
    };
    let (scores, scale) = match defaults.scores {
        Scores::Softmax => (ExpertScores::Softmax, 1.0),
        Scores::Sigmoid => {
            let bias = keys.flag("use_expert_bias")?.unwrap_or(true);
            let scale = keys.positive_f32("routed_scaling_factor")?.unwrap_or(1.0);
            (ExpertScores::Sigmoid { bias }, scale)
        }
    };
    // Experts of several groups, of which only the best are in the choice (DeepSeek-V3).
    if keys.size("n_group")?.is_some_and(|groups| groups > 1) {
        return Err(keys.unsupported("n_group", "1"));
    }
    // Experts whose inputs are projected to fewer features.
    if keys.value("moe_latent_size").is_some() {
        return Err(keys.unsupported("moe_latent_size", "null"));
    }
    Ok(Some(ExpertsConfig {
        count,
        per_token: keys.size("num_experts_per_tok")?.unwrap_or(defaults.per_token),
        width,
        scores,
        normalized,
        router_bias: defaults.router_bias,
        scale,
        shared_width,
        shared_gate: defaults.shared.has_gate(),
        scaled_router: false,
    }))
}

/// Number of experts of a layer. transformers accepts all keys.
fn count(defaults: &ExpertsDefaults, keys: &Keys<'_>) -> Result<usize, ModelError> {
    for key in ["num_local_experts", "num_experts", "n_routed_experts"] {
        if let Some(count) = keys.count(key)? {
            return Ok(count);
        }
    }
    Ok(defaults.count)
}

/// Sets which layers have experts, of which there are `count`.
fn mark_layers(
    defaults: &ExpertsDefaults,
    keys: &Keys<'_>,
    count: usize,
    layers: &mut [LayerConfig],
) -> Result<(), ModelError> {
    let kind = Some(if count > 0 { MlpKind::Experts } else { MlpKind::Dense });
    match defaults.layers {
        ExpertLayers::Steps => {}
        ExpertLayers::AllButFirst(key, dense) => {
            let dense = keys.count(key)?.unwrap_or(dense);
            layers.iter_mut().skip(dense).for_each(|layer| layer.mlp = kind);
            return Ok(());
        }
        ExpertLayers::Kinds => return Ok(()),
    }
    let (step, dense) = match defaults.width {
        Some(_) => (
            keys.size("decoder_sparse_step")?.unwrap_or(1),
            keys.counts("mlp_only_layers")?.unwrap_or_default(),
        ),
        None => (1, Vec::new()),
    };
    for layer in (step - 1..layers.len()).step_by(step) {
        layers[layer].mlp = kind;
    }
    for layer in dense {
        if let Some(layer) = layers.get_mut(layer) {
            layer.mlp = Some(MlpKind::Dense);
        }
    }
    Ok(())
}
