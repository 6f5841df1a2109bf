//! Factors within layers, which Falcon-H1 was trained with (μP).

use super::DecoderConfig;
use crate::error::ModelError;

/// Factors of parts of each layer. All are finite and above 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// Factor of the output of attention.
    pub attention_output: f32,
    /// Factor of the output of Mamba-2.
    pub mamba_output: f32,
    /// Factors of the inputs of Mamba-2: of the gates, the values, the keys, the queries and the
    /// time steps, before the biases of the convolution and of the time steps.
    pub mamba_inputs: [f32; 5],
    /// Factor of the gate of the MLP before the activation function.
    pub mlp_gate: f32,
    /// Factor of the output of the MLP.
    pub mlp_output: f32,
}

impl Multipliers {
    /// Factors without an effect.
    pub(super) const NEUTRAL: Self = Self {
        attention_output: 1.0,
        mamba_output: 1.0,
        mamba_inputs: [1.0; 5],
        mlp_gate: 1.0,
        mlp_output: 1.0,
    };
}

impl DecoderConfig {
    /// The factor of an output when it is added to the residual stream, of which `own` is that of
    /// the part of the layer; `None` for 1.
    pub fn output_scale(&self, own: impl Fn(&Multipliers) -> f32) -> Option<f32> {
        let own = self.multipliers.as_ref().map(own);
        let factors = [self.residual_scale, own].into_iter().flatten();
        Some(factors.product()).filter(|factor| *factor != 1.0)
    }

    /// Checks the documented range, and that the forward pass has the combination. `file` is the
    /// file's name in error messages.
    pub(super) fn check_multipliers(&self, file: &str) -> Result<(), ModelError> {
        let Some(multipliers) = &self.multipliers else { return Ok(()) };
        let Multipliers { attention_output, mamba_output, mamba_inputs, mlp_gate, mlp_output } =
            multipliers;
        let all = [attention_output, mamba_output, mlp_gate, mlp_output];
        let is_factor = |factor: &&f32| factor.is_normal() && **factor > 0.0;
        if let Some(other) = all.into_iter().chain(mamba_inputs).find(|factor| !is_factor(factor)) {
            return Err(ModelError::key(file, "multipliers", "finite numbers above 0", other));
        }
        if self.experts.is_some() || !self.mlp_gate {
            let expected = "dense MLPs with gates in layers with multipliers";
            return Err(ModelError::unsupported(file, "multipliers", expected, "others"));
        }
        Ok(())
    }
}
