//! The second half of a layer: an MLP, a mixture of experts, or both next to each other.

use candle_core::{Result, Tensor};
use stolon_checkpoint::DecoderConfig;
use stolon_checkpoint::config::{DenseAndExpertsWeights, FeedForwardWeights};

use crate::OpenError;
use crate::experts::Experts;
use crate::layer::add;
use crate::loader::Loader;
use crate::mlp::{Mlp, MlpAdapters};
use crate::norm::Norm;
use crate::pass::Pass;

/// The second half of a layer, after its mixers.
#[derive(Debug)]
pub(crate) enum FeedForward {
    /// One MLP for all rows.
    Dense(Mlp),
    /// A mixture of experts.
    Experts(Box<Experts>),
    /// An MLP and a mixture of experts next to each other.
    DenseAndExperts(Box<DenseAndExperts>),
}

/// An MLP and a mixture of experts next to each other: the fields of [`DenseAndExpertsWeights`].
#[derive(Debug)]
pub(crate) struct DenseAndExperts {
    mlp: Mlp,
    mlp_output_norm: Norm,
    experts_input_norm: Norm,
    experts: Experts,
    experts_output_norm: Norm,
}

impl FeedForward {
    /// Loads the tensors that `spec` describes.
    pub(crate) fn load(
        config: &DecoderConfig,
        spec: &FeedForwardWeights,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        Ok(match spec {
            FeedForwardWeights::Dense(mlp) => Self::Dense(Mlp::load(mlp, loader)?),
            FeedForwardWeights::Experts(experts) => {
                Self::Experts(Box::new(Experts::load(config, experts, loader)?))
            }
            FeedForwardWeights::DenseAndExperts(both) => {
                let DenseAndExpertsWeights {
                    mlp,
                    mlp_output_norm,
                    experts_input_norm,
                    experts,
                    experts_output_norm,
                } = both;
                Self::DenseAndExperts(Box::new(DenseAndExperts {
                    mlp: Mlp::load(mlp, loader)?,
                    mlp_output_norm: Norm::load(mlp_output_norm, loader)?,
                    experts_input_norm: Norm::load(experts_input_norm, loader)?,
                    experts: Experts::load(config, experts, loader)?,
                    experts_output_norm: Norm::load(experts_output_norm, loader)?,
                }))
            }
        })
    }

    /// Computes the second half of a layer from its input `normed`, and adds the result to the
    /// residual stream `x`. Both are `[rows, hidden_size]`. `output_norm` normalizes the output of
    /// an MLP.
    pub(crate) fn add(
        &self,
        config: &DecoderConfig,
        x: &Tensor,
        normed: &Tensor,
        output_norm: Option<&Norm>,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let adapters = MlpAdapters { rows: pass.adapters, layer: pass.layer, expert: None };
        match self {
            Self::Dense(mlp) => {
                add(config, x, mlp.forward(normed, adapters)?, (output_norm, mlp.output_factor()))
            }
            Self::Experts(experts) => experts.add(x, [normed, normed], pass),
            Self::DenseAndExperts(both) => {
                let dense = both.mlp_output_norm.apply(&both.mlp.forward(normed, adapters)?)?;
                let inputs = both.experts_input_norm.apply(x)?;
                let mixture = both.experts.add(&x.zeros_like()?, [&inputs, x], pass)?;
                let sum = (dense + both.experts_output_norm.apply(&mixture)?)?;
                add(config, x, sum, (output_norm, both.mlp.output_factor()))
            }
        }
    }
}
