//! Parses the MLP of a `config.json`.

use super::super::architecture::{Description, Gate, Mamba};
use super::super::keys::{Keys, SIZE_MAX};
use super::super::{Activation, GateConfig, GateFunction, MlpConfig, PlainFunction};
use super::falcon::Factors;
use crate::error::ModelError;

/// The MLP of layers without experts.
pub(super) fn parse(
    row: &Description,
    keys: &Keys<'_>,
    factors: &Factors,
) -> Result<MlpConfig, ModelError> {
    let width = width(row, keys)?;
    let activation = match activation(row, keys)? {
        Activation::Gated(gate) => {
            Activation::Gated(GateConfig { factor: factors.mlp_gate, ..gate })
        }
        plain @ Activation::Plain(_) => plain,
    };
    let output_factor = factors.mlp_output;
    Ok(MlpConfig { width, activation, bias: row.mlp_bias.of(keys)?, output_factor })
}

/// The activation of the inner features.
fn activation(row: &Description, keys: &Keys<'_>) -> Result<Activation, ModelError> {
    let (key, default) = match row.gate {
        Gate::Key(key, default) => (key, default),
        Gate::SquaredRelu => {
            let key = "mlp_hidden_act";
            return match keys.text(key)? {
                None | Some("relu2") => Ok(Activation::Plain(PlainFunction::SquaredRelu)),
                Some(_) => Err(keys.unsupported(key, "relu2")),
            };
        }
        Gate::ClampedSwiglu => {
            let alpha = keys.positive_f32("swiglu_alpha")?.unwrap_or(1.702);
            let limit = keys.positive_f32("swiglu_limit")?.unwrap_or(7.0);
            return Ok(GateFunction::ClampedSwiglu { alpha, limit }.into());
        }
    };
    let function = match keys.text(key)? {
        None => default,
        Some("silu" | "swish") => GateFunction::Silu,
        Some("gelu_pytorch_tanh") => GateFunction::GeluTanh,
        Some(_) => return Err(keys.unsupported(key, "silu or gelu_pytorch_tanh")),
    };
    match (function, row.mlp_gate) {
        (function, true) => Ok(function.into()),
        (GateFunction::GeluTanh, false) => Ok(Activation::Plain(PlainFunction::GeluTanh)),
        (_, false) => {
            let expected = "gelu_pytorch_tanh or relu2 in an MLP without a gate";
            Err(ModelError::unsupported(keys.file, "hidden_act", expected, "others"))
        }
    }
}

/// Width of the MLP. Files of LFM2 have another width, from which it is computed.
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
        // Unlike a missing key, null means that the width is neither scaled nor rounded up.
        None if keys.given(factor) => return Ok(width),
        factor => factor.unwrap_or(1.0),
    };
    let step = keys.size("block_multiple_of")?.unwrap_or(256);
    let width = (width as f64 * factor).min(SIZE_MAX as f64) as usize;
    Ok(width.next_multiple_of(step))
}
