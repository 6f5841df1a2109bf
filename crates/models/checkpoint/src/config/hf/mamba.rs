//! Parses which layers have Mamba-2, and the keys of Granite 4 for it.

use super::super::architecture::{Description, Mamba};
use super::super::keys::Keys;
use super::super::{LayerConfig, Mamba2Config, MixerKind};
use super::{falcon, nemotron};
use crate::error::ModelError;

/// Sets which layers have Mamba-2. Returns its sizes, if there are any.
pub(super) fn parse(
    row: &Description,
    keys: &Keys<'_>,
    hidden_size: usize,
    layers: &mut [LayerConfig],
) -> Result<Option<Mamba2Config>, ModelError> {
    match row.mamba {
        Some(Mamba::Granite) => granite(keys, hidden_size, layers),
        Some(Mamba::Nemotron) => nemotron::parse(keys, layers),
        Some(Mamba::Falcon) => falcon::parse(keys, hidden_size, layers).map(Some),
        None => Ok(None),
    }
}

/// Sets which layers have Mamba-2, and which a rotary embedding: all with attention, or none.
fn granite(
    keys: &Keys<'_>,
    hidden_size: usize,
    layers: &mut [LayerConfig],
) -> Result<Option<Mamba2Config>, ModelError> {
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
    for (layer, kind) in layers.iter_mut().zip(kinds) {
        layer.mixers = match kind {
            "attention" | "full_attention" => &[MixerKind::Attention],
            "mamba" | "linear_attention" => &[MixerKind::Mamba2],
            _ => return Err(keys.unsupported("layer_types", "attention or mamba")),
        };
        if !rotated || !layer.has_attention() {
            layer.rope = None;
        }
    }
    match layers.iter().all(LayerConfig::has_attention) {
        true => Ok(None),
        false if keys.flag("mamba_proj_bias")?.unwrap_or(false) => {
            Err(keys.unsupported("mamba_proj_bias", "false"))
        }
        false => sizes(keys, expanded(keys, hidden_size)?).map(Some),
    }
}

/// Number of elements of all heads, where it is a multiple of the width of the residual stream.
pub(super) fn expanded(keys: &Keys<'_>, hidden_size: usize) -> Result<usize, ModelError> {
    Ok(hidden_size.saturating_mul(keys.size("mamba_expand")?.unwrap_or(2)))
}

/// The sizes of the layers with Mamba-2, whose heads have `width` elements together.
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
    })
}

/// Refuses bounds of the time steps, and other activations of the convolution and of the gates than
/// SiLU, which the key `activation` has.
pub(super) fn refuse_options(keys: &Keys<'_>, activation: &str) -> Result<(), ModelError> {
    // Time steps are bounded by nothing but 0, unless the key says otherwise.
    if keys.value("time_step_limit").is_some_and(|limit| !is_unlimited(limit)) {
        return Err(keys.unsupported("time_step_limit", "[0, infinity]"));
    }
    if !["silu", "swish"].contains(&keys.text(activation)?.unwrap_or("silu")) {
        return Err(keys.unsupported(activation, "silu"));
    }
    Ok(())
}

/// Whether a range of time steps begins with 0 and has no end. Files have the end as `Infinity`, a
/// number that JSON does not have, in one of several forms.
fn is_unlimited(limit: &serde_json::Value) -> bool {
    let Some([start, end]) = limit.as_array().map(Vec::as_slice) else { return false };
    let end = match end.as_f64() {
        Some(end) => end >= 1e30,
        None => end.is_null() || end.is_object() || end.as_str() == Some("Infinity"),
    };
    start.as_f64() == Some(0.0) && end
}
