//! Parses the keys of Falcon-H1: Mamba-2 next to attention in each layer, and many factors.

use super::super::keys::Keys;
use super::super::{LayerConfig, Mamba2Config, MixerConfig};
use super::mamba;
use crate::error::ModelError;

/// The factors of the parts of layers in Falcon-H1 (maximal update parametrization, μP).
pub(super) struct Factors {
    pub(super) attention_output: f32,
    pub(super) mamba_output: f32,
    /// See [`Mamba2Config::input_factors`].
    pub(super) mamba_inputs: [f32; 5],
    pub(super) mlp_gate: f32,
    pub(super) mlp_output: f32,
}

impl Factors {
    /// Factors without an effect.
    pub(super) const NEUTRAL: Self = Self {
        attention_output: 1.0,
        mamba_output: 1.0,
        mamba_inputs: [1.0; 5],
        mlp_gate: 1.0,
        mlp_output: 1.0,
    };
}

/// Adds Mamba-2 next to the attention of each layer.
pub(super) fn parse(
    keys: &Keys<'_>,
    hidden_size: usize,
    factors: &Factors,
    layers: &mut [LayerConfig],
) -> Result<(), ModelError> {
    for key in ["mamba_proj_bias", "projectors_bias"] {
        if keys.flag(key)?.unwrap_or(false) {
            return Err(keys.unsupported(key, "false"));
        }
    }
    let norm = keys.flag("mamba_rms_norm")?.unwrap_or(false);
    if norm && keys.flag("mamba_norm_before_gate")?.unwrap_or(true) {
        return Err(keys.unsupported("mamba_norm_before_gate", "false with mamba_rms_norm"));
    }
    let width = match keys.size("mamba_d_ssm")? {
        Some(width) => width,
        None if keys.given("mamba_d_ssm") => mamba::expanded(keys, hidden_size)?,
        None => 1024,
    };
    let config = Mamba2Config {
        norm,
        input_factors: factors.mamba_inputs,
        output_factor: factors.mamba_output,
        ..mamba::sizes(keys, width)?
    };
    layers.iter_mut().for_each(|layer| layer.mixers.push(MixerConfig::Mamba2(config)));
    Ok(())
}

/// The factors of the parts of layers, and the factor of attention scores.
pub(super) fn factors(keys: &Keys<'_>) -> Result<(Factors, f32), ModelError> {
    let factor = |key| keys.positive_f32(key).map(|factor| factor.unwrap_or(1.0));
    let input = factor("attention_in_multiplier")?;
    if input != 1.0 && keys.flag("attention_bias")?.unwrap_or(false) {
        // The factor is for the inputs of attention, and does not apply to biases.
        return Err(keys.unsupported("attention_bias", "false with attention_in_multiplier"));
    }
    let [mlp_gate, mlp_output] = numbers(keys, "mlp_multipliers")?;
    let mamba_input = factor("ssm_in_multiplier")?;
    let factors = Factors {
        // The values contain the factor of the inputs, which is moved to the output.
        attention_output: input * factor("attention_out_multiplier")?,
        mamba_output: factor("ssm_out_multiplier")?,
        mamba_inputs: numbers(keys, "ssm_multipliers")?.map(|factor| mamba_input * factor),
        mlp_gate,
        mlp_output,
    };
    // Queries and keys contain the factor of the inputs, too, which is moved to the scores.
    let scores = input * input * factor("key_multiplier")?;
    Ok((factors, scores))
}

/// The factors under `key`, which are 1 if the key is missing.
fn numbers<const N: usize>(keys: &Keys<'_>, key: &str) -> Result<[f32; N], ModelError> {
    let Some(factors) = keys.numbers(key)? else { return Ok([1.0; N]) };
    match <[f32; N]>::try_from(factors) {
        Ok(factors) if factors.iter().all(|factor| *factor > 0.0) => Ok(factors),
        _ => Err(keys.invalid(key, &format!("{N} numbers above 0"))),
    }
}
