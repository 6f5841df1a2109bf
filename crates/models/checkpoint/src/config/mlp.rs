//! The description of the second half of a layer, after its mixers.

use super::attention::check_positive;
use super::keys::SIZE_MAX;
use super::{DecoderConfig, ExpertsConfig, NormPlacement};
use crate::error::ModelError;

/// The second half of a layer, after its mixers.
#[allow(clippy::large_enum_variant, reason = "there is one per layer")]
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FeedForwardConfig {
    /// One MLP for all tokens.
    Dense(MlpConfig),
    /// A mixture of experts.
    Experts(ExpertsConfig),
    /// Both, next to each other. Each reads the residual stream through a norm of its own, and both
    /// outputs are normalized before they are added (Gemma 4).
    DenseAndExperts(MlpConfig, ExpertsConfig),
}

/// An MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlpConfig {
    /// Number of inner features.
    pub width: usize,
    /// The activation of the inner features.
    pub activation: Activation,
    /// Whether `gate_proj`, `up_proj` and `down_proj` have biases.
    pub bias: bool,
    /// Factor of the output (Falcon-H1), above 0.
    pub output_factor: f32,
}

/// The activation of the inner features of an MLP or an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// With a gate: `down(function(factor * gate(x)) * up(x))`.
    Gated(GateConfig),
    /// Without a gate: `down(function(up(x)))`.
    Plain(PlainFunction),
}

/// The gate of an MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GateConfig {
    /// The function.
    pub function: GateFunction,
    /// Factor of the gate before the function (Falcon-H1), above 0.
    pub factor: f32,
}

/// The function of a gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GateFunction {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU in its tanh approximation (`gelu_pytorch_tanh`).
    GeluTanh,
    /// The gate of gpt-oss: `x * sigmoid(alpha * x)`, where `x` is at most `limit`. The other
    /// operand of the gate is clamped to `-limit..=limit`, and 1 is added to it.
    ClampedSwiglu {
        /// Factor of the sigmoid's argument, above 0.
        alpha: f32,
        /// Bound of both inputs, above 0.
        limit: f32,
    },
}

/// The activation function of an MLP without a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainFunction {
    /// GELU with the error function.
    Gelu,
    /// GELU in its tanh approximation (`gelu_pytorch_tanh`).
    GeluTanh,
    /// `max(x, 0)^2` (Nemotron-H).
    SquaredRelu,
}

impl From<GateFunction> for Activation {
    fn from(function: GateFunction) -> Self {
        Self::Gated(GateConfig { function, factor: 1.0 })
    }
}

impl Activation {
    /// Checks the documented ranges. `file` is the file's name in error messages.
    pub(super) fn check(self, file: &str) -> Result<(), ModelError> {
        let Self::Gated(GateConfig { function, factor }) = self else { return Ok(()) };
        check_positive(file, "mlp_multipliers", factor)?;
        if let GateFunction::ClampedSwiglu { alpha, limit } = function {
            check_positive(file, "swiglu_alpha", alpha)?;
            check_positive(file, "swiglu_limit", limit)?;
        }
        Ok(())
    }
}

impl FeedForwardConfig {
    /// The MLP for all tokens, if there is one.
    #[must_use]
    pub fn dense(&self) -> Option<&MlpConfig> {
        match self {
            Self::Dense(mlp) | Self::DenseAndExperts(mlp, _) => Some(mlp),
            Self::Experts(_) => None,
        }
    }

    /// Checks the documented ranges. `layers` is the number of layers with experts, and `file` the
    /// file's name in error messages.
    pub(super) fn check(&self, file: &str, layers: usize) -> Result<(), ModelError> {
        if let Some(mlp) = self.dense() {
            if mlp.width == 0 || mlp.width as u64 > SIZE_MAX {
                let expected = format!("1 to {SIZE_MAX}");
                return Err(ModelError::key(file, "intermediate_size", expected, mlp.width));
            }
            check_positive(file, "mlp_multipliers", mlp.output_factor)?;
            mlp.activation.check(file)?;
        }
        match self {
            Self::Dense(_) => Ok(()),
            Self::Experts(experts) | Self::DenseAndExperts(_, experts) => {
                experts.check(file, layers)
            }
        }
    }
}

impl DecoderConfig {
    /// Checks that the placement of norms is supported together with experts. `file` is the file's
    /// name in error messages.
    pub(super) fn check_experts(&self, file: &str) -> Result<(), ModelError> {
        let layers = self.layers.iter().filter(|layer| layer.has_experts()).count();
        if layers == 0 {
            return Ok(());
        }
        let mut kinds = self.layers.iter().map(|layer| &layer.mlp);
        let next_to_mlp = |mlp: &Option<FeedForwardConfig>| {
            matches!(mlp, Some(FeedForwardConfig::DenseAndExperts(..)))
        };
        let is_known = match self.norms.placement {
            NormPlacement::InputAndOutput => kinds.all(next_to_mlp),
            norms => !norms.outputs() && !kinds.any(next_to_mlp),
        };
        if is_known {
            return Ok(());
        }
        let expected = "norms of the inputs of experts, or also of the outputs of experts and an \
                        MLP next to each other in all layers";
        Err(ModelError::unsupported(file, "num_experts", expected, layers))
    }
}
