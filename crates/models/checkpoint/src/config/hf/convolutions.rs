//! Parses the convolutions of a `config.json`.

use super::super::architecture::Description;
use super::super::keys::Keys;
use super::super::{ConvolutionConfig, LayerConfig, MixerConfig};
use super::layers;
use crate::error::ModelError;

/// Number of taps of a convolution if the key is missing.
const TAPS: usize = 3;

/// Replaces the attention of layers that have a convolution instead.
pub(super) fn parse(
    row: &Description,
    keys: &Keys<'_>,
    layers: &mut [LayerConfig],
) -> Result<(), ModelError> {
    if !row.convolutions {
        return Ok(());
    }
    if keys.flag("conv_bias")?.unwrap_or(false) {
        return Err(keys.unsupported("conv_bias", "false"));
    }
    let wanted = layers_of(keys, layers.len())?;
    let taps = keys.size("conv_L_cache")?.unwrap_or(TAPS);
    for (layer, has_convolution) in layers.iter_mut().zip(wanted) {
        if has_convolution {
            layer.mixers = vec![MixerConfig::Convolution(ConvolutionConfig { taps })];
        }
    }
    Ok(())
}

/// For each of the `count` layers, whether it has a convolution.
fn layers_of(keys: &Keys<'_>, count: usize) -> Result<Vec<bool>, ModelError> {
    if let Some(kinds) = keys.texts("layer_types")? {
        return layers::listed(&kinds, "conv", keys, count);
    }
    Ok(match keys.counts("full_attn_idxs")? {
        Some(attention) => (0..count).map(|layer| !attention.contains(&layer)).collect(),
        None => vec![false; count],
    })
}
