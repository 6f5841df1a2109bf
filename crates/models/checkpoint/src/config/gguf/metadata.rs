//! Typed access to the metadata of a GGUF file.

use super::super::QueryScaling;
use super::super::architecture::{Description, ExpertLayers, Softcaps};
use super::super::keys::SIZE_MAX;
use crate::error::ModelError;
use crate::gguf::{Header, Value};

/// Typed access to the metadata keys that start with the architecture's name.
pub(crate) struct Metadata<'a> {
    pub(crate) header: &'a Header,
    pub(crate) prefix: &'a str,
}

impl Metadata<'_> {
    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.header.metadata.get(&format!("{}.{key}", self.prefix))
    }

    pub(crate) fn invalid(&self, key: &str, expected: &str, got: impl ToString) -> ModelError {
        ModelError::key(&self.header.file, &format!("{}.{key}", self.prefix), expected, got)
    }

    pub(crate) fn unsupported(&self, key: &str, expected: &str, got: impl ToString) -> ModelError {
        ModelError::unsupported(&self.header.file, &format!("{}.{key}", self.prefix), expected, got)
    }

    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        // Converters may write a list with a size for each layer, even if all are the same.
        let size = match value {
            Value::Integers(sizes) if sizes.windows(2).all(|pair| pair[0] == pair[1]) => {
                sizes.first().and_then(|size| u64::try_from(*size).ok())
            }
            value => value.as_u64(),
        };
        match size {
            Some(n) if (1..=SIZE_MAX).contains(&n) => Ok(Some(n as usize)),
            _ => Err(self.invalid(key, &format!("an integer from 1 to {SIZE_MAX}"), value.shown())),
        }
    }

    pub(crate) fn required_size(&self, key: &str) -> Result<usize, ModelError> {
        self.size(key)?.ok_or_else(|| self.invalid(key, "an integer", "nothing"))
    }

    /// A finite number above 0.
    pub(crate) fn float(&self, key: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number.is_finite() && number > 0.0 => Ok(Some(number)),
            _ => Err(self.invalid(key, "a finite number above 0", value.shown())),
        }
    }

    /// A factor above 0; `None` if it is missing or 0, which both mean the default, as in
    /// llama.cpp.
    pub(super) fn factor(&self, key: &str) -> Result<Option<f32>, ModelError> {
        Ok(self.wide_factor(key)?.map(|factor| factor as f32))
    }

    /// The same as [`Self::factor`], in f64.
    pub(super) fn wide_factor(&self, key: &str) -> Result<Option<f64>, ModelError> {
        match self.value(key).and_then(Value::as_f64) {
            Some(0.0) => Ok(None),
            _ => self.float(key),
        }
    }

    /// Number of leading elements of each head that are rotated; `None` for all of them.
    pub(super) fn rotary_dim(
        &self,
        row: &Description,
        head_dim: usize,
    ) -> Result<Option<usize>, ModelError> {
        if let Some(value_dim) = self.size("attention.value_length")?
            && value_dim != head_dim
        {
            let expected = format!("{head_dim} (equal to attention.key_length)");
            return Err(self.unsupported("attention.value_length", &expected, value_dim));
        }
        // In files of models without rotary embeddings, the key may refer to other heads.
        if row.rotation.nowhere {
            return Ok(None);
        }
        let key = "rope.dimension_count";
        match self.size(key)?.filter(|dim| *dim != head_dim) {
            Some(dim) if row.rotation.partial.is_none() => {
                Err(self.unsupported(key, &head_dim.to_string(), dim))
            }
            dim => Ok(dim),
        }
    }

    /// The factor of queries that grows with the position.
    pub(super) fn query_scaling(
        &self,
        row: &Description,
    ) -> Result<Option<QueryScaling>, ModelError> {
        if row.query_scaling.is_none() {
            return Ok(None);
        }
        let Some(beta) = self.factor("attention.temperature_scale")? else { return Ok(None) };
        let step = self.required_size("rope.scaling.original_context_length")?;
        Ok(Some(QueryScaling { beta, step }))
    }

    /// A soft cap; `default` if the key is missing.
    pub(super) fn softcap(
        &self,
        row: &Description,
        key: &str,
        default: impl Fn(Softcaps) -> Option<f32>,
    ) -> Result<Option<f32>, ModelError> {
        match (self.float(key)?, row.softcaps) {
            (Some(cap), None) => Err(self.unsupported(key, "nothing", cap)),
            (None, caps) => Ok(caps.and_then(default)),
            (Some(cap), Some(_)) => Ok(Some(cap as f32)),
        }
    }

    pub(crate) fn required_float(&self, key: &str) -> Result<f64, ModelError> {
        self.float(key)?.ok_or_else(|| self.invalid(key, "a number", "nothing"))
    }

    /// Returns an error for an option that is not implemented and would change the output.
    pub(super) fn refuse_options(&self, row: &Description) -> Result<(), ModelError> {
        let key = "expert_group_count";
        let groups = self.value(key).filter(|count| !matches!(count.as_u64(), Some(0 | 1)));
        if let Some(count) = groups
            && row.experts.is_none_or(|experts| experts.groups.is_none())
        {
            return Err(self.unsupported(key, "1", count.shown()));
        }
        if row.latent.is_none() {
            // Architectures with a factor of queries have the value 1, with which YaRN's attention
            // factor is 1.
            let multiplier = if row.query_scaling.is_some() { 1.0 } else { 0.0 };
            self.only("rope.scaling.yarn_log_multiplier", multiplier)?;
        }
        self.only("moe_latent_size", 0.0)?;
        // In these architectures, the tensors determine which layers have experts, so the key may
        // have any value.
        let after_dense = |layers: ExpertLayers| {
            matches!(layers, ExpertLayers::AllButFirst(..) | ExpertLayers::Types(_))
        };
        if !row.experts.is_some_and(|experts| after_dense(experts.layers)) {
            self.only("leading_dense_block_count", 0.0)?;
        }
        if let Some(causal) = self.value("attention.causal")
            && causal.as_bool() != Some(true)
        {
            return Err(self.unsupported("attention.causal", "true", causal.shown()));
        }
        if !row.multipliers {
            for key in ["attention.scale", "embedding_scale", "residual_scale"] {
                self.only(key, 0.0)?;
            }
            if row.logit_scale.is_none() {
                self.only("logit_scale", 0.0)?;
            }
        }
        Ok(())
    }

    /// Returns an error if the key is present with a value other than `neutral`, which has no
    /// effect.
    pub(crate) fn only(&self, key: &str, neutral: f64) -> Result<(), ModelError> {
        match self.value(key) {
            Some(value) if value.as_f64() != Some(neutral) => {
                Err(self.unsupported(key, "nothing", value.shown()))
            }
            _ => Ok(()),
        }
    }
}
