//! Parses the sizes of the layers with Mamba-2 of a GGUF file.

use super::super::Mamba2Config;
use super::Metadata;
use crate::error::ModelError;

impl Metadata<'_> {
    /// The sizes of Mamba-2. The optional parts follow from the tensors of layer `first`.
    pub(super) fn mamba2(&self, first: usize) -> Result<Mamba2Config, ModelError> {
        let has = |name: &str| self.header.tensors.contains_key(&format!("blk.{first}.{name}"));
        let (heads, head_dim) = self.recurrent_heads()?;
        Ok(Mamba2Config {
            heads,
            head_dim,
            groups: self.required_size("ssm.group_count")?,
            state_dim: self.required_size("ssm.state_size")?,
            taps: self.required_size("ssm.conv_kernel")?,
            convolution_bias: has("ssm_conv1d.bias"),
            norm: has("ssm_norm.weight"),
            log_rates: false,
            // Converters have already multiplied the weights by these factors.
            input_factors: [1.0; 5],
            output_factor: 1.0,
        })
    }

    /// The number of heads of recurrent layers, and the number of values of each.
    pub(super) fn recurrent_heads(&self) -> Result<(usize, usize), ModelError> {
        let heads = self.required_size("ssm.time_step_rank")?;
        let key = "ssm.inner_size";
        let inner = self.required_size(key)?;
        if !inner.is_multiple_of(heads) {
            let expected = format!("a multiple of ssm.time_step_rank, {heads}");
            return Err(self.invalid(key, &expected, inner));
        }
        Ok((heads, inner / heads))
    }
}
