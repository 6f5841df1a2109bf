//! The weights of Gated DeltaNet and Kimi Delta Attention.

use super::{LinearWeights, TensorRole, TensorSpec, linear, matrix, norm};
use crate::config::{DecoderConfig, DeltaNetConfig, DeltaNetKind};

/// The weights of Gated DeltaNet or Kimi Delta Attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeltaNetWeights {
    /// The configuration of the layer.
    pub config: DeltaNetConfig,
    /// The projections to queries, keys and values, `[channels, hidden_size]` in total. There is
    /// one for all of them, or one for each.
    pub qkv: Vec<LinearWeights>,
    /// The projection to the gates of the outputs, to `value_width` features.
    pub gate: FactoredWeights,
    /// The projection to the strengths before their sigmoid, `[value_heads, hidden_size]`.
    pub strength: LinearWeights,
    /// The projection to the time steps before their softplus, one for each decay.
    pub step: FactoredWeights,
    /// Biases that are added to the time steps before their softplus, one for each decay.
    pub step_bias: TensorSpec,
    /// The decay rates, `[value_heads]`, in the form that [`DeltaNetConfig::log_rates`] states.
    pub rates: TensorSpec,
    /// The taps of the convolution, `[channels, taps]` in total, with the oldest position first.
    /// They are divided in the same way as `qkv`.
    pub taps: Vec<TensorSpec>,
    /// The norm of the output of each value head, `[value_dim]`. Its weight has no offset.
    pub norm: TensorSpec,
    /// The output projection, `[hidden_size, value_width]`.
    pub output: LinearWeights,
}

/// The weights of a projection of the residual stream, which may be the product of two matrices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FactoredWeights {
    /// The projection to fewer features, `[rank, hidden_size]`; `None` if there is only one matrix.
    pub down: Option<LinearWeights>,
    /// The projection to the result, `[out, rank or hidden_size]`.
    pub up: LinearWeights,
}

/// The names of the parts of Gated DeltaNet in a layer.
struct Names {
    module: &'static str,
    qkv: &'static [&'static str],
    taps: &'static [&'static str],
    strength: &'static str,
    step: Factors,
    gate: Factors,
    norm: &'static str,
    output: &'static str,
}

/// The name of a projection. If it is the product of two matrices, this is the name of the second
/// one, followed by the name of the first one and its number of features.
type Factors = (&'static str, Option<(&'static str, usize)>);

impl Names {
    fn of(kind: DeltaNetKind) -> Self {
        match kind {
            DeltaNetKind::Gated => Self {
                module: "linear_attn",
                qkv: &["in_proj_qkv"],
                taps: &["conv1d"],
                strength: "in_proj_b",
                step: ("in_proj_a", None),
                gate: ("in_proj_z", None),
                norm: "norm",
                output: "out_proj",
            },
            DeltaNetKind::Kimi { rank } => Self {
                module: "self_attn",
                qkv: &["q_proj", "k_proj", "v_proj"],
                taps: &["q_conv1d", "k_conv1d", "v_conv1d"],
                strength: "b_proj",
                step: ("f_b_proj", Some(("f_a_proj", rank))),
                gate: ("g_b_proj", Some(("g_a_proj", rank))),
                norm: "o_norm",
                output: "o_proj",
            },
        }
    }
}

impl DecoderConfig {
    /// The weights of Gated DeltaNet or Kimi Delta Attention. `at` returns the full name of a
    /// module of the layer.
    pub(super) fn delta_net_weights(
        &self,
        config: &DeltaNetConfig,
        at: &dyn Fn(&str) -> String,
    ) -> DeltaNetWeights {
        let names = Names::of(config.kind);
        let (hidden, shape) = (self.hidden_size, config.shape());
        let at = |part: &str| at(&format!("{}.{part}", names.module));
        let projection = |part: &str, shape, role| LinearWeights {
            weight: matrix(&at(part), shape, role),
            bias: None,
        };
        let factored = |(up, down): Factors, rows, role| {
            let columns = down.map_or(hidden, |(_, rank)| rank);
            let down = down.map(|(down, rank)| projection(down, [rank, hidden], role));
            FactoredWeights { down, up: projection(up, [rows, columns], role) }
        };
        let vector = |part: &str, len| TensorSpec {
            name: at(part),
            shape: vec![len],
            role: TensorRole::Bias,
        };
        let widths = [config.key_width(), config.key_width(), config.value_width()];
        let parts = |names: &[&'static str]| match *names {
            [all] => vec![(all, shape.channels)],
            _ => names.iter().copied().zip(widths).collect(),
        };
        let taps_of = |(part, rows): (&str, usize)| TensorSpec {
            name: at(&format!("{part}.weight")),
            shape: vec![rows, config.taps],
            role: TensorRole::Taps,
        };
        let qkv_of = |(part, rows)| projection(part, [rows, hidden], TensorRole::Matrix);
        let (head_norm, decays) = (norm(&at(names.norm), config.value_dim), shape.decay_width());
        DeltaNetWeights {
            config: *config,
            qkv: parts(names.qkv).into_iter().map(qkv_of).collect(),
            gate: factored(names.gate, config.value_width(), TensorRole::Matrix),
            // Small errors of strengths and time steps add up over all later positions.
            strength: projection(names.strength, [config.value_heads, hidden], TensorRole::Router),
            step: factored(names.step, decays, TensorRole::Router),
            step_bias: vector("dt_bias", decays),
            rates: vector("A_log", config.value_heads),
            taps: parts(names.taps).into_iter().map(taps_of).collect(),
            norm: TensorSpec { role: TensorRole::PlainNorm, ..head_norm },
            output: linear(&at(names.output), [hidden, config.value_width()], false),
        }
    }
}
