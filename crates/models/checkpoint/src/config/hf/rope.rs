//! Parses the rotary embeddings of a `config.json`, from the older keys (`rope_theta`,
//! `rope_scaling`, `rope_local_base_freq`, `partial_rotary_factor`) and from the newer one
//! (`rope_parameters`, which is either flat or has one object per layer type).

use super::super::architecture::Rotation;
use super::super::keys::Keys;
use super::super::{Rope, RopeScaling};
use crate::error::ModelError;

const TYPES: &str = "default, linear, dynamic, llama3, yarn or longrope";

/// The rotary embeddings of a model.
pub(super) struct Ropes {
    pub(super) list: Vec<Rope>,
    /// Index in `list` of the rotary embedding of layers with a sliding window.
    pub(super) local: usize,
    /// Number of leading elements of each head that are rotated; `None` for all of them.
    pub(super) rotary_dim: Option<usize>,
}

/// The context in which the keys of a rotary embedding are parsed. Lengths are in positions.
#[derive(Clone, Copy)]
struct Context {
    /// Whether only a part of each head may be rotated.
    partial: bool,
    /// For the type `proportional`, the number of elements of a head, and the default of the share
    /// of its pairs that are rotated; `None` if the architecture does not have this type.
    proportional: Option<(usize, f64)>,
    max_positions: usize,
    /// Context length of the model's original training, if it is given outside of the object with
    /// the parameters.
    original: Option<usize>,
}

/// Parses the rotary embeddings of all layers. `head_dim` is the number of elements of a head in
/// layers without a sliding window, and `max_positions` the context length in positions.
pub(super) fn parse(
    rotation: &Rotation,
    keys: &Keys<'_>,
    head_dim: usize,
    max_positions: usize,
) -> Result<Ropes, ModelError> {
    let original = keys.size("original_max_position_embeddings")?.or(rotation.original_context);
    let context = Context {
        max_positions,
        original,
        partial: rotation.partial.is_some(),
        proportional: rotation.proportional.map(|share| (head_dim, share)),
    };
    context.rotary_share(keys)?;
    if let Some(local_theta) = rotation.local_theta {
        let list = global_and_local(keys, context, rotation.theta, local_theta)?;
        return Ok(Ropes { list, local: 1, rotary_dim: None });
    }
    let theta = keys.positive("rope_theta")?.unwrap_or(rotation.theta);
    let parameters = parameters(keys)?;
    let rope = match &parameters {
        Some(parameters) => {
            if parameters.given("full_attention") {
                return Err(keys.unsupported("rope_parameters", "one rope for all layers"));
            }
            one(parameters, theta, context)?
        }
        None => {
            let scaling = rotation.scaling.cloned().unwrap_or(RopeScaling::None);
            Rope { theta, scaling, sections: None }
        }
    };
    let mut share = rotation.partial;
    for keys in [keys].into_iter().chain(&parameters) {
        share = context.rotary_share(keys)?.or(share);
    }
    let rotary_dim = share.map(|share| (head_dim as f64 * share) as usize);
    let default = rotation.default_sections(rotary_dim.unwrap_or(head_dim));
    let sections = match (rotation.sections, &parameters) {
        (Some(_), Some(parameters)) => sections(parameters)?.or(default),
        _ => default,
    };
    let rope = Rope { sections, ..rope };
    let rotary_dim = rotary_dim.filter(|dim| *dim != head_dim);
    Ok(Ropes { list: vec![rope], local: 0, rotary_dim })
}

/// The object with the parameters of a rotary embedding, if there is one. If both keys are present,
/// transformers uses the older one.
pub(super) fn parameters<'a>(keys: &Keys<'a>) -> Result<Option<Keys<'a>>, ModelError> {
    match keys.object("rope_scaling")? {
        Some(older) if older.names().next().is_some() => Ok(Some(older)),
        _ => keys.object("rope_parameters"),
    }
}

/// The sections of rotary positions with three coordinates, if the file has them. transformers
/// always interleaves them and does not read `mrope_interleaved`. Models for which it is false have
/// another architecture.
fn sections(parameters: &Keys<'_>) -> Result<Option<[usize; 3]>, ModelError> {
    if parameters.flag("mrope_interleaved")? == Some(false) {
        return Err(parameters.unsupported("mrope_interleaved", "true"));
    }
    match parameters.counts("mrope_section")?.as_deref() {
        None => Ok(None),
        Some([temporal, rows, columns]) => Ok(Some([*temporal, *rows, *columns])),
        Some(_) => Err(parameters.invalid("mrope_section", "3 numbers of pairs")),
    }
}

/// The rotary embeddings of layers without a window (index 0) and of layers with a window (index
/// 1). `rope_scaling` applies to the first one. `theta` and `local_theta` are the defaults of
/// missing keys.
fn global_and_local(
    keys: &Keys<'_>,
    context: Context,
    theta: f64,
    local_theta: f64,
) -> Result<Vec<Rope>, ModelError> {
    let nested = keys.object("rope_parameters")?;
    if let Some(nested) = &nested
        && let Some(other) =
            nested.names().find(|name| !matches!(*name, "full_attention" | "sliding_attention"))
    {
        return Err(nested.invalid(other, "only the keys full_attention and sliding_attention"));
    }
    let theta_global = keys.positive("rope_theta")?.unwrap_or(theta);
    let theta_local = keys.positive("rope_local_base_freq")?.unwrap_or(local_theta);
    let layer_type = |name: &str| match &nested {
        Some(nested) => nested.object(name),
        None => Ok(None),
    };
    let mut global = match layer_type("full_attention")? {
        Some(parameters) => one(&parameters, theta_global, context)?,
        None => {
            let scaling = match context.proportional {
                Some((head_dim, share)) => first_pairs(head_dim, share, 1.0),
                None => RopeScaling::None,
            };
            Rope { theta: theta_global, scaling, sections: None }
        }
    };
    if let Some(older) = keys.object("rope_scaling")? {
        global = one(&older, global.theta, context)?;
    }
    let local = match layer_type("sliding_attention")? {
        Some(parameters) => one(&parameters, theta_local, context)?,
        None => Rope { theta: theta_local, scaling: RopeScaling::None, sections: None },
    };
    Ok(vec![global, local])
}

/// One rotary embedding from a flat object. `theta` is the default of `rope_theta`.
fn one(parameters: &Keys<'_>, theta: f64, context: Context) -> Result<Rope, ModelError> {
    let theta = parameters.positive("rope_theta")?.unwrap_or(theta);
    let key = if parameters.value("rope_type").is_some() { "rope_type" } else { "type" };
    let kind = parameters.text(key)?.unwrap_or("default");
    // transformers refuses null, which is different from a missing type.
    let is_null = parameters.given("rope_type") && parameters.value(key).is_none();
    if is_null && parameters.given("factor") {
        return Err(parameters.unsupported("rope_type", TYPES));
    }
    if let ("proportional", Some((head_dim, _))) = (kind, context.proportional) {
        let share = parameters.number("partial_rotary_factor")?.unwrap_or(1.0);
        if !(0.0..=1.0).contains(&share) {
            return Err(parameters.invalid("partial_rotary_factor", "a number from 0 to 1"));
        }
        let factor = parameters.positive("factor")?.unwrap_or(1.0);
        let scaling = first_pairs(head_dim, share, factor);
        return Ok(Rope { theta, scaling, sections: None });
    }
    context.rotary_share(parameters)?;
    let scaling = match kind {
        "default" => RopeScaling::None,
        // The frequencies change only for sequences that are longer than `max_position_embeddings`,
        // which is the longest context here.
        "dynamic" if !parameters.given("alpha") => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: required(parameters, "factor")? },
        // Files of Phi-3 may have older names of LongRoPE.
        "longrope" | "su" => long_rope(parameters, context)?,
        "yarn" if parameters.given("long_factor") => long_rope(parameters, context)?,
        "yarn" => yarn(parameters, context)?,
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
                original_max_position_embeddings: context.original(parameters)?,
            }
        }
        _ => return Err(parameters.unsupported(key, TYPES)),
    };
    Ok(Rope { theta, scaling, sections: None })
}

/// The scaling for the type `proportional`, which rotates the share `share` of the pairs of a head.
fn first_pairs(head_dim: usize, share: f64, factor: f64) -> RopeScaling {
    RopeScaling::FirstPairs { pairs: (share * head_dim as f64 / 2.0) as usize, factor }
}

fn yarn(parameters: &Keys<'_>, context: Context) -> Result<RopeScaling, ModelError> {
    let original_max_position_embeddings = context.original(parameters)?;
    let factor = context.factor(parameters)?;
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

fn long_rope(parameters: &Keys<'_>, context: Context) -> Result<RopeScaling, ModelError> {
    let original = context.original(parameters)?;
    let attention_factor = match parameters.positive("attention_factor")? {
        Some(factor) => factor,
        None => (1.0 + context.factor(parameters)?.ln() / (original as f64).ln()).sqrt(),
    };
    let key = |long| if long { "long_factor" } else { "short_factor" };
    let missing = |long| parameters.invalid(key(long), "a list of numbers");
    let read = |long| parameters.numbers(key(long));
    RopeScaling::long_rope(context.max_positions, original, attention_factor, read, missing)
}

impl Context {
    /// The share of each head that is rotated, if `keys` has it.
    fn rotary_share(self, keys: &Keys<'_>) -> Result<Option<f64>, ModelError> {
        match keys.number("partial_rotary_factor")? {
            Some(share) if share != 1.0 && !self.partial => {
                Err(keys.unsupported("partial_rotary_factor", "1.0"))
            }
            other => Ok(other),
        }
    }

    /// The context length of the model's original training.
    fn original(self, parameters: &Keys<'_>) -> Result<usize, ModelError> {
        let own = parameters.size("original_max_position_embeddings")?;
        Ok(self.original.or(own).unwrap_or(self.max_positions))
    }

    /// The factor by which the context was extended, at least 1.
    fn factor(self, parameters: &Keys<'_>) -> Result<f64, ModelError> {
        match parameters.value("factor") {
            Some(_) => factor(parameters),
            None => Ok((self.max_positions as f64 / self.original(parameters)? as f64).max(1.0)),
        }
    }
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
