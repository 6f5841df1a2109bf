//! Mamba-2, which layers have instead of attention or next to it.
//!
//! A layer projects its input to the gates of the outputs, to values, keys and queries, and to the
//! time steps of the heads. Each head adds a share of its value to the output of its recurrence
//! (`recurrent.rs`). The sums are gated, and then normalized.

use candle_core::{Result, Tensor};
use stolon_checkpoint::DecoderConfig;
use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{
    Mamba2Config, Mamba2Weights, StackedWeights, TensorSpec, decay_rates,
};

use super::recurrent::{Recurrent, by_tap, softplus};
use crate::OpenError;
use crate::linear::Linear;
use crate::loader::Loader;
use crate::norm::Norm;
use crate::pass::Pass;
use crate::recurrence::HeadLayout;

/// The weights of a layer with Mamba-2: the fields of [`Mamba2Weights`].
#[derive(Debug)]
pub(super) struct Mamba2 {
    config: Mamba2Config,
    /// The projections to gates, to values, keys and queries, and to time steps, concatenated.
    inputs: Linear,
    /// Biases of the time steps, `[heads]`.
    step_bias: Tensor,
    /// The decay rates per time step, `[heads]`, all negative.
    rates: Tensor,
    /// The share of its value that each head adds to its output, repeated for each element of the
    /// head: `[heads * head_dim]`.
    skip: Tensor,
    /// The norm of each group of the outputs without weights, and the weights, `[heads *
    /// head_dim]`; `None` if they are not normalized.
    norm: Option<(Norm, Tensor)>,
    recurrent: Recurrent,
}

impl Mamba2 {
    /// Loads the weights of a layer, except for the projection of its output.
    pub(super) fn load(
        config: &DecoderConfig,
        spec: &Mamba2Weights,
        kept: usize,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        let Mamba2Weights {
            config: own,
            inputs: StackedWeights { name: _, parts },
            step_bias,
            rates,
            skip,
            taps,
            convolution_bias,
            norm,
            // Loaded by the mixer.
            output: _,
        } = spec;
        let shape = own.shape();
        let mut by_channel = loader.weights.floats(taps)?;
        own.scale_taps(&mut by_channel);
        let rates = decay_rates(loader.weights.floats(rates)?, own.log_rates);
        let rates = Tensor::new(rates, &loader.device)?;
        let skip = loader.weights.floats(skip)?.into_iter();
        let skip: Vec<f32> =
            skip.flat_map(|share| std::iter::repeat_n(share, own.head_dim)).collect();
        let group = shape.value_width() / own.groups;
        let group_norm = |weight: &TensorSpec, loader: &mut Loader| {
            let norm = Norm::uniform(group, 1.0, config.norms.eps, &loader.device)?;
            Ok::<_, OpenError>((norm, loader.vector(weight, 0.0)?))
        };
        let bias = convolution_bias.as_ref();
        Ok(Self {
            config: *own,
            inputs: loader.stacked(parts)?,
            step_bias: loader.vector(step_bias, 0.0)?,
            rates,
            skip: Tensor::new(skip, &loader.device)?,
            norm: norm.as_ref().map(|weight| group_norm(weight, loader)).transpose()?,
            recurrent: Recurrent {
                shape,
                layout: HeadLayout {
                    query: shape.value_width() + own.key_width(),
                    key: shape.value_width(),
                    value: 0,
                    key_heads: own.groups,
                    grouped: true,
                },
                taps: by_tap(&by_channel, own.taps, &loader.device)?,
                convolution_bias: bias.map(|bias| loader.vector(bias, 0.0)).transpose()?,
                kept,
            },
        })
    }

    /// Computes the gated outputs of all rows, `[rows, heads * head_dim]`, and the states after all
    /// slices.
    pub(super) fn project(&self, normed: &Tensor, pass: &mut Pass<'_>) -> Result<Tensor> {
        let Mamba2Config { heads, groups, input_factors, .. } = self.config;
        let [gate_factor, _, _, _, step_factor] = input_factors.map(f64::from);
        let shape = self.recurrent.shape;
        let width = shape.value_width();
        let updates = pass.updates(Site::MambaInputs, normed)?;
        let projected = updates.add(0, self.inputs.forward(normed)?)?;
        let part = |first: usize, count: usize| projected.narrow(1, first, count)?.contiguous();
        let gates = part(0, width)?.affine(gate_factor, 0.0)?;
        let steps = part(width + shape.channels, heads)?.affine(step_factor, 0.0)?;
        let steps = softplus(&steps.broadcast_add(&self.step_bias)?)?;
        let decays = steps.broadcast_mul(&self.rates)?.exp()?;
        // Strengths are the time steps.
        let factors = Tensor::cat(&[decays, steps], 1)?;
        let convolved = self.recurrent.convolve(&part(width, shape.channels)?, pass)?;
        let outputs = self.recurrent.advance(&convolved, &convolved.values, &factors, pass)?;

        let skipped = convolved.values.narrow(1, 0, width)?.broadcast_mul(&self.skip)?;
        let gated = ((outputs + skipped)? * gates.silu()?)?;
        match &self.norm {
            None => Ok(gated),
            Some((norm, weights)) => {
                let by_group = gated.reshape((gated.dim(0)?, groups, width / groups))?;
                norm.apply(&by_group)?.flatten_from(1)?.broadcast_mul(weights)
            }
        }
    }
}
