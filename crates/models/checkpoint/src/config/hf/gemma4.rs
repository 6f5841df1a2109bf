//! Parses the keys of Gemma 4: heads of global layers, layers that share keys and values, per-layer
//! embeddings, and experts next to MLPs.

use super::super::architecture::{Description, Dialect};
use super::super::keys::Keys;
use super::super::{
    AttentionConfig, ExpertScores, ExpertsConfig, FeedForwardConfig, KeysAndValues, LayerConfig,
    MlpConfig, PerLayerInput,
};
use crate::error::ModelError;

/// The sizes of the key heads and value heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeadShape {
    /// Number of key heads and of value heads.
    pub(super) kv_heads: usize,
    /// Number of elements of a head, also of query heads.
    pub(super) head_dim: usize,
}

/// The key of the object with the sizes of single layers, by index, that differ from the decoder's
/// sizes. transformers writes it.
const OVERRIDES: &str = "per_layer_config";

/// The sizes of the heads of layers without a sliding window. `heads` are the sizes in other
/// layers.
pub(super) fn global_heads(
    row: &Description,
    keys: &Keys<'_>,
    heads: HeadShape,
) -> Result<HeadShape, ModelError> {
    if row.dialect != Dialect::Gemma4 {
        return Ok(heads);
    }
    if let Some(overrides) = keys.object(OVERRIDES)? {
        let count = keys.size("num_hidden_layers")?.unwrap_or(row.defaults.num_layers);
        // The last layer never has a window, so its sizes are the sizes of global layers.
        return overridden(&overrides, count - 1, heads);
    }
    let head_dim = keys.size("global_head_dim")?.unwrap_or(512);
    let kv_heads = match keys.flag("attention_k_eq_v")? {
        Some(true) => keys.size("num_global_key_value_heads")?,
        _ => None,
    };
    Ok(HeadShape { kv_heads: kv_heads.unwrap_or(heads.kv_heads), head_dim })
}

/// The sizes of the heads of layer `index`. `heads` are the sizes in layers without overrides.
fn overridden(
    overrides: &Keys<'_>,
    index: usize,
    heads: HeadShape,
) -> Result<HeadShape, ModelError> {
    let name = overrides.names().find(|name| layer_index(name) == Some(index));
    let Some(own) = name.map(|name| overrides.object(name)).transpose()?.flatten() else {
        return Ok(heads);
    };
    if let Some(other) =
        own.names().find(|name| !matches!(*name, "head_dim" | "num_key_value_heads"))
    {
        return Err(own.invalid(other, "only the keys head_dim and num_key_value_heads"));
    }
    Ok(HeadShape {
        kv_heads: own.size("num_key_value_heads")?.unwrap_or(heads.kv_heads),
        head_dim: own.size("head_dim")?.unwrap_or(heads.head_dim),
    })
}

/// Sets the sizes of single layers and the source of their keys and values. The arrays of heads are
/// the sizes in layers with a sliding window and in other layers. Does nothing for other
/// architectures.
pub(super) fn layers(
    row: &Description,
    keys: &Keys<'_>,
    [heads, global_heads]: [HeadShape; 2],
    layers: &mut [LayerConfig],
) -> Result<(), ModelError> {
    if row.dialect != Dialect::Gemma4 {
        return Ok(());
    }
    // The last layer never has a window, as in transformers.
    if let Some(last) = layers.last_mut() {
        *last = last.at(Some(0), None);
    }
    let values_from_keys = keys.flag("attention_k_eq_v")?.unwrap_or(false);
    let overrides = keys.object(OVERRIDES)?;
    if let Some(overrides) = &overrides {
        let mut seen = vec![false; layers.len()];
        for name in overrides.names() {
            let entry = layer_index(name).and_then(|index| seen.get_mut(index));
            // The keys must not name the same layer twice, such as `5` and `05`.
            if entry.is_none_or(|seen| std::mem::replace(seen, true)) {
                return Err(overrides.invalid(name, "only the indices of layers, each once"));
            }
        }
    }
    let attentions = layers.iter_mut().filter_map(LayerConfig::attention_mut);
    for (index, attention) in attentions.enumerate() {
        let is_global = attention.sliding_window.is_none();
        let HeadShape { kv_heads, head_dim } = match &overrides {
            Some(overrides) => overridden(overrides, index, heads)?,
            None if is_global => global_heads,
            None => heads,
        };
        (attention.kv_heads, attention.head_dim) = (kv_heads, head_dim);
        attention.rotary_dim = head_dim;
        if values_from_keys && is_global {
            attention.keys_and_values = KeysAndValues::OneMatrix;
        }
    }
    let shared = keys.count("num_kv_shared_layers")?.unwrap_or(0);
    let is_wide = keys.flag("use_double_wide_mlp")?.unwrap_or(false);
    let attentions = layers.iter_mut().filter_map(LayerConfig::attention_mut);
    AttentionConfig::share_kv(shared, attentions).ok_or_else(|| {
        let expected = "fewer than all layers, after layers of each kind";
        keys.invalid("num_kv_shared_layers", expected)
    })?;
    let is_shared =
        |layer: &LayerConfig| layer.attention().is_some_and(|attention| !attention.has_own_kv());
    for layer in layers.iter_mut().filter(|layer| is_wide && is_shared(layer)) {
        if let Some(FeedForwardConfig::Dense(mlp)) = &mut layer.mlp {
            mlp.width = mlp.width.saturating_mul(2);
        }
    }
    Ok(())
}

/// The index in a key of [`OVERRIDES`]. transformers pads the indices with zeros to the same number
/// of digits, so the keys of a model with 11 layers or more are `00`, `01` and so on.
fn layer_index(name: &str) -> Option<usize> {
    let is_decimal = name.bytes().all(|byte| byte.is_ascii_digit());
    name.parse().ok().filter(|_| is_decimal)
}

/// The per-layer embeddings, whose gates have the activation function of `mlp`.
pub(super) fn per_layer_input(
    row: &Description,
    keys: &Keys<'_>,
    mlp: &MlpConfig,
) -> Result<Option<PerLayerInput>, ModelError> {
    let key = "hidden_size_per_layer_input";
    if row.dialect != Dialect::Gemma4 {
        return Ok(None);
    }
    let width = match keys.count(key)? {
        None if keys.given(key) => 0,
        width => width.unwrap_or(256),
    };
    if width == 0 {
        return Ok(None);
    }
    let vocabulary = keys.size("vocab_size")?.unwrap_or(row.defaults.vocab_size);
    let key = "vocab_size_per_layer_input";
    let own = keys.size(key)?.unwrap_or(row.defaults.vocab_size);
    if own != vocabulary {
        return Err(keys.unsupported(key, &format!("{vocabulary} (vocab_size)")));
    }
    Ok(PerLayerInput::of(width, mlp))
}

/// Adds a mixture of experts next to the MLP of each layer, if the model has experts.
pub(super) fn experts(
    keys: &Keys<'_>,
    mlp: &MlpConfig,
    layers: &mut [LayerConfig],
) -> Result<(), ModelError> {
    if !keys.flag("enable_moe_block")?.unwrap_or(false) {
        return Ok(());
    }
    let required =
        |key: &str| keys.size(key)?.ok_or_else(|| keys.invalid(key, "an integer above 0"));
    let experts = ExpertsConfig {
        count: required("num_experts")?,
        per_token: required("top_k_experts")?,
        width: required("moe_intermediate_size")?,
        activation: mlp.activation,
        bias: mlp.bias,
        scores: ExpertScores::Softmax,
        normalized: true,
        router_bias: false,
        scale: 1.0,
        shared_width: None,
        shared_gate: false,
        groups: None,
        scaled_router: true,
        shifted: false,
    };
    layers.iter_mut().for_each(|layer| layer.add_experts(experts));
    Ok(())
}
