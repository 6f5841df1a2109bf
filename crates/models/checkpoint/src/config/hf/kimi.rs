//! Parses the keys of Kimi Linear for its layers with Kimi Delta Attention. Published files have
//! them in an object, and newer files have the keys of transformers.

use super::super::DeltaNetConfig;
use super::super::keys::Keys;
use crate::error::ModelError;

/// The object with the keys of published files.
const OBJECT: &str = "linear_attn_config";

/// For each of `count` layers, whether it has Kimi Delta Attention, for files without the key
/// `layer_types`.
pub(super) fn recurrent_layers(keys: &Keys<'_>, count: usize) -> Result<Vec<bool>, ModelError> {
    let key = "full_attn_layers";
    let object = keys.object(OBJECT)?;
    let listed = match &object {
        Some(object) => object.counts(key)?.map(|attention| (object, attention)),
        None => None,
    };
    let Some((object, attention)) = listed else {
        // The default is the same as in transformers.
        return Ok((0..count).map(|layer| layer == 0 || layer % 4 != 0).collect());
    };
    let misfit =
        || object.invalid(key, &format!("with kda_layers, each number from 1 to {count} once"));
    let others = object.counts("kda_layers")?.unwrap_or_default();
    let mut recurrent = vec![None; count];
    let numbers = attention.into_iter().map(|number| (number, false));
    for (number, is_recurrent) in numbers.chain(others.into_iter().map(|number| (number, true))) {
        // Layers are counted from 1.
        match recurrent.get_mut(number.wrapping_sub(1)) {
            Some(layer @ None) => *layer = Some(is_recurrent),
            _ => return Err(misfit()),
        }
    }
    recurrent.into_iter().collect::<Option<_>>().ok_or_else(misfit)
}

/// The sizes of the layers with Kimi Delta Attention.
pub(super) fn sizes(
    defaults: DeltaNetConfig,
    keys: &Keys<'_>,
) -> Result<DeltaNetConfig, ModelError> {
    if keys.flag("mla_use_nope")? == Some(false) {
        return Err(keys.unsupported("mla_use_nope", "true"));
    }
    if keys.text("moe_router_activation_func")?.is_some_and(|function| function != "sigmoid") {
        return Err(keys.unsupported("moe_router_activation_func", "sigmoid"));
    }
    if keys.size("moe_layer_freq")?.is_some_and(|step| step != 1) {
        return Err(keys.unsupported("moe_layer_freq", "1"));
    }
    let object = keys.object(OBJECT)?;
    let size = |published: &str, key: &str, default| {
        let own = match &object {
            Some(object) => object.size(published)?,
            None => None,
        };
        Ok::<_, ModelError>(own.or(keys.size(key)?).unwrap_or(default))
    };
    let heads = size("num_heads", "linear_num_heads", defaults.value_heads)?;
    let dim = size("head_dim", "linear_head_dim", defaults.value_dim)?;
    let taps = size("short_conv_kernel_size", "linear_conv_kernel_dim", defaults.taps)?;
    Ok(DeltaNetConfig::kimi(heads, dim, taps, defaults.log_rates))
}
