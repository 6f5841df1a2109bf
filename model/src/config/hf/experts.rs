//! Parses the mixture of experts of a `config.json`.

use super::super::architecture::{Description, ExpertsDefaults, Scores};
use super::super::keys::Keys;
use super::super::{ExpertScores, ExpertsConfig, LayerConfig};
use crate::error::ModelError;

/// The mixture of experts, if the architecture has one. Sets [`LayerConfig::experts`] of the layers
/// that have it.
pub(super) fn parse(
    row: &Description,
    keys: &Keys<'_>,
    layers: &mut [LayerConfig],
) -> Result<Option<ExpertsConfig>, ModelError> {
    let Some(defaults) = row.experts else { return Ok(None) };
    // transformers accepts both keys.
    let count = match keys.count("num_local_experts")? {
        Some(count) => count,
        None => keys.count("num_experts")?.unwrap_or(defaults.count),
    };
    mark_layers(&defaults, keys, count, layers)?;
    if layers.iter().all(|layer| !layer.experts) {
        return Ok(None);
    }
    let (key, width) = match defaults.width {
        Some(width) => ("moe_intermediate_size", width),
        None => ("intermediate_size", row.defaults.intermediate_size),
    };
    let shared_width = match defaults.shared_width {
        Some(width) => Some(keys.size("shared_expert_intermediate_size")?.unwrap_or(width)),
        None => None,
    };
    let normalized = match defaults.normalized {
        Some(default) => keys.flag("norm_topk_prob")?.unwrap_or(default),
        None => true,
    };
    let factor = "routed_scaling_factor";
    let scores = match defaults.scores {
        Scores::Softmax => ExpertScores::Softmax,
        Scores::Sigmoid if keys.number(factor)?.unwrap_or(1.0) != 1.0 => {
            return Err(keys.unsupported(factor, "1"));
        }
        Scores::Sigmoid => {
            ExpertScores::Sigmoid { bias: keys.flag("use_expert_bias")?.unwrap_or(true) }
        }
    };
    Ok(Some(ExpertsConfig {
        count,
        per_token: keys.size("num_experts_per_tok")?.unwrap_or(defaults.per_token),
        width: keys.size(key)?.unwrap_or(width),
        scores,
        normalized,
        router_bias: defaults.router_bias,
        shared_width,
    }))
}

/// Sets which layers have experts, of which there are `count`.
fn mark_layers(
    defaults: &ExpertsDefaults,
    keys: &Keys<'_>,
    count: usize,
    layers: &mut [LayerConfig],
) -> Result<(), ModelError> {
    if let Some(dense) = defaults.dense_layers {
        let dense = keys.count("num_dense_layers")?.unwrap_or(dense);
        layers.iter_mut().skip(dense).for_each(|layer| layer.experts = count > 0);
        return Ok(());
    }
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
    Ok(())
}
