//! Parses the width of the MLP of a `config.json`.

use super::super::architecture::{Description, Mamba};
use super::super::keys::{Keys, SIZE_MAX};
use crate::error::ModelError;

/// Width of the MLP. LFM2's files give the width from which it is computed.
pub(super) fn width(row: &Description, keys: &Keys<'_>) -> Result<usize, ModelError> {
    let (key, default) = match row.mamba {
        Some(Mamba::Granite) => ("shared_intermediate_size", 1024),
        _ => ("intermediate_size", row.defaults.intermediate_size),
    };
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
