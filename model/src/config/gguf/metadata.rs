//! Typed access to the metadata of a GGUF file.

use super::super::keys::SIZE_MAX;
use crate::error::ModelError;
use crate::gguf::{Header, Value};

/// Typed access to the metadata keys that start with the architecture's name.
pub(super) struct Metadata<'a> {
    pub(super) header: &'a Header,
    pub(super) prefix: &'a str,
}

impl Metadata<'_> {
    pub(super) fn value(&self, key: &str) -> Option<&Value> {
        self.header.metadata.get(&format!("{}.{key}", self.prefix))
    }

    pub(super) fn invalid(&self, key: &str, expected: &str, got: impl ToString) -> ModelError {
        ModelError::key(&self.header.file, &format!("{}.{key}", self.prefix), expected, got)
    }

    pub(super) fn unsupported(&self, key: &str, expected: &str, got: impl ToString) -> ModelError {
        ModelError::unsupported(&self.header.file, &format!("{}.{key}", self.prefix), expected, got)
    }

    pub(super) fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if (1..=SIZE_MAX).contains(&n) => Ok(Some(n as usize)),
            _ => Err(self.invalid(key, &format!("an integer from 1 to {SIZE_MAX}"), value.shown())),
        }
    }

    pub(super) fn required_size(&self, key: &str) -> Result<usize, ModelError> {
        self.size(key)?.ok_or_else(|| self.invalid(key, "an integer", "nothing"))
    }

    /// A finite number above 0.
    pub(super) fn float(&self, key: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number.is_finite() && number > 0.0 => Ok(Some(number)),
            _ => Err(self.invalid(key, "a finite number above 0", value.shown())),
        }
    }

    /// A factor above 0; `None` if it is missing or 0, which means the default as in llama.cpp.
    pub(super) fn factor(&self, key: &str) -> Result<Option<f32>, ModelError> {
        match self.value(key).and_then(Value::as_f64) {
            Some(0.0) => Ok(None),
            _ => Ok(self.float(key)?.map(|factor| factor as f32)),
        }
    }

    pub(super) fn required_float(&self, key: &str) -> Result<f64, ModelError> {
        self.float(key)?.ok_or_else(|| self.invalid(key, "a number", "nothing"))
    }

    /// Returns an error for an option that is not implemented and would change the output.
    pub(super) fn refuse_options(&self, granite: bool) -> Result<(), ModelError> {
        for key in [
            "expert_group_count",
            "expert_weights_scale",
            "leading_dense_block_count",
            "rope.scaling.yarn_log_multiplier",
        ] {
            self.only(key, 0.0)?;
        }
        if let Some(causal) = self.value("attention.causal")
            && causal.as_bool() != Some(true)
        {
            return Err(self.unsupported("attention.causal", "true", causal.shown()));
        }
        if !granite {
            for key in ["attention.scale", "embedding_scale", "residual_scale", "logit_scale"] {
                self.only(key, 0.0)?;
            }
        }
        Ok(())
    }

    /// Returns an error if the key is present with another value than `neutral`, with which it has
    /// no effect.
    pub(super) fn only(&self, key: &str, neutral: f64) -> Result<(), ModelError> {
        match self.value(key) {
            Some(value) if value.as_f64() != Some(neutral) => {
                Err(self.unsupported(key, "nothing", value.shown()))
            }
            _ => Ok(()),
        }
    }
}
