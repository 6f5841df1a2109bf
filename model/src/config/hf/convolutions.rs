//! Parses which layers of a `config.json` have a convolution, and the other keys of LFM2.

use super::super::LayerConfig;
use super::super::architecture::Description;
use super::super::keys::{Keys, SIZE_MAX};
use super::mamba;
use crate::error::ModelError;

/// Number of taps of a convolution if the key is missing.
const TAPS: usize = 3;

/// The number of taps of the convolutions, if there are any. Marks the layers that have one.
pub(super) fn parse(
    row: &Description,
    keys: &Keys<'_>,
    layers: &mut [LayerConfig],
) -> Result<Option<usize>, ModelError> {
    if !row.convolutions {
        return Ok(None);
    }
    if keys.flag("conv_bias")?.unwrap_or(false) {
        return Err(keys.unsupported("conv_bias", "false"));
    }
    let wanted = layers_of(keys, layers.len())?;
    for (layer, has_convolution) in layers.iter_mut().zip(wanted) {
        if has_convolution {
            *layer = LayerConfig { convolution: true, rope: None, ..*layer };
        }
    }
    let any = layers.iter().any(|layer| layer.convolution);
    let taps = keys.size("conv_L_cache")?.unwrap_or(TAPS);
    Ok(any.then_some(taps))
}

/// Which of the `count` layers have a convolution.
fn layers_of(keys: &Keys<'_>, count: usize) -> Result<Vec<bool>, ModelError> {
    if let Some(kinds) = keys.texts("layer_types")? {
        if kinds.len() != count {
            return Err(keys.invalid("layer_types", &format!("{count} entries, one per layer")));
        }
        let has_convolution = |kind: &&str| match *kind {
            "full_attention" => Ok(false),
            "conv" => Ok(true),
            _ => Err(keys.unsupported("layer_types", "full_attention or conv")),
        };
        return kinds.iter().map(has_convolution).collect();
    }
    Ok(match keys.counts("full_attn_idxs")? {
        Some(attention) => (0..count).map(|layer| !attention.contains(&layer)).collect(),
        None => vec![false; count],
    })
}

/// Width of the MLP. LFM2's files give the width from which it is computed.
pub(super) fn mlp_width(row: &Description, keys: &Keys<'_>) -> Result<usize, ModelError> {
    let (key, default) = mamba::mlp_width(row);
    let width = keys.size(key)?.unwrap_or(default);
    if !row.convolutions || row.experts.is_some() {
        return Ok(width);
    }
    let width = keys.size("block_ff_dim")?.unwrap_or(width);
    if !keys.flag("block_auto_adjust_ff_dim")?.unwrap_or(true) {
        return Ok(width);
    }
    let width = 2 * width / 3;
    let factor = "block_ffn_dim_multiplier";
    let factor = match keys.positive(factor)? {
        // Unlike a missing key, null means that the width is not rounded up.
        None if keys.given(factor) => return Ok(width),
        factor => factor.unwrap_or(1.0),
    };
    let step = keys.size("block_multiple_of")?.unwrap_or(256);
    let width = (width as f64 * factor).min(SIZE_MAX as f64) as usize;
    Ok(width.next_multiple_of(step))
}
