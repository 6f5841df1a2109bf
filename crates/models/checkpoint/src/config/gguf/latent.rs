//! Parses the latent attention of a GGUF file.

use super::super::architecture::Description;
use super::super::{LatentSizes, RopeScaling};
use super::Metadata;
use crate::error::ModelError;

impl Metadata<'_> {
    /// The sizes of latent attention, if the architecture has it.
    pub(super) fn latent(&self, row: &Description) -> Result<Option<LatentSizes>, ModelError> {
        if row.latent.is_none() {
            return Ok(None);
        }
        // In older files, these keys have the sizes of all heads. In newer files, they have the
        // size of the one key head that is kept, and the keys with the suffix `_mla` have the sizes
        // of all heads.
        let length = |key: &str| match self.size(&format!("attention.{key}_mla"))? {
            Some(length) => Ok(length),
            None => self.required_size(&format!("attention.{key}")),
        };
        let rotary_dim = self.required_size("rope.dimension_count")?;
        let query_dim = length("key_length")?;
        if query_dim <= rotary_dim {
            let expected = format!("more than rope.dimension_count, {rotary_dim}");
            return Err(self.invalid("attention.key_length_mla", &expected, query_dim));
        }
        Ok(Some(LatentSizes {
            width: self.required_size("attention.kv_lora_rank")?,
            rotary_dim,
            key_dim: query_dim - rotary_dim,
            value_dim: length("value_length")?,
            query_rank: self.size("attention.q_lora_rank")?,
        }))
    }

    /// The factor of the scores of latent attention with YaRN; 1 without YaRN.
    pub(super) fn latent_score_factor(
        &self,
        latent: Option<LatentSizes>,
    ) -> Result<f32, ModelError> {
        let factor = self.wide_factor("rope.scaling.factor")?.unwrap_or(1.0);
        // This key is a tenth of the Hugging Face key `mscale_all_dim`.
        let tenth = self.factor("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0);
        let all = if latent.is_some() { 10.0 * f64::from(tenth) } else { 0.0 };
        Ok(RopeScaling::yarn_score_factor(factor, all))
    }
}
