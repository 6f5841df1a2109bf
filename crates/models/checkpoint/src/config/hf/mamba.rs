//! Parses the layers with Mamba-2 of a `config.json`, and Granite 4's keys for them.

use super::super::architecture::{Description, Mamba};
use super::super::keys::Keys;
use super::super::{LayerConfig, Mamba2Config, MixerConfig};
use super::falcon::{self, Factors};
use super::nemotron;
use crate::error::ModelError;

/// Adds Mamba-2 to the layers that have it, instead of attention or next to it.
pub(super) fn parse(
    row: &Description,
    keys: &Keys<'_>,
    hidden_size: usize,
    factors: &Factors,
    layers: &mut [LayerConfig],
) -> Result<(), ModelError> {
    match row.mamba {
        Some(Mamba::Granite) => granite(keys, hidden_size, layers),
        Some(Mamba::Nemotron) => nemotron::parse(keys, layers),
        Some(Mamba::Falcon) => falcon::parse(keys, hidden_size, factors, layers),
        None => Ok(()),
    }
}

/// Replaces the attention of layers that have Mamba-2 instead. Either all remaining layers with
/// attention have a rotary embedding, or none has.
fn granite(
    keys: &Keys<'_>,
    hidden_size: usize,
    layers: &mut [LayerConfig],
) -> Result<(), ModelError> {
    let kinds = keys.texts("layer_types")?.unwrap_or_default();
    if kinds.len() != layers.len() {
        return Err(keys.invalid("layer_types", &format!("{} entries", layers.len())));
    }
    let key = "position_embedding_type";
    let rotated = match keys.text(key)? {
        Some("rope") => true,
        None | Some("nope") => false,
        Some(_) => return Err(keys.unsupported(key, "rope or nope")),
    };
    let is_recurrent = |kind| match kind {
        "attention" | "full_attention" => Ok(false),
        "mamba" | "linear_attention" => Ok(true),
        _ => Err(keys.unsupported("layer_types", "attention or mamba")),
    };
    let wanted = kinds.into_iter().map(is_recurrent).collect::<Result<Vec<_>, _>>()?;
    if !rotated {
        layers.iter_mut().filter_map(LayerConfig::attention_mut).for_each(|attention| {
            attention.rope = None;
        });
    }
    if !wanted.contains(&true) {
        return Ok(());
    }
    if keys.flag("mamba_proj_bias")?.unwrap_or(false) {
        return Err(keys.unsupported("mamba_proj_bias", "false"));
    }
    let config = sizes(keys, expanded(keys, hidden_size)?)?;
    for (layer, is_recurrent) in layers.iter_mut().zip(wanted) {
        if is_recurrent {
            layer.mixers = vec![MixerConfig::Mamba2(config)];
        }
    }
    Ok(())
}

/// Number of elements of all heads together, if it is given as a multiple of the width of the
/// residual stream.
pub(super) fn expanded(keys: &Keys<'_>, hidden_size: usize) -> Result<usize, ModelError> {
    Ok(hidden_size.saturating_mul(keys.size("mamba_expand")?.unwrap_or(2)))
}

/// The sizes of the layers with Mamba-2. All heads together have `width` elements.
pub(super) fn sizes(keys: &Keys<'_>, width: usize) -> Result<Mamba2Config, ModelError> {
    refuse_options(keys, "hidden_act")?;
    let size = |key, default| keys.size(key).map(|size| size.unwrap_or(default));
    let heads = size("mamba_n_heads", 128)?;
    let head_dim = match keys.value("mamba_d_head").and_then(|value| value.as_str()) {
        Some("auto") => None,
        _ => keys.size("mamba_d_head")?,
    };
    let head_dim = head_dim.unwrap_or(width / heads);
    if heads.checked_mul(head_dim) != Some(width) {
        let expected = format!("{width} elements of all heads divided by mamba_n_heads");
        return Err(keys.invalid("mamba_d_head", &expected));
    }
    Ok(Mamba2Config {
        heads,
        head_dim,
        groups: size("mamba_n_groups", 1)?,
        state_dim: size("mamba_d_state", 256)?,
        taps: size("mamba_d_conv", 4)?,
        convolution_bias: keys.flag("mamba_conv_bias")?.unwrap_or(true),
        norm: true,
        log_rates: true,
        input_factors: [1.0; 5],
        output_factor: 1.0,
    })
}

/// Refuses bounds of the time steps, and activations of the convolution and of the gates other than
/// SiLU. `activation` is the key of the latter.
pub(super) fn refuse_options(keys: &Keys<'_>, activation: &str) -> Result<(), ModelError> {
    // The only default bound of time steps is the lower bound 0.
    if keys.value("time_step_limit").is_some_and(|limit| !is_unlimited(limit)) {
        return Err(keys.unsupported("time_step_limit", "[0, infinity]"));
    }
    if !["silu", "swish"].contains(&keys.text(activation)?.unwrap_or("silu")) {
        return Err(keys.unsupported(activation, "silu"));
    }
    Ok(())
}

/// Whether a range of time steps begins with 0 and has no end. Files write the end as `Infinity`,
/// which JSON does not have, in one of several forms.
fn is_unlimited(limit: &serde_json::Value) -> bool {
    let Some([start, end]) = limit.as_array().map(Vec::as_slice) else { return false };
    let end = match end.as_f64() {
        Some(end) => end >= 1e30,
        None => end.is_null() || end.is_object() || end.as_str() == Some("Infinity"),
    };
    start.as_f64() == Some(0.0) && end
}
