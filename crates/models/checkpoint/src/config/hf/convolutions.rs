//! Parses which layers of a `config.json` have a convolution.

use super::super::architecture::Description;
use super::super::keys::Keys;
use super::super::{LayerConfig, MixerKind};
use super::layers;
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
            *layer = LayerConfig { mixers: &[MixerKind::Convolution], rope: None, ..*layer };
        }
    }
    let any = layers.iter().any(|layer| layer.has(MixerKind::Convolution));
    let taps = keys.size("conv_L_cache")?.unwrap_or(TAPS);
    Ok(any.then_some(taps))
}

/// Which of the `count` layers have a convolution.
fn layers_of(keys: &Keys<'_>, count: usize) -> Result<Vec<bool>, ModelError> {
    if let Some(kinds) = keys.texts("layer_types")? {
        return layers::listed(&kinds, "conv", keys, count);
    }
    Ok(match keys.counts("full_attn_idxs")? {
        Some(attention) => (0..count).map(|layer| !attention.contains(&layer)).collect(),
        None => vec![false; count],
    })
}
