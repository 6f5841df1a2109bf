//! Parses the latent attention of a `config.json`.

use super::super::architecture::Description;
use super::super::keys::Keys;
use super::super::{LatentSizes, RopeScaling};
use super::rope;
use crate::error::ModelError;

/// The sizes of latent attention, if the architecture has it. If so, all layers have it.
pub(super) fn parse(row: &Description, keys: &Keys<'_>) -> Result<Option<LatentSizes>, ModelError> {
    let Some(defaults) = row.latent else { return Ok(None) };
    for key in ["rope_interleave", "attention_bias"] {
        let implemented = key == "rope_interleave";
        if keys.flag(key)?.is_some_and(|flag| flag != implemented) {
            return Err(keys.unsupported(key, &implemented.to_string()));
        }
    }
    let size = |key: &str, default| keys.size(key).map(|size| size.unwrap_or(default));
    Ok(Some(LatentSizes {
        width: size("kv_lora_rank", defaults.width)?,
        rotary_dim: size("qk_rope_head_dim", defaults.rotary_dim)?,
        key_dim: size("qk_nope_head_dim", defaults.key_dim)?,
        value_dim: size("v_head_dim", defaults.value_dim)?,
        // Null means that queries have no low-rank vector, while a missing key means the default.
        query_rank: match keys.given("q_lora_rank") {
            true => keys.size("q_lora_rank")?,
            false => defaults.query_rank,
        },
    }))
}

/// The factor of the scores of latent attention with YaRN, which follows from the key
/// `mscale_all_dim`; 1 without YaRN.
pub(super) fn score_factor(
    row: &Description,
    latent: Option<LatentSizes>,
    keys: &Keys<'_>,
) -> Result<f32, ModelError> {
    let Some(latent) = latent else { return Ok(1.0) };
    let Some(parameters) = rope::parameters(keys)? else {
        return Ok(match row.rotation.scaling {
            Some(RopeScaling::Yarn { factor, .. }) => RopeScaling::yarn_score_factor(*factor, 1.0),
            _ => 1.0,
        });
    };
    // The value 1 means that the key is not used. Any other value must be the share of the rotated
    // part.
    let key = "partial_rotary_factor";
    let share = parameters.number(key)?.filter(|share| *share != 1.0);
    let rotated = share.map(|share| (share * latent.query_dim() as f64) as usize);
    if rotated.is_some_and(|rotated| rotated != latent.rotary_dim) {
        return Err(parameters.unsupported(key, "the share of qk_rope_head_dim"));
    }
    let factor = parameters.positive("factor")?.unwrap_or(1.0);
    let all = parameters.number("mscale_all_dim")?.unwrap_or(0.0);
    Ok(RopeScaling::yarn_score_factor(factor, all))
}
