//! Gated DeltaNet and Kimi Delta Attention, which most layers of Qwen3.5 and Kimi Linear have in
//! place of attention.
//!
//! A layer projects its input to queries, keys and values, to the strengths and the time steps of
//! the value heads, and to the gates of the outputs ([`Decoder::delta_net_inputs`]). Queries and
//! keys are normalized after the convolution. The outputs of the recurrence (`recurrent.rs`) are
//! normalized, and then gated ([`Decoder::gate_delta_net`]).
//!
//! All but the gates is computed for all rows, because later positions need the state; the gates
//! and what follows only for rows whose output is needed.

use stolon_backend::StepBatch;
use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{DeltaNetConfig, DeltaNetKind, DeltaNetWeights, sigmoid};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{self as kernels, ColumnsMut, Operands, Path, Sink};

use super::adapters::AdapterRows;
use super::attention::Inputs;
use super::linear::{Factored, GroupProduct, Linear, Loader};
use super::profile::Stage;
use super::recurrent::{HeadInputs, Recurrent, RecurrentBuffers, by_tap, softplus};
use super::{Decoder, StepState, linear, passes};
use crate::workers::Workers;

/// Added to the sum of squares of a query or a key before the root is taken.
const EPS: f32 = 1e-6;

/// The weights of a layer with Gated DeltaNet or Kimi Delta Attention: the fields of
/// [`DeltaNetWeights`].
#[derive(Debug)]
pub(super) struct DeltaNet {
    config: DeltaNetConfig,
    qkv: Vec<Linear>,
    gate: Factored,
    strength: Linear,
    step: Factored,
    /// One for each decay.
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
        spec: &DeltaNetWeights,
        kept: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let DeltaNetWeights {
            config,
            qkv,
            gate,
            strength,
            step,
            step_bias,
            rates,
            taps,
            norm,
            output,
        } = spec;
        let mut by_channel = Vec::new();
        for taps in taps {
            by_channel.extend(loader.vector(taps)?);
        }
        let mut rates = loader.vector(rates)?;
        if config.log_rates {
            rates.iter_mut().for_each(|rate| *rate = -rate.exp());
        }
        Ok(Self {
            config: *config,
            qkv: qkv.iter().map(|part| loader.linear(part)).collect::<Result<_, _>>()?,
            gate: loader.factored(gate)?,
            strength: loader.linear(strength)?,
            step: loader.factored(step)?,
            step_bias: loader.vector(step_bias)?,
            rates,
            norm: loader.vector(norm)?,
            output: loader.linear(output)?,
            recurrent: Recurrent {
                shape: config.shape(),
                heads: (0..config.value_heads).map(|head| inputs_of(config, head)).collect(),
                taps: by_tap(&by_channel, config.taps),
                convolution_bias: None,
                kept,
            },
        })
    }

    /// The matrices that the residual stream is multiplied with.
    pub(super) fn inputs(&self) -> impl Iterator<Item = &Linear> {
        self.qkv.iter().chain([self.gate.first(), &self.strength, self.step.first()])
    }

    /// Size in bytes of all packed matrices that are neither inputs nor the output.
    pub(super) fn inner_bytes(&self) -> usize {
        [&self.gate, &self.step].into_iter().filter_map(Factored::second).map(Linear::bytes).sum()
    }

    /// Normalizes the queries and keys of a row, `[channels]`.
    fn normalize(&self, path: Path, norms: &[Vec<f32>; 2], row: &mut [f32]) {
        let eps = EPS / self.config.key_dim as f32;
        for (part, norm) in row.chunks_exact_mut(self.config.key_width()).zip(norms) {
            kernels::rms_norm_in_place(path, part, norm, eps, 0.0);
        }
    }

    /// Computes the projections of the rows `normed` of the residual stream in layer `index`.
    /// `gates` are those of the outputs.
    fn project(
        &self,
        (index, inputs): (usize, Inputs),
        normed: &Operands,
        (buffers, gates): (&mut RecurrentBuffers, &mut Vec<f32>),
        adapters: &mut AdapterRows,
        (path, workers): (Path, &Workers),
    ) {
        let (rows, channels) = (normed.rows(), self.config.shape().channels);
        let RecurrentBuffers { projected, strengths, steps, low, operands, .. } = buffers;
        let [low_steps, low_gates] = low;
        let updates = adapters.some_updates(index, Site::Inputs);
        let update = |part| updates.map(|updates| (updates, part));
        // The parts of the site after these are gates, strengths and time steps.
        let count = self.qkv.len();
        let mut products = Vec::with_capacity(6);
        if inputs.kept() {
            let widths = self.qkv.iter().map(Linear::out_features);
            let parts = ColumnsMut::divide(&mut projected[..rows * channels], rows, widths);
            let parts = self.qkv.iter().zip(parts).enumerate();
            let parts = parts
                .map(|(index, (linear, part))| linear.product(update(index), Sink::Columns(part)));
            products.extend(parts);
            let sink = self.strength.rows_sink(strengths, rows);
            products.push(self.strength.product(update(count + 1), sink));
        }
        let steps = (&self.step, low_steps, steps, (count + 2, Site::Steps));
        let gates = (&self.gate, low_gates, gates, (count, Site::Gates));
        let wanted = [inputs.kept().then_some(steps), inputs.own().then_some(gates)];
        let mut factored: Vec<_> = wanted.into_iter().flatten().collect();
        for (weights, low, out, (part, _)) in &mut factored {
            let first = weights.first();
            let to = if weights.second().is_some() { low } else { out };
            products.push(first.product(update(*part), first.rows_sink(to, rows)));
        }
        linear::multiply_groups(path, normed, products, workers);
        let seconds = factored.into_iter().filter_map(|(weights, low, out, (_, site))| {
            Some((weights.second()?, &*low, out, site))
        });
        let seconds: Vec<_> = seconds.collect();
        if seconds.is_empty() {
            return;
        }
        operands.reset_groups(seconds.iter().map(|(second, ..)| (rows, [&second.matrix])));
        let rank = seconds[0].0.matrix.in_features();
        operands.fill(workers.for_pass(seconds.len() * rows, rank), |group, first, block| {
            block.copy_from_slice(&seconds[group].1[first * rank..][..block.len()]);
        });
        for (_, low, _, site) in &seconds {
            adapters.lower((index, *site), path, workers, |row, out| {
                out.copy_from_slice(&low[row * rank..][..rank]);
            });
        }
        let seconds = seconds.into_iter().enumerate();
        let products = seconds.map(|(group, (second, _, out, site))| {
            let updates = adapters.some_updates(index, site).map(|updates| (updates, 0));
            GroupProduct { group, ..second.product(updates, second.rows_sink(out, rows)) }
        });
        linear::multiply_groups(path, operands, products, workers);
    }

    /// The weights with which an RMS norm of a query head and of a key head divides by the root of
    /// the sum of squares and not of their mean; queries are also multiplied by `key_dim^-0.5`.
    fn head_norms(&self) -> [Vec<f32>; 2] {
        let size = self.config.key_dim as f32;
        [1.0 / size, 1.0 / size.sqrt()].map(|weight| vec![weight; self.config.key_dim])
    }

    /// Fills the decays and strengths of a row: decays of each head, then one strength for each.
    fn fill_factors(&self, path: Path, [strengths, steps]: [&[f32]; 2], factors: &mut [f32]) {
        let (decays, factors) = factors.split_at_mut(steps.len());
        match self.config.kind {
            DeltaNetKind::Gated => {
                let rates = self.rates.iter().zip(&self.step_bias);
                for ((decay, step), (rate, bias)) in decays.iter_mut().zip(steps).zip(rates) {
                    *decay = (rate * softplus(step + bias)).exp();
                }
            }
            DeltaNetKind::Kimi { .. } => {
                decays.copy_from_slice(steps);
                let dim = self.config.key_dim;
                let heads = decays.chunks_exact_mut(dim).zip(self.step_bias.chunks_exact(dim));
                for ((decays, bias), rate) in heads.zip(&self.rates) {
                    kernels::decay_in_place(path, decays, bias, *rate);
                }
            }
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
        let buffers_and_gates = (&mut *buffers, &mut activations.gates);
        let (adapters, path) = (&mut self.adapters, self.path);
        layer.project((index, inputs), normed, buffers_and_gates, adapters, (path, workers));
        self.profile.mark(Stage::Qkv);
        if inputs.kept() {
            let (path, norms) = (self.path, layer.head_norms());
            let finish = |row: &mut [f32], gates: [&[f32]; 2], factors: &mut [f32]| {
                layer.normalize(path, &norms, row);
                layer.fill_factors(path, gates, factors);
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
        let Some(layer) = self.layers[index].delta_net() else { return };
        let (shape, width) = (layer.recurrent.shape, layer.config.value_width());
        let activations = &mut self.activations;
        let (buffers, gates) = (&activations.recurrent, &activations.gates);
        let plan = &self.plan;
        let row_of = |row: usize, out: &mut [f32]| {
            // The recurrence has computed all rows of the batch.
            let source = plan.batch_row(row);
            for (head, out) in out.chunks_exact_mut(shape.value_dim).enumerate() {
                let output = buffers.output(&shape, plan, (source, head));
                kernels::rms_norm(path, output, &layer.norm, eps, 0.0, out);
            }
            let gates = &gates[row * width..][..width];
            match layer.config.kind {
                DeltaNetKind::Gated => kernels::mul_silu(path, out, gates),
                DeltaNetKind::Kimi { .. } => kernels::mul_sigmoid(path, out, gates),
            }
        };
        let mixed = &mut activations.mixed;
        mixed.reset(rows, &[&layer.output.matrix]);
        passes::pack_rows(mixed, workers.for_pass(rows, 4 * width), width, row_of);
        self.adapters.lower((index, Site::Output), path, workers, row_of);
        self.profile.mark(Stage::Recurrence);
    }
}
