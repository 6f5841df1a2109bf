//! Parses the sliding windows and rotary embeddings of the layers of a `config.json`.

use super::super::architecture::{Description, Mamba, Pattern, Windows};
use super::super::keys::Keys;
use super::super::{LAYERS_MAX, LayerConfig};
use super::{nemotron, rope};
use crate::error::ModelError;

/// Default of `max_window_layers`.
const WINDOW_LAYERS: usize = 28;

/// The layers with their sliding window and rotary embedding. `local` is the index of the rotary
/// embedding of layers with a sliding window, and `plain` is a layer that has neither.
pub(super) fn parse(
    row: &Description,
    keys: &Keys<'_>,
    local: usize,
    plain: &LayerConfig,
) -> Result<Vec<LayerConfig>, ModelError> {
    let count = match row.mamba {
        Some(Mamba::Nemotron) => nemotron::blocks(keys)?.len(),
        _ => keys.size("num_hidden_layers")?.unwrap_or(row.defaults.num_layers),
    };
    if count > LAYERS_MAX {
        return Err(keys.invalid("num_hidden_layers", &format!("at most {LAYERS_MAX}")));
    }
    let window = window(row, keys)?;
    let rotated = match row.rotation.unrotated_step {
        _ if row.rotation.nowhere => vec![false; count],
        Some(step) => rotated_layers(keys, count, step)?,
        None => vec![true; count],
    };
    let kinds = keys.texts("layer_types")?;
    let is_sliding = match row.windows {
        Windows::Nowhere => vec![false; count],
        Windows::Everywhere => vec![true; count],
        Windows::Some(pattern) => match kinds {
            Some(kinds) => listed(&kinds, "sliding_attention", keys, count)?,
            None => by_pattern(pattern, keys, &rotated)?,
        },
    };
    let local_only = row.rotation.local_only && window.is_some();
    let is_rotated = |layer: usize| rotated[layer] && (is_sliding[layer] || !local_only);
    check_thetas(row, keys, count, is_rotated)?;
    let layer = |index: usize| {
        let rope = is_rotated(index).then_some(if is_sliding[index] { local } else { 0 });
        plain.at(rope, window.filter(|_| is_sliding[index]))
    };
    Ok((0..count).map(layer).collect())
}

/// Checks the list `layer_rope_theta` (Muse Glimmer), which repeats what other keys say: for each
/// layer the theta of the rotary embedding, or 0 if it has none.
fn check_thetas(
    row: &Description,
    keys: &Keys<'_>,
    count: usize,
    is_rotated: impl Fn(usize) -> bool,
) -> Result<(), ModelError> {
    let key = "layer_rope_theta";
    let Some(thetas) = keys.numbers(key)? else { return Ok(()) };
    let theta = match rope::parameters(keys)? {
        Some(parameters) => parameters.positive("rope_theta")?,
        None => keys.positive("rope_theta")?,
    };
    let theta = theta.unwrap_or(row.rotation.theta) as f32;
    let expected = |layer| if is_rotated(layer) { theta } else { 0.0 };
    if thetas.len() == count && (0..count).all(|layer| thetas[layer] == expected(layer)) {
        return Ok(());
    }
    let expected = format!("{theta} for the layers with a sliding window, and 0 for the others");
    Err(keys.unsupported(key, &expected))
}

/// The window of the layers with a sliding window.
fn window(row: &Description, keys: &Keys<'_>) -> Result<Option<usize>, ModelError> {
    // Without the flag, these architectures ignore the window, which may then be 0.
    if row.windows_need_flag && !keys.flag("use_sliding_window")?.unwrap_or(false) {
        return Ok(None);
    }
    match keys.given("sliding_window") {
        // The key is ignored, and may be 0.
        _ if matches!(row.windows, Windows::Nowhere) => Ok(None),
        true => keys.size("sliding_window"),
        false => Ok(row.defaults.sliding_window),
    }
}

/// For each of the `count` layers, whether its kind is `other` instead of `full_attention`. `kinds`
/// is the value of the key `layer_types`.
pub(super) fn listed(
    kinds: &[&str],
    other: &str,
    keys: &Keys<'_>,
    count: usize,
) -> Result<Vec<bool>, ModelError> {
    if kinds.len() != count {
        return Err(keys.invalid("layer_types", &format!("{count} entries, one per layer")));
    }
    let is_other = |kind: &&str| match *kind {
        "full_attention" => Ok(false),
        kind if kind == other => Ok(true),
        _ => Err(keys.unsupported("layer_types", &format!("full_attention or {other}"))),
    };
    kinds.iter().map(is_other).collect()
}

/// For each layer, whether it has a window, if there is no list. `rotated` says for each layer
/// whether it has a rotary embedding.
fn by_pattern(
    pattern: Pattern,
    keys: &Keys<'_>,
    rotated: &[bool],
) -> Result<Vec<bool>, ModelError> {
    let max_window_layers =
        || keys.count("max_window_layers").map(|count| count.unwrap_or(WINDOW_LAYERS));
    let layers = 0..rotated.len();
    Ok(match pattern {
        Pattern::From => {
            let first = max_window_layers()?;
            layers.map(|layer| layer >= first).collect()
        }
        Pattern::Even => layers.map(|layer| layer % 2 == 0).collect(),
        Pattern::EvenBelow => {
            let end = max_window_layers()?;
            layers.map(|layer| layer % 2 == 0 && layer < end).collect()
        }
        Pattern::AllButEvery(step) => {
            let step = keys.size("sliding_window_pattern")?.unwrap_or(step);
            layers.map(|layer| (layer + 1) % step != 0).collect()
        }
        Pattern::AllButEveryBeforeLast(step) => {
            layers.rev().map(|number| !number.is_multiple_of(step)).collect()
        }
        Pattern::Unrotated => rotated.iter().map(|rotated| !rotated).collect(),
    })
}

/// For each layer, whether it has a rotary embedding. All but every `step`-th have one, unless the
/// keys say otherwise.
fn rotated_layers(keys: &Keys<'_>, count: usize, step: usize) -> Result<Vec<bool>, ModelError> {
    // Despite its name, the list has 1 for layers with a rotary embedding.
    let key = "no_rope_layers";
    match keys.flags(key)? {
        Some(rotated) if rotated.len() >= count => Ok(rotated[..count].to_vec()),
        Some(_) => Err(keys.invalid(key, &format!("at least {count} entries, one per layer"))),
        None => {
            let interval = keys.size("no_rope_layer_interval")?.unwrap_or(step);
            Ok((1..=count).map(|number| number % interval != 0).collect())
        }
    }
}
