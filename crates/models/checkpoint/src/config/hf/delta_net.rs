//! Parses the layers with Gated DeltaNet or Kimi Delta Attention of a `config.json`.

use super::super::architecture::Description;
use super::super::keys::Keys;
use super::super::{DeltaNetConfig, DeltaNetKind, LayerConfig, MixerConfig};
use super::{kimi, layers};
use crate::error::ModelError;

/// Every layer whose number is a multiple of this one has attention, unless the keys say otherwise.
const ATTENTION_INTERVAL: usize = 4;

/// Replaces the attention of layers that have Gated DeltaNet or Kimi Delta Attention instead.
pub(super) fn parse(
    row: &Description,
    keys: &Keys<'_>,
    layers: &mut [LayerConfig],
) -> Result<(), ModelError> {
    let Some(defaults) = row.delta_net else { return Ok(()) };
    if keys.flag("attn_output_gate")?.is_some_and(|gate| gate != row.output_gate) {
        return Err(keys.unsupported("attn_output_gate", &row.output_gate.to_string()));
    }
    // These are also the activations of the convolution and of the gates.
    for key in ["hidden_act", "output_gate_type"] {
        if !["silu", "swish"].contains(&keys.text(key)?.unwrap_or("silu")) {
            return Err(keys.unsupported(key, "silu"));
        }
    }
    let is_kimi = matches!(defaults.kind, DeltaNetKind::Kimi { .. });
    let wanted = match keys.texts("layer_types")? {
        Some(kinds) => layers::listed(&kinds, "linear_attention", keys, layers.len())?,
        None if is_kimi => kimi::recurrent_layers(keys, layers.len())?,
        None => {
            let interval = keys.size("full_attention_interval")?.unwrap_or(ATTENTION_INTERVAL);
            (1..=layers.len()).map(|number| !number.is_multiple_of(interval)).collect()
        }
    };
    if !wanted.contains(&true) {
        return Ok(());
    }
    let config = if is_kimi { kimi::sizes(defaults, keys)? } else { sizes(defaults, keys)? };
    for (layer, is_recurrent) in layers.iter_mut().zip(wanted) {
        if is_recurrent {
            layer.mixers = vec![MixerConfig::DeltaNet(config)];
        }
    }
    Ok(())
}

/// The sizes of Gated DeltaNet.
fn sizes(defaults: DeltaNetConfig, keys: &Keys<'_>) -> Result<DeltaNetConfig, ModelError> {
    let size = |key, default| keys.size(key).map(|size| size.unwrap_or(default));
    Ok(DeltaNetConfig {
        key_heads: size("linear_num_key_heads", defaults.key_heads)?,
        value_heads: size("linear_num_value_heads", defaults.value_heads)?,
        key_dim: size("linear_key_head_dim", defaults.key_dim)?,
        value_dim: size("linear_value_head_dim", defaults.value_dim)?,
        taps: size("linear_conv_kernel_dim", defaults.taps)?,
        ..defaults
    })
}
