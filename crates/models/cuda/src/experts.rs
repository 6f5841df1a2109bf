//! A mixture of experts. The router's scores are copied to the host, which chooses the experts of
//! each row as the CPU backend does and groups the rows by expert.
//!
//! **Invariant: batch invariance.** The outputs of a row's experts are added to the row in
//! ascending order of the experts' indices, with the shared expert last.

use candle_core::{Result, Tensor};
use stolon_checkpoint::config::{ExpertChoice, ExpertsWeights, SharedExpertWeights};
use stolon_checkpoint::{DecoderConfig, ExpertsConfig};

use crate::OpenError;
use crate::layer::GatedMlp;
use crate::linear::Linear;
use crate::loader::Loader;

/// The weights of a layer's mixture of experts.
#[derive(Debug)]
pub(crate) struct Experts {
    config: ExpertsConfig,
    /// `[experts, hidden_size]`.
    router: Linear,
    /// The bias of each expert's score. It affects only which experts are chosen.
    bias: Option<Vec<f32>>,
    experts: Vec<GatedMlp>,
    /// The shared expert, if there is one, and the projection to its score, `[1, hidden_size]`, if
    /// it has one.
    shared: Option<(GatedMlp, Option<Linear>)>,
    /// Factor of the outputs of all experts.
    residual_scale: f32,
}

/// The rows that use one expert, and the weight of its output for each of them.
#[derive(Clone, Debug, Default, PartialEq)]
struct Group {
    rows: Vec<u32>,
    weights: Vec<f32>,
}

impl Experts {
    /// Loads the experts that `spec` describes.
    pub(crate) fn load(
        config: &DecoderConfig,
        spec: &ExpertsWeights,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        let ExpertsWeights {
            config: experts_config,
            // Models that have it are refused with the configuration.
            router_norm: _,
            router,
            bias,
            factors: _,
            experts,
            shared,
        } = spec;
        let router = loader.linear(router)?;
        let bias = bias.as_ref().map(|bias| loader.weights.floats(bias)).transpose()?;
        let experts = experts.iter().map(|expert| GatedMlp::load(config, expert, loader));
        let experts = experts.collect::<std::result::Result<_, _>>()?;
        let shared = match shared {
            Some(SharedExpertWeights { mlp, gate }) => {
                let gate = gate.as_ref().map(|gate| loader.linear(gate)).transpose()?;
                Some((GatedMlp::load(config, mlp, loader)?, gate))
            }
            None => None,
        };
        let residual_scale = config.residual_scale.unwrap_or(1.0);
        Ok(Self { config: *experts_config, router, bias, experts, shared, residual_scale })
    }

    /// Runs the experts on the rows of `normed` and adds their outputs to the rows of `x`. Both are
    /// `[rows, hidden_size]`.
    pub(crate) fn add(&self, x: &Tensor, normed: &Tensor) -> Result<Tensor> {
        let scores = self.router.forward(normed)?.to_vec2::<f32>()?;
        let groups = groups(&self.config, self.bias.as_deref(), scores);
        let mut x = x.clone();
        for (mlp, mut group) in self.experts.iter().zip(groups) {
            if group.rows.is_empty() {
                continue;
            }
            let count = group.rows.len();
            group.weights.iter_mut().for_each(|weight| *weight *= self.residual_scale);
            let rows = Tensor::from_vec(group.rows, count, x.device())?;
            let weights = Tensor::from_vec(group.weights, (count, 1), x.device())?;
            let output = mlp.forward(&normed.index_select(&rows, 0)?)?.broadcast_mul(&weights)?;
            x = x.index_add(&rows, &output, 0)?;
        }
        if let Some((mlp, gate)) = &self.shared {
            let mut output = mlp.forward(normed)?;
            if let Some(gate) = gate {
                let weights = candle_nn::ops::sigmoid(&gate.forward(normed)?)?;
                output = output.broadcast_mul(&weights)?;
            }
            x = (x + output.affine(f64::from(self.residual_scale), 0.0)?)?;
        }
        Ok(x)
    }
}

/// Groups the rows by expert. Rows are in ascending order within a group. `scores` is `[rows,
/// experts]`.
fn groups(config: &ExpertsConfig, bias: Option<&[f32]>, scores: Vec<Vec<f32>>) -> Vec<Group> {
    let mut groups = vec![Group::default(); config.count];
    let (mut order, mut choices) = (Vec::new(), vec![ExpertChoice::default(); config.per_token]);
    for (row, mut scores) in scores.into_iter().enumerate() {
        config.choose(&mut scores, bias, &mut order, &mut choices);
        for choice in &choices {
            let group = &mut groups[choice.expert as usize];
            group.rows.push(row as u32);
            group.weights.push(choice.weight);
        }
    }
    groups
}
