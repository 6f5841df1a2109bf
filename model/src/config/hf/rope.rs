//! Parses the rotary embeddings of a `config.json`, from the older keys (`rope_theta`,
//! `rope_scaling`, `rope_local_base_freq`) and from the newer one (`rope_parameters`, which is
//! either flat or has one object per layer type).

use super::super::keys::Keys;
use super::super::{Architecture, Rope, RopeScaling};
use crate::error::ModelError;

const TYPES: &str = "default, linear, dynamic, llama3 or yarn";

/// The rotary embeddings, and the index of the one that layers with a sliding window use.
pub(super) fn parse(
    architecture: Architecture,
    keys: &Keys<'_>,
    max_positions: usize,
) -> Result<(Vec<Rope>, usize), ModelError> {
    if architecture == Architecture::Gemma3 {
        return gemma(keys, max_positions).map(|ropes| (ropes, 1));
    }
    let default = if architecture == Architecture::Mixtral { 1e6 } else { 1e4 };
    let theta = keys.positive("rope_theta")?.unwrap_or(default);
    // If both keys are present, transformers uses the older one.
    let parameters = match keys.object("rope_scaling")? {
        Some(older) if older.names().next().is_some() => Some(older),
        _ => keys.object("rope_parameters")?,
    };
    let rope = match parameters {
        Some(parameters) => {
            if parameters.given("full_attention") {
                return Err(keys.unsupported("rope_parameters", "one rope for all layers"));
            }
            one(&parameters, theta, max_positions)?
        }
        None => Rope { theta, scaling: RopeScaling::None },
    };
    Ok((vec![rope], 0))
}

/// Gemma 3: a global rotary embedding (index 0), to which `rope_scaling` applies, and a local one.
fn gemma(keys: &Keys<'_>, max_positions: usize) -> Result<Vec<Rope>, ModelError> {
    let nested = keys.object("rope_parameters")?;
    if let Some(nested) = &nested
        && let Some(other) =
            nested.names().find(|name| !matches!(*name, "full_attention" | "sliding_attention"))
    {
        return Err(nested.invalid(other, "only the keys full_attention and sliding_attention"));
    }
    let theta_global = keys.positive("rope_theta")?.unwrap_or(1_000_000.0);
    let theta_local = keys.positive("rope_local_base_freq")?.unwrap_or(10_000.0);
    let layer_type = |name: &str| match &nested {
        Some(nested) => nested.object(name),
        None => Ok(None),
    };
    let mut global = match layer_type("full_attention")? {
        Some(parameters) => one(&parameters, theta_global, max_positions)?,
        None => Rope { theta: theta_global, scaling: RopeScaling::None },
    };
    if let Some(older) = keys.object("rope_scaling")? {
        global = one(&older, global.theta, max_positions)?;
    }
    let local = match layer_type("sliding_attention")? {
        Some(parameters) => one(&parameters, theta_local, max_positions)?,
        None => Rope { theta: theta_local, scaling: RopeScaling::None },
    };
    Ok(vec![global, local])
}

/// One rotary embedding from a flat object. `theta` is the default of `rope_theta`.
fn one(parameters: &Keys<'_>, theta: f64, max_positions: usize) -> Result<Rope, ModelError> {
    let theta = parameters.positive("rope_theta")?.unwrap_or(theta);
    if parameters.number("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(parameters.unsupported("partial_rotary_factor", "1.0"));
    }
    let key = if parameters.value("rope_type").is_some() { "rope_type" } else { "type" };
    let scaling = match parameters.text(key)?.unwrap_or("default") {
        "default" => RopeScaling::None,
        // The frequencies change only for sequences that are longer than `max_position_embeddings`,
        // which is the longest context here.
        "dynamic" if !parameters.given("alpha") => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: factor(parameters)? },
        "yarn" => yarn(parameters, max_positions)?,
        "llama3" => {
            let low_freq_factor = required(parameters, "low_freq_factor")?;
            let high_freq_factor = required(parameters, "high_freq_factor")?;
            if high_freq_factor <= low_freq_factor {
                let expected = format!("above low_freq_factor, {low_freq_factor}");
                return Err(parameters.invalid("high_freq_factor", &expected));
            }
            RopeScaling::Llama3 {
                factor: factor(parameters)?,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: original_context(parameters, max_positions)?,
            }
        }
        _ => return Err(parameters.unsupported(key, TYPES)),
    };
    Ok(Rope { theta, scaling })
}

fn yarn(parameters: &Keys<'_>, max_positions: usize) -> Result<RopeScaling, ModelError> {
    let original_max_position_embeddings = original_context(parameters, max_positions)?;
    let factor = match parameters.value("factor") {
        None => (max_positions as f64 / original_max_position_embeddings as f64).max(1.0),
        Some(_) => factor(parameters)?,
    };
    let magnitude = |key| -> Result<Option<f64>, ModelError> {
        let scale = parameters.number(key)?.filter(|scale| *scale != 0.0);
        Ok(scale.map(|scale| scale * (RopeScaling::yarn_attention_factor(factor) - 1.0) + 1.0))
    };
    let attention_factor = match parameters.positive("attention_factor")? {
        Some(factor) => factor,
        None => match (magnitude("mscale")?, magnitude("mscale_all_dim")?) {
            (Some(scale), Some(all)) => scale / all,
            _ => RopeScaling::yarn_attention_factor(factor),
        },
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: parameters.positive("beta_fast")?.unwrap_or(32.0),
        beta_slow: parameters.positive("beta_slow")?.unwrap_or(1.0),
        truncate: parameters.flag("truncate")?.unwrap_or(true),
        original_max_position_embeddings,
        attention_factor: attention_factor as f32,
    })
}

fn original_context(parameters: &Keys<'_>, max_positions: usize) -> Result<usize, ModelError> {
    Ok(parameters.size("original_max_position_embeddings")?.unwrap_or(max_positions))
}

fn factor(parameters: &Keys<'_>) -> Result<f64, ModelError> {
    match required(parameters, "factor")? {
        factor if factor >= 1.0 => Ok(factor),
        _ => Err(parameters.invalid("factor", "a number of at least 1")),
    }
}

fn required(parameters: &Keys<'_>, key: &str) -> Result<f64, ModelError> {
    parameters.positive(key)?.ok_or_else(|| parameters.invalid(key, "a number above 0"))
}
