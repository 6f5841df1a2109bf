//! Parses the keys of Granite 4, of which only models without Mamba layers and experts are supported.

use super::super::LayerConfig;
use super::super::architecture::Description;
use super::super::keys::Keys;
use crate::error::ModelError;

/// Refuses Mamba layers and experts, and sets which layers have a rotary embedding: all or none.
pub(super) fn parse(
    row: &Description,
    keys: &Keys<'_>,
    layers: &mut [LayerConfig],
) -> Result<(), ModelError> {
    if !row.mamba {
        return Ok(());
    }
    let kinds = keys.texts("layer_types")?.unwrap_or_default();
    let all_attention = kinds.iter().all(|kind| ["attention", "full_attention"].contains(kind));
    if kinds.len() != layers.len() || !all_attention {
        let expected = format!("{} layers with `attention`, and none with Mamba", layers.len());
        return Err(keys.unsupported("layer_types", &expected));
    }
    if keys.count("num_local_experts")? != Some(0) {
        return Err(keys.unsupported("num_local_experts", "0"));
    }
    let key = "position_embedding_type";
    match keys.text(key)? {
        Some("rope") => {}
        None | Some("nope") => layers.iter_mut().for_each(|layer| layer.rope = None),
        Some(_) => return Err(keys.unsupported(key, "rope or nope")),
    }
    Ok(())
}
