//! Parses the rotary embeddings of a GGUF file.

use super::super::architecture::Description;
use super::super::{Rope, RopeScaling};
use super::{Metadata, SmallTensors};
use crate::error::ModelError;
use crate::gguf::Value;

/// Name of the tensor with Llama 3.1's rope scaling.
const ROPE_FREQS: &str = "rope_freqs.weight";
/// Names of the tensors with the divisors of LongRoPE for long and short contexts.
const ROPE_LONG: &str = "rope_factors_long.weight";
const ROPE_SHORT: &str = "rope_factors_short.weight";

impl Metadata<'_> {
    /// The rotary embedding of layers without a sliding window, which rotates `rotary_dim` elements
    /// of a head.
    pub(super) fn rope(
        &self,
        row: &Description,
        (rotary_dim, max_positions): (usize, usize),
        tensors: &SmallTensors<'_>,
    ) -> Result<Rope, ModelError> {
        // The default is the same as in llama.cpp.
        let default = if row.rotation.local_theta.is_some() { row.rotation.theta } else { 1e4 };
        let theta = self.float("rope.freq_base")?.unwrap_or(default);
        let scaling = if let Some(divisors) = tensors(ROPE_FREQS)? {
            self.only("rope.scaling.attn_factor", 1.0)?;
            match row.rotation.proportional.and_then(|_| first_pairs(&divisors)) {
                Some(pairs) => RopeScaling::FirstPairs { pairs, factor: 1.0 },
                None => RopeScaling::Divisors { divisors, attention_factor: 1.0, short: None },
            }
        } else if self.header.tensors.contains_key(ROPE_LONG) {
            self.long_rope(max_positions, tensors)?
        } else {
            self.scaling(row)?
        };
        Ok(Rope { theta, scaling, sections: self.sections(row, rotary_dim)? })
    }

    /// The sections of rotary positions with three coordinates. Files may have four numbers, the
    /// last of which is for models with four coordinates.
    fn sections(
        &self,
        row: &Description,
        rotary_dim: usize,
    ) -> Result<Option<[usize; 3]>, ModelError> {
        let key = "rope.dimension_sections";
        let Some(value) = self.value(key).filter(|_| row.rotation.sections.is_some()) else {
            return Ok(row.rotation.default_sections(rotary_dim));
        };
        let size = |number: &i64| usize::try_from(*number).ok();
        let sections = match value {
            Value::Integers(numbers) => match &numbers[..] {
                [temporal, rows, columns] | [temporal, rows, columns, 0] => {
                    size(temporal).zip(size(rows)).zip(size(columns))
                }
                _ => None,
            },
            _ => None,
        };
        let Some(((temporal, rows), columns)) = sections else {
            return Err(self.invalid(key, "3 numbers of pairs, and 0", value.shown()));
        };
        Ok(Some([temporal, rows, columns]))
    }

    /// LongRoPE, whose divisors are tensors.
    fn long_rope(
        &self,
        max_positions: usize,
        tensors: &SmallTensors<'_>,
    ) -> Result<RopeScaling, ModelError> {
        let original = self.size("rope.scaling.original_context_length")?.unwrap_or(max_positions);
        let attention_factor = self.float("rope.scaling.attn_factor")?.unwrap_or(1.0);
        let name = |long| if long { ROPE_LONG } else { ROPE_SHORT };
        let missing = |long| ModelError::MissingTensor {
            file: self.header.file.clone(),
            tensor: name(long).into(),
            expected: vec![],
        };
        let read = |long| tensors(name(long));
        RopeScaling::long_rope(max_positions, original, attention_factor, read, missing)
    }

    fn scaling(&self, row: &Description) -> Result<RopeScaling, ModelError> {
        let key = "rope.scaling.type";
        let kind = match self.value(key) {
            None => None,
            Some(value) => {
                Some(value.as_text().ok_or_else(|| self.invalid(key, "a string", value.shown()))?)
            }
        };
        let factor = self.wide_factor("rope.scaling.factor")?;
        let factor = factor.or(self.wide_factor("rope.scale_linear")?);
        if kind == Some("yarn") {
            return self.yarn(row, factor);
        }
        self.only("rope.scaling.attn_factor", 1.0)?;
        match (kind, factor) {
            (Some("none"), _) | (None | Some("linear"), None) => Ok(RopeScaling::None),
            (None | Some("linear"), Some(factor)) => Ok(RopeScaling::Linear { factor }),
            (Some(other), _) => {
                Err(self.unsupported(key, "none, linear or yarn (or rope_freqs.weight)", other))
            }
        }
    }

    fn yarn(&self, row: &Description, factor: Option<f64>) -> Result<RopeScaling, ModelError> {
        self.only("rope.scaling.yarn_ext_factor", 1.0)?;
        let factor = match factor {
            Some(factor) if factor >= 1.0 => factor,
            other => {
                let got = other.map_or_else(|| "nothing".to_owned(), |factor| factor.to_string());
                return Err(self.invalid("rope.scaling.factor", "a number of at least 1", got));
            }
        };
        let float = |key, default| self.float(key).map(|value| value.unwrap_or(default));
        let scaled = self.value("rope.scaling.yarn_log_multiplier").is_none();
        let attention_factor =
            if scaled { RopeScaling::yarn_attention_factor(factor) } else { 1.0 }
                * float("rope.scaling.attn_factor", 1.0)?
                * float("rope.scaling.yarn_attn_factor", 1.0)?;
        let original = match self.size("rope.scaling.original_context_length")? {
            Some(original) => original,
            None => self.required_size("context_length")?,
        };
        Ok(RopeScaling::Yarn {
            factor,
            beta_fast: float("rope.scaling.yarn_beta_fast", 32.0)?,
            beta_slow: float("rope.scaling.yarn_beta_slow", 1.0)?,
            // The metadata has no key for `truncate`.
            truncate: !matches!(
                row.rotation.scaling,
                Some(RopeScaling::Yarn { truncate: false, .. })
            ),
            original_max_position_embeddings: original,
            attention_factor: attention_factor as f32,
        })
    }
}

/// Number of the first pairs that are rotated, if the other pairs are not rotated. The converter of
/// Gemma 4 writes the divisor 1 for the rotated pairs, and 1e30 for the others. `None` for other
/// divisors.
fn first_pairs(divisors: &[f32]) -> Option<usize> {
    let rotated = divisors.iter().take_while(|divisor| **divisor == 1.0).count();
    divisors[rotated..].iter().all(|divisor| *divisor >= 1e30).then_some(rotated)
}
