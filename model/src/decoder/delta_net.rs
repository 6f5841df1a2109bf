//! Gated DeltaNet, which most layers of Qwen3.5 have in place of attention.
//!
//! A layer projects its input to queries, keys and values, to the strengths and the time steps of
//! the value heads, and to the gates of the outputs ([`Decoder::delta_net_inputs`]). Queries and
//! keys are normalized after the convolution. The outputs of the recurrence (`recurrent.rs`) are
//! normalized, and then gated ([`Decoder::gate_delta_net`]).
//!
//! All but the gates is computed for all rows, because later positions need the state; the gates
//! and what follows only for rows whose output is needed.

use stolon_backend::StepBatch;
use stolon_kernels::{self as kernels, Path, Rule};

use super::attention::Inputs;
use super::linear::{Linear, Loader};
use super::profile::Stage;
use super::recurrent::{HeadInputs, Recurrent, by_tap, softplus};
use super::{Decoder, StepState, linear};
use crate::config::{DeltaNetConfig, DeltaNetWeights, sigmoid};
use crate::error::ModelError;
use crate::workers::Workers;

/// Added to the sum of squares of a query or a key before the root is taken.
const EPS: f32 = 1e-6;

/// The weights of a layer with Gated DeltaNet: the fields of [`DeltaNetWeights`].
#[derive(Debug)]
pub(super) struct DeltaNet {
    pub(super) config: DeltaNetConfig,
    pub(super) qkv: Linear,
    pub(super) gate: Linear,
    pub(super) strength: Linear,
    pub(super) step: Linear,
    /// `[value_heads]`.
    step_bias: Vec<f32>,
    /// The decay rates per time step, `[value_heads]`, all negative.
    rates: Vec<f32>,
    /// `[value_dim]`.
    norm: Vec<f32>,
    pub(super) output: Linear,
    recurrent: Recurrent,
}

impl DeltaNet {
    pub(super) fn load(
        config: DeltaNetConfig,
        spec: &DeltaNetWeights,
        kept: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let DeltaNetWeights { qkv, gate, strength, step, step_bias, rates, taps, norm, output } =
            spec;
        let by_channel = loader.vector(taps)?;
        let mut rates = loader.vector(rates)?;
        if config.log_rates {
            rates.iter_mut().for_each(|rate| *rate = -rate.exp());
        }
        Ok(Self {
            config,
            qkv: loader.linear(qkv)?,
            gate: loader.linear(gate)?,
            strength: loader.linear(strength)?,
            step: loader.linear(step)?,
            step_bias: loader.vector(step_bias)?,
            rates,
            norm: loader.vector(norm)?,
            output: loader.linear(output)?,
            recurrent: Recurrent {
                shape: config.shape(),
                rule: Rule::Delta,
                heads: (0..config.value_heads).map(|head| inputs_of(&config, head)).collect(),
                taps: by_tap(&by_channel, config.taps),
                convolution_bias: None,
                kept,
            },
        })
    }

    /// Normalizes the queries and keys of a row, `[channels]`.
    fn normalize(&self, path: Path, norms: &[Vec<f32>; 2], row: &mut [f32]) {
        let eps = EPS / self.config.key_dim as f32;
        for (part, norm) in row.chunks_exact_mut(self.config.key_width()).zip(norms) {
            kernels::rms_norm_in_place(path, part, norm, eps, 0.0);
        }
    }

    /// The weights with which an RMS norm of a query head and of a key head divides by the root of
    /// the sum of squares and not of their mean; queries are also multiplied by `key_dim^-0.5`.
    fn head_norms(&self) -> [Vec<f32>; 2] {
        let size = self.config.key_dim as f32;
        [1.0 / size, 1.0 / size.sqrt()].map(|weight| vec![weight; self.config.key_dim])
    }

    /// Fills the decays and strengths of a row, `[2, value_heads]`.
    fn fill_factors(&self, [strengths, steps]: [&[f32]; 2], factors: &mut [f32]) {
        let (decays, factors) = factors.split_at_mut(self.config.value_heads);
        let rates = self.rates.iter().zip(&self.step_bias);
        for ((decay, step), (rate, bias)) in decays.iter_mut().zip(steps).zip(rates) {
            *decay = (rate * softplus(step + bias)).exp();
        }
        for (factor, strength) in factors.iter_mut().zip(strengths) {
            *factor = sigmoid(*strength);
        }
    }
}

/// The channels of a value head.
fn inputs_of(config: &DeltaNetConfig, head: usize) -> HeadInputs {
    let query = config.key_head(head) * config.key_dim;
    let key = config.key_width() + query;
    HeadInputs { query, key, value: 2 * config.key_width() + head * config.value_dim }
}

impl Decoder {
    /// Computes the projections of layer `index` and, with those that later positions need, the
    /// state after each slice.
    pub(super) fn delta_net_inputs(
        &mut self,
        index: usize,
        inputs: Inputs,
        (batch, step): (&StepBatch, &mut StepState<'_>),
        workers: &Workers,
    ) {
        let Some(layer) = self.layers[index].delta_net() else { return };
        let activations = &mut self.activations;
        let (normed, buffers) = (&activations.normed, &mut activations.recurrent);
        let kept = inputs.kept();
        let products = [
            (kept, &layer.qkv, &mut buffers.projected),
            (kept, &layer.strength, &mut buffers.strengths),
            (kept, &layer.step, &mut buffers.steps),
            (inputs.own(), &layer.gate, &mut activations.gates),
        ];
        linear::multiply_wanted(self.path, normed, products, workers);
        self.profile.mark(Stage::Qkv);
        if kept {
            let (path, norms) = (self.path, layer.head_norms());
            let finish = |row: &mut [f32], gates: [&[f32]; 2], factors: &mut [f32]| {
                layer.normalize(path, &norms, row);
                layer.fill_factors(gates, factors);
            };
            let step = (&self.plan, batch, step);
            layer.recurrent.advance(path, buffers, step, &finish, workers);
            self.profile.mark(Stage::Recurrence);
        }
    }

    /// Normalizes and gates the outputs of the recurrence in layer `index`, and packs them for the
    /// output projection. `rows` rows have an output.
    pub(super) fn gate_delta_net(&mut self, index: usize, rows: usize, workers: &Workers) {
        let (path, eps) = (self.path, self.config.rms_norm_eps);
        let is_last = index + 1 == self.layers.len();
        let Some(layer) = self.layers[index].delta_net() else { return };
        let (shape, width) = (layer.recurrent.shape, layer.config.value_width());
        let activations = &mut self.activations;
        let (buffers, gates) = (&activations.recurrent, &activations.gates);
        let plan = &self.plan;
        activations.mixed.reset(rows, &[&layer.output.matrix]);
        activations.mixed.fill(workers.for_pass(rows, 4 * width), |_, first, out| {
            for (row, out) in (first..).zip(out.chunks_exact_mut(width)) {
                // The last layer has only the rows whose output is needed.
                let source = if is_last { plan.output_rows[row] } else { row };
                for (head, out) in out.chunks_exact_mut(shape.value_dim).enumerate() {
                    let output = buffers.output(&shape, plan, (source, head));
                    kernels::rms_norm(path, output, &layer.norm, eps, 0.0, out);
                }
                kernels::mul_silu(path, out, &gates[row * width..][..width]);
            }
        });
        self.profile.mark(Stage::Recurrence);
    }
}
