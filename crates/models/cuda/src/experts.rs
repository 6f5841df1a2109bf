//! A mixture of experts. The router's scores are copied to the host, which chooses the experts of
//! each row as the CPU backend does and groups the rows by expert.
//!
//! **Invariant: batch invariance.** The outputs of a row's experts are added to the row in
//! ascending order of the experts' indices, with the shared expert last.

use candle_core::{Result, Tensor};
use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{ExpertChoice, ExpertsWeights, SharedExpertWeights, TensorSpec};
use stolon_checkpoint::{DecoderConfig, ExpertsConfig};

use crate::OpenError;
use crate::linear::Linear;
use crate::loader::Loader;
use crate::mlp::{Mlp, MlpAdapters};
use crate::norm::Norm;
use crate::pass::Pass;

/// The weights of a layer's mixture of experts.
#[derive(Debug)]
pub(crate) struct Experts {
    config: ExpertsConfig,
    /// The norm of the router's input; `None` if the router reads the input of the experts.
    router_norm: Option<Norm>,
    /// `[experts, hidden_size]`.
    router: Linear,
    /// The bias of each expert's score. It affects only which experts are chosen.
    bias: Option<Vec<f32>>,
    /// The factor of each expert's weight; `None` for 1.
    factors: Option<Vec<f32>>,
    experts: Vec<Mlp>,
    /// The shared expert, if there is one, and the projection to its score, `[1, hidden_size]`, if
    /// it has one.
    shared: Option<(Mlp, Option<Linear>)>,
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
            router_norm,
            router,
            bias,
            factors,
            experts,
            shared,
        } = spec;
        // Every field is named, so that a new one is a compile error until it is computed.
        let ExpertsConfig {
            // Used by `Experts::groups` and `ExpertsConfig::choose`.
            count: _,
            per_token: _,
            scores: _,
            normalized: _,
            groups: _,
            scale: _,
            // Determine which weights exist.
            width: _,
            activation: _,
            bias: _,
            router_bias: _,
            shared_width: _,
            shared_gate: _,
            scaled_router: _,
            shifted,
        } = *experts_config;
        let router_norm = Norm::optional(router_norm.as_ref(), loader)?;
        // Files store these weights times the square root of `hidden_size`.
        let scale = (config.hidden_size as f32).powf(-0.5);
        let router_norm = router_norm.map(|norm| norm.scaled(scale)).transpose()?;
        let router = loader.linear(router)?;
        let floats =
            |spec: Option<&TensorSpec>| spec.map(|spec| loader.weights.floats(spec)).transpose();
        let (bias, factors) = (floats(bias.as_ref())?, floats(factors.as_ref())?);
        let experts = experts.iter().map(|expert| Mlp::load(expert, loader));
        let mut experts = experts.collect::<std::result::Result<Vec<_>, _>>()?;
        if shifted {
            experts.iter_mut().try_for_each(|expert| expert.shift(1.0, &loader.device))?;
        }
        let shared = match shared {
            Some(SharedExpertWeights { mlp, gate }) => {
                let gate = gate.as_ref().map(|gate| loader.linear(gate)).transpose()?;
                Some((Mlp::load(mlp, loader)?, gate))
            }
            None => None,
        };
        let residual_scale = config.residual_scale.unwrap_or(1.0);
        Ok(Self {
            config: *experts_config,
            router_norm,
            router,
            bias,
            factors,
            experts,
            shared,
            residual_scale,
        })
    }

    /// Runs the experts on the rows of `normed` and adds their outputs to the rows of `x`. A router
    /// that has a norm reads the rows `residual`, and others read `normed`. All are `[rows,
    /// hidden_size]`.
    pub(crate) fn add(
        &self,
        x: &Tensor,
        [normed, residual]: [&Tensor; 2],
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        // The score of the shared expert comes after those of the others. Routers with a norm have
        // no adapters.
        let updates = pass.updates(Site::Routers, normed)?;
        let scores = match &self.router_norm {
            Some(norm) => self.router.forward(&norm.apply(residual)?)?,
            None => updates.add(0, self.router.forward(normed)?)?,
        };
        let (device, layer) = (x.device(), pass.layer);
        let groups = self.groups(scores.to_vec2::<f32>()?);
        let mut x = x.clone();
        for (expert, (mlp, mut group)) in self.experts.iter().zip(groups).enumerate() {
            if group.rows.is_empty() {
                continue;
            }
            let count = group.rows.len();
            group.weights.iter_mut().for_each(|weight| *weight *= self.residual_scale);
            let own = pass.adapters.select(&group.rows, device)?;
            let adapters = MlpAdapters { rows: &own, layer, expert: Some(expert) };
            let rows = Tensor::from_vec(group.rows, count, device)?;
            let weights = Tensor::from_vec(group.weights, (count, 1), device)?;
            let output = mlp.forward(&normed.index_select(&rows, 0)?, adapters)?;
            x = x.index_add(&rows, &output.broadcast_mul(&weights)?, 0)?;
        }
        if let Some((mlp, gate)) = &self.shared {
            let expert = Some(self.experts.len());
            let adapters = MlpAdapters { rows: pass.adapters, layer, expert };
            let mut output = mlp.forward(normed, adapters)?;
            if let Some(gate) = gate {
                let score = updates.add(self.experts.len(), gate.forward(normed)?)?;
                let weights = candle_nn::ops::sigmoid(&score)?;
                output = output.broadcast_mul(&weights)?;
            }
            x = (x + output.affine(f64::from(self.residual_scale), 0.0)?)?;
        }
        Ok(x)
    }

    /// Groups the rows by expert. Rows are in ascending order within a group. `scores` is `[rows,
    /// experts]`.
    fn groups(&self, scores: Vec<Vec<f32>>) -> Vec<Group> {
        let config = &self.config;
        let mut groups = vec![Group::default(); config.count];
        let (mut order, mut choices) =
            (Vec::new(), vec![ExpertChoice::default(); config.per_token]);
        for (row, mut scores) in scores.into_iter().enumerate() {
            config.choose(&mut scores, self.bias.as_deref(), &mut order, &mut choices);
            for choice in &choices {
                let expert = choice.expert as usize;
                let factor = self.factors.as_ref().map_or(1.0, |factors| factors[expert]);
                groups[expert].rows.push(row as u32);
                groups[expert].weights.push(choice.weight * factor);
            }
        }
        groups
    }
}
