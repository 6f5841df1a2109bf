//! The weights of the second half of layers: MLPs and mixtures of experts.

use super::{LinearWeights, NormWeights, StackedWeights, TensorRole, TensorSpec};
use super::{factors, linear};
use crate::config::{
    Activation, DecoderConfig, ExpertScores, ExpertsConfig, FeedForwardConfig, GateConfig,
    MlpConfig, NormKind, PlainFunction,
};

/// An MLP, with or without a gate.
#[derive(Clone, Debug, PartialEq)]
pub struct MlpWeights {
    /// The projections to the inner features.
    pub inputs: MlpInputs,
    /// The projection back to `hidden_size`.
    pub down: LinearWeights,
    /// Factor by which the output is multiplied.
    pub output_factor: f32,
}

impl MlpWeights {
    /// The projections in the order in which they are applied.
    #[must_use]
    pub fn linears(self) -> Vec<LinearWeights> {
        let Self { inputs, down, output_factor: _ } = self;
        match inputs {
            MlpInputs::Gated(gate_up, _) => gate_up.parts.into_iter().chain([down]).collect(),
            MlpInputs::Plain(up, _) => vec![up, down],
        }
    }
}

/// The projections to the inner features of an MLP.
#[allow(clippy::large_enum_variant, reason = "most MLPs have the large variant")]
#[derive(Clone, Debug, PartialEq)]
pub enum MlpInputs {
    /// `gate` and `up` of an MLP with a gate.
    Gated(StackedWeights<2>, GateConfig),
    /// `up` of an MLP without a gate.
    Plain(LinearWeights, PlainFunction),
}

/// A mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsWeights {
    /// The configuration, which says how experts are chosen.
    pub config: ExpertsConfig,
    /// The RMS norm of the router's input, with the weights times the square root of `hidden_size`.
    /// `None` if the router reads the input of the experts.
    pub router_norm: Option<NormWeights>,
    /// The projection to the score of each expert, `[experts, hidden_size]`.
    pub router: LinearWeights,
    /// The bias of each expert's score, `[experts]`. It affects only which experts are chosen.
    pub bias: Option<TensorSpec>,
    /// The factor of each expert's weight, `[experts]`; `None` for 1.
    pub factors: Option<TensorSpec>,
    /// One MLP per expert.
    pub experts: Vec<MlpWeights>,
    /// The expert that all tokens use in addition.
    pub shared: Option<SharedExpertWeights>,
}

/// An expert that all tokens use.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedExpertWeights {
    /// Its MLP.
    pub mlp: MlpWeights,
    /// The projection to a score, `[1, hidden_size]`, whose sigmoid is the factor of the expert's
    /// output; `None` for the factor 1.
    pub gate: Option<LinearWeights>,
}

/// The weights of the second half of a layer, after its mixers.
#[allow(clippy::large_enum_variant, reason = "there is one per layer, while a model is loaded")]
#[derive(Clone, Debug, PartialEq)]
pub enum FeedForwardWeights {
    /// One MLP for all tokens.
    Dense(MlpWeights),
    /// A mixture of experts.
    Experts(ExpertsWeights),
    /// An MLP and a mixture of experts next to each other.
    DenseAndExperts(DenseAndExpertsWeights),
}

impl FeedForwardWeights {
    /// The mixture of experts, if there is one.
    pub(crate) fn experts(&self) -> Option<&ExpertsWeights> {
        match self {
            Self::Dense(_) => None,
            Self::Experts(experts)
            | Self::DenseAndExperts(DenseAndExpertsWeights { experts, .. }) => Some(experts),
        }
    }
}

/// An MLP and a mixture of experts, which both read the residual stream. Norms are `[hidden_size]`.
/// The norm before the MLP is the layer's [`mlp_input_norm`](super::LayerWeights::mlp_input_norm).
/// The norm of the sum of both outputs is the layer's
/// [`mlp_output_norm`](super::LayerWeights::mlp_output_norm).
#[derive(Clone, Debug, PartialEq)]
pub struct DenseAndExpertsWeights {
    /// The MLP for all tokens.
    pub mlp: MlpWeights,
    /// The norm of the MLP's output.
    pub mlp_output_norm: NormWeights,
    /// The norm of the residual stream before the experts.
    pub experts_input_norm: NormWeights,
    /// The experts.
    pub experts: ExpertsWeights,
    /// The norm of the experts' output.
    pub experts_output_norm: NormWeights,
}

impl DecoderConfig {
    /// The weights after the mixers of a layer. `at` returns the full name of a module of the
    /// layer.
    pub(super) fn feed_forward_weights(
        &self,
        config: &FeedForwardConfig,
        at: &dyn Fn(&str) -> String,
    ) -> FeedForwardWeights {
        let dense = |mlp: &MlpConfig| self.mlp_weights(&at("mlp"), mlp);
        match config {
            FeedForwardConfig::Dense(mlp) => FeedForwardWeights::Dense(dense(mlp)),
            FeedForwardConfig::Experts(experts) => {
                let names = ["mlp.gate", "mlp.experts", "mlp"].map(at);
                FeedForwardWeights::Experts(self.expert_weights(*experts, &names))
            }
            FeedForwardConfig::DenseAndExperts(mlp, experts) => {
                let names = ["router", "experts", "mlp"].map(at);
                FeedForwardWeights::DenseAndExperts(DenseAndExpertsWeights {
                    mlp: dense(mlp),
                    mlp_output_norm: self.residual_norm(&at("post_feedforward_layernorm_1")),
                    experts_input_norm: self.residual_norm(&at("pre_feedforward_layernorm_2")),
                    experts: self.expert_weights(*experts, &names),
                    experts_output_norm: self.residual_norm(&at("post_feedforward_layernorm_2")),
                })
            }
        }
    }

    /// The weights of the MLP `module`.
    fn mlp_weights(&self, module: &str, config: &MlpConfig) -> MlpWeights {
        let MlpConfig { width, activation, bias, output_factor } = *config;
        let hidden = self.hidden_size;
        let at = |part: &str| format!("{module}.{part}");
        let inner = |part: &str| linear(&at(part), [width, hidden], bias);
        let inputs = match activation {
            Activation::Gated(gate) => {
                let name = at("gate_up_proj.weight");
                let parts = [inner("gate_proj"), inner("up_proj")];
                MlpInputs::Gated(StackedWeights { name, parts }, gate)
            }
            Activation::Plain(function) => MlpInputs::Plain(inner("up_proj"), function),
        };
        let down = linear(&at("down_proj"), [hidden, width], bias);
        MlpWeights { inputs, down, output_factor }
    }

    /// The weights of a mixture of experts, with these module names of the router, the experts and
    /// the MLP.
    fn expert_weights(
        &self,
        config: ExpertsConfig,
        [router, experts, module]: &[String; 3],
    ) -> ExpertsWeights {
        let ExpertsConfig { count, width, scores, router_bias, shared_gate, .. } = config;
        let gate = |name: &str, rows, bias| {
            let linear = linear(name, [rows, self.hidden_size], bias);
            let weight = TensorSpec { role: TensorRole::Router, ..linear.weight };
            LinearWeights { weight, ..linear }
        };
        let mlp = |width| MlpConfig {
            width,
            activation: config.activation,
            bias: config.bias,
            output_factor: 1.0,
        };
        let expert = |index| self.mlp_weights(&format!("{experts}.{index}"), &mlp(width));
        let scaled = |part: &str, size| {
            config.scaled_router.then(|| factors(format!("{router}.{part}"), size))
        };
        let scores_name = match config.scaled_router {
            true => format!("{router}.proj"),
            false => router.clone(),
        };
        ExpertsWeights {
            config,
            router_norm: scaled("scale", self.hidden_size).map(|weight| NormWeights {
                kind: NormKind::Rms,
                eps: self.norms.eps,
                offset: 0.0,
                weight,
                bias: None,
            }),
            router: gate(&scores_name, count, router_bias),
            factors: scaled("per_expert_scale", count),
            bias: (scores == ExpertScores::Sigmoid { bias: true }).then(|| TensorSpec {
                name: format!("{module}.expert_bias"),
                shape: vec![count],
                role: TensorRole::Bias,
            }),
            experts: (0..count).map(expert).collect(),
            shared: config.shared_width.map(|width| SharedExpertWeights {
                mlp: match shared_gate {
                    true => self.mlp_weights(&format!("{module}.shared_expert"), &mlp(width)),
                    false => self.mlp_weights(module, &mlp(width)),
                },
                gate: shared_gate.then(|| gate(&format!("{module}.shared_expert_gate"), 1, false)),
            }),
        }
    }
}
