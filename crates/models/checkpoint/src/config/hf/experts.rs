//! Parses the mixture of experts of a `config.json`.

use std::collections::HashSet;

use super::super::architecture::{
    Description, Dialect, ExpertLayers, ExpertsDefaults, GroupScore, Scores, Shared,
};
use super::super::keys::Keys;
use super::super::{
    ExpertGroups, ExpertScores, ExpertsConfig, FeedForwardConfig, LayerConfig, MlpConfig,
};
use super::gemma4;
use super::nemotron::{self, Block};
use crate::error::ModelError;

/// Replaces the MLP of layers that have a mixture of experts, or adds experts next to it in Gemma
/// 4. `mlp` is the MLP of layers without experts.
pub(super) fn parse(
    row: &Description,
    keys: &Keys<'_>,
    mlp: &MlpConfig,
    layers: &mut [LayerConfig],
) -> Result<(), ModelError> {
    if row.dialect == Dialect::Gemma4 {
        return gemma4::experts(keys, mlp, layers);
    }
    let Some(defaults) = row.experts else { return Ok(()) };
    let count = count(&defaults, keys)?;
    let wanted = layers_of(&defaults, keys, count, layers.len())?;
    if !wanted.contains(&true) {
        return Ok(());
    }
    let experts = FeedForwardConfig::Experts(config(row, defaults, count, keys, mlp)?);
    for (layer, has_experts) in layers.iter_mut().zip(wanted) {
        if has_experts {
            layer.mlp = Some(experts);
        }
    }
    Ok(())
}

/// The mixture of `count` experts of a layer.
fn config(
    row: &Description,
    defaults: ExpertsDefaults,
    count: usize,
    keys: &Keys<'_>,
    mlp: &MlpConfig,
) -> Result<ExpertsConfig, ModelError> {
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
        Shared::Dense => Some(mlp.width),
        Shared::Times(times) => {
            let key = keys.name_of(["n_shared_experts", "num_shared_experts"]);
            match keys.count(key)?.unwrap_or(times) {
                0 => None,
                times => Some(width.saturating_mul(times)),
            }
        }
        Shared::Width(width) => {
            Some(keys.size("moe_shared_expert_intermediate_size")?.unwrap_or(width))
        }
    };
    let normalized = match defaults.normalized {
        Some(default) => {
            keys.flag(keys.name_of(["norm_topk_prob", "moe_renormalize"]))?.unwrap_or(default)
        }
        None => true,
    };
    let scores = match defaults.scores {
        Scores::Softmax => ExpertScores::Softmax,
        Scores::Sigmoid => {
            let bias = keys.flag("use_expert_bias")?.unwrap_or(true);
            ExpertScores::Sigmoid { bias }
        }
    };
    let scale = match defaults.scale {
        Some(default) => keys.positive_f32("routed_scaling_factor")?.unwrap_or(default),
        None => 1.0,
    };
    // With this key, the inputs of experts are projected to fewer features, which is not
    // implemented.
    if keys.value("moe_latent_size").is_some() {
        return Err(keys.unsupported("moe_latent_size", "null"));
    }
    let per_token = keys.name_of(["num_experts_per_tok", "num_experts_per_token"]);
    Ok(ExpertsConfig {
        count,
        per_token: keys.size(per_token)?.unwrap_or(defaults.per_token),
        width,
        activation: mlp.activation,
        bias: mlp.bias,
        scores,
        normalized,
        router_bias: defaults.router_bias,
        groups: groups(&defaults, keys)?,
        scale,
        shared_width,
        shared_gate: defaults.shared.has_gate(),
        scaled_router: false,
        shifted: false,
    })
}

/// The groups of experts, if there are several.
fn groups(defaults: &ExpertsDefaults, keys: &Keys<'_>) -> Result<Option<ExpertGroups>, ModelError> {
    let size = |key: &str, default| keys.size(key).map(|size| size.unwrap_or(default));
    let ([count, used], best) = match defaults.groups {
        Some(GroupScore::BestTwo(sizes)) => (sizes, 2),
        Some(GroupScore::Best) => match keys.text("topk_method")? {
            Some("group_limited_greedy") => ([1, 1], 1),
            None | Some("greedy") => return Ok(None),
            Some(_) => {
                return Err(keys.unsupported("topk_method", "greedy or group_limited_greedy"));
            }
        },
        None => match size("n_group", 1)? {
            1 => return Ok(None),
            _ => return Err(keys.unsupported("n_group", "1")),
        },
    };
    let key = keys.name_of(["n_group", "num_expert_group"]);
    let groups = ExpertGroups { count: size(key, count)?, used: size("topk_group", used)?, best };
    Ok(Some(groups).filter(|groups| groups.count > 1))
}

/// Number of experts of a layer. transformers accepts each of the keys.
fn count(defaults: &ExpertsDefaults, keys: &Keys<'_>) -> Result<usize, ModelError> {
    let key = keys.name_of(["num_local_experts", "num_experts", "n_routed_experts"]);
    Ok(keys.count(key)?.unwrap_or(defaults.count))
}

/// For each of `layers` layers, whether it has experts. `count` is the number of experts of such a
/// layer.
fn layers_of(
    defaults: &ExpertsDefaults,
    keys: &Keys<'_>,
    count: usize,
    layers: usize,
) -> Result<Vec<bool>, ModelError> {
    let any = count > 0;
    match defaults.layers {
        ExpertLayers::Kinds => {
            let blocks = nemotron::blocks(keys)?.into_iter();
            return Ok(blocks.map(|block| block == Block::Experts).collect());
        }
        ExpertLayers::AllButFirst(key, dense) => {
            let dense = keys.count(key)?.unwrap_or(dense);
            return Ok((0..layers).map(|layer| any && layer >= dense).collect());
        }
        ExpertLayers::Types(dense) => {
            let types = keys.texts("mlp_layer_types")?;
            let dense = keys.count("first_k_dense_replace")?.unwrap_or(dense);
            let is_sparse = |index| match types.as_ref().map(|types| types.get(index)) {
                None => Ok(any && index >= dense),
                Some(Some(&"sparse")) => Ok(any),
                Some(Some(&"dense")) => Ok(false),
                _ => {
                    let expected = "dense or sparse for each layer";
                    Err(keys.unsupported("mlp_layer_types", expected))
                }
            };
            return (0..layers).map(is_sparse).collect();
        }
        ExpertLayers::Steps => {}
    }
    let (step, dense) = match defaults.width {
        Some(_) => (
            keys.size("decoder_sparse_step")?.unwrap_or(1),
            keys.counts("mlp_only_layers")?.unwrap_or_default(),
        ),
        None => (1, Vec::new()),
    };
    let dense: HashSet<usize> = dense.into_iter().collect();
    let is_sparse = |layer: usize| (layer + 1).is_multiple_of(step) && !dense.contains(&layer);
    Ok((0..layers).map(|layer| any && is_sparse(layer)).collect())
}
