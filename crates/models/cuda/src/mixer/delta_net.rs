//! Gated DeltaNet and Kimi Delta Attention, which most layers of Qwen3.5 and Kimi Linear have
//! instead of attention.
//!
//! A layer projects its input to queries, keys and values, to the strengths and the time steps of
//! the value heads, and to the gates of the outputs. Queries and keys are normalized after the
//! convolution. The outputs of the recurrence (`recurrent.rs`) are normalized, and then gated.

use candle_core::{Result, Tensor};
use stolon_checkpoint::DecoderConfig;
use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{
    DeltaNetConfig, DeltaNetKind, DeltaNetWeights, FactoredWeights, decay_rates,
};

use super::recurrent::{Recurrent, by_tap, softplus};
use crate::OpenError;
use crate::linear::Linear;
use crate::loader::Loader;
use crate::norm::Norm;
use crate::pass::Pass;
use crate::recurrence::HeadLayout;

/// Epsilon that is added to the sum of squares of a query or key before the square root.
const EPS: f32 = 1e-6;

/// The weights of a layer with Gated DeltaNet or Kimi Delta Attention: the fields of
/// [`DeltaNetWeights`].
#[derive(Debug)]
pub(super) struct DeltaNet {
    config: DeltaNetConfig,
    /// The projections to queries, keys and values, and to the gates or their low-rank vectors.
    qkv: Linear,
    /// The projection of low-rank vectors to gates.
    gate_up: Option<Linear>,
    /// The projections to the strengths, and to the time steps or their low-rank vectors.
    strength: Linear,
    /// The projection of low-rank vectors to time steps.
    step_up: Option<Linear>,
    /// The bias of each time step, one for each decay.
    step_bias: Tensor,
    /// The decay rates per time step, one for each decay, all negative.
    rates: Tensor,
    q_norm: Norm,
    k_norm: Norm,
    /// The norm of the outputs of each value head.
    norm: Norm,
    recurrent: Recurrent,
}

impl DeltaNet {
    /// Loads the weights of a layer, except for the projection of its output.
    pub(super) fn load(
        config: &DecoderConfig,
        spec: &DeltaNetWeights,
        kept: usize,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        let DeltaNetWeights {
            config: own,
            qkv,
            gate,
            strength,
            step,
            step_bias,
            rates,
            taps,
            norm,
            // Loaded by the mixer.
            output: _,
        } = spec;
        let mut by_channel = Vec::new();
        for taps in taps {
            by_channel.extend(loader.weights.floats(taps)?);
        }
        let shape = own.shape();
        let rates = decay_rates(loader.weights.floats(rates)?, own.log_rates).into_iter();
        let rates: Vec<f32> =
            rates.flat_map(|rate| std::iter::repeat_n(rate, shape.decays())).collect();
        let first =
            |factored: &FactoredWeights| factored.down.as_ref().unwrap_or(&factored.up).clone();
        let second =
            |factored: &FactoredWeights| factored.down.as_ref().map(|_| factored.up.clone());
        let parts: Vec<_> = qkv.iter().cloned().chain([first(gate)]).collect();
        // A norm with these weights divides by the square root of the sum of squares instead of
        // their mean. Queries are also multiplied by `key_dim^-0.5`.
        let size = own.key_dim as f32;
        let unit = |factor| Norm::uniform(own.key_dim, factor, EPS / size, &loader.device);
        let (q_norm, k_norm) = (unit(1.0 / size)?, unit(1.0 / size.sqrt())?);
        Ok(Self {
            config: *own,
            qkv: loader.stacked(&parts)?,
            gate_up: second(gate).map(|up| loader.linear(&up)).transpose()?,
            strength: loader.exact(&[strength.clone(), first(step)])?,
            step_up: second(step).map(|up| loader.exact(&[up])).transpose()?,
            step_bias: loader.vector(step_bias, 0.0)?,
            rates: Tensor::new(rates, &loader.device)?,
            q_norm,
            k_norm,
            norm: Norm::of_parts_with(norm, config.norms.eps, 0.0, loader)?,
            recurrent: Recurrent {
                shape,
                layout: HeadLayout {
                    query: 0,
                    key: own.key_width(),
                    value: 2 * own.key_width(),
                    key_heads: own.key_heads,
                    grouped: own.grouped,
                },
                taps: by_tap(&by_channel, own.taps, &loader.device)?,
                convolution_bias: None,
                kept,
            },
        })
    }

    /// Computes the gated outputs of all rows, `[rows, value_width]`, and the states after all
    /// slices.
    pub(super) fn project(&self, normed: &Tensor, pass: &mut Pass<'_>) -> Result<Tensor> {
        let DeltaNetConfig { value_heads, key_dim, value_dim, kind, .. } = self.config;
        let (shape, key_width) = (self.recurrent.shape, self.config.key_width());
        let rest = |x: &Tensor, first: usize| x.narrow(1, first, x.dim(1)? - first)?.contiguous();
        // Queries, keys, values and gates come first, then strengths and time steps.
        let updates = pass.updates(Site::Inputs, normed)?;
        let projected = updates.add(0, self.qkv.forward(normed)?)?;
        let mut gates = rest(&projected, shape.channels)?;
        if let Some(up) = &self.gate_up {
            gates = pass.updates(Site::Gates, &gates)?.add(0, up.forward(&gates)?)?;
        }
        let strengths = updates.add(projected.dim(1)?, self.strength.forward(normed)?)?;
        let mut steps = rest(&strengths, value_heads)?;
        if let Some(up) = &self.step_up {
            steps = pass.updates(Site::Steps, &steps)?.add(0, up.forward(&steps)?)?;
        }
        let steps = softplus(&steps.broadcast_add(&self.step_bias)?)?;
        let decays = steps.broadcast_mul(&self.rates)?.exp()?;
        let strengths =
            candle_nn::ops::sigmoid(&strengths.narrow(1, 0, value_heads)?.contiguous()?)?;
        let factors = Tensor::cat(&[decays, strengths], 1)?;

        let projected = projected.narrow(1, 0, shape.channels)?.contiguous()?;
        let convolved = self.recurrent.convolve(&projected, pass)?;
        let heads = |first: usize, norm: &Norm| {
            let heads = convolved.values.narrow(1, first, key_width)?.contiguous()?;
            norm.apply(&heads.reshape(((), self.config.key_heads, key_dim))?)?.flatten_from(1)
        };
        let values = rest(&convolved.values, 2 * key_width)?;
        let values = [heads(0, &self.q_norm)?, heads(key_width, &self.k_norm)?, values];
        let values = Tensor::cat(&values, 1)?;
        let outputs = self.recurrent.advance(&convolved, &values, &factors, pass)?;

        let outputs = outputs.reshape(((), value_heads, value_dim))?;
        let normed = self.norm.apply(&outputs)?.flatten_from(1)?;
        normed
            * match kind {
                DeltaNetKind::Gated => gates.silu()?,
                DeltaNetKind::Kimi { .. } => candle_nn::ops::sigmoid(&gates)?,
            }
    }
}
