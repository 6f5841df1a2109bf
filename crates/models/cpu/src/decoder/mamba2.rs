//! Mamba-2, which layers have in place of attention or next to it.
//!
//! A layer projects its input to the gates of the outputs, to values, keys and queries, and to the
//! time steps of the heads ([`Decoder::mamba2_inputs`]). To the outputs of the recurrence
//! (`recurrent.rs`), each head adds a share of its value. They are gated, and then normalized
//! ([`Decoder::gate_mamba2`]).

use stolon_backend::StepBatch;
use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{Mamba2Config, Mamba2Weights};
use stolon_checkpoint::error::ModelError;
use stolon_kernels as kernels;

use super::attention::Inputs;
use super::linear::{Linear, Loader};
use super::profile::Stage;
use super::recurrent::{HeadInputs, Recurrent, by_tap, softplus};
use super::{Decoder, StepState, linear, passes};
use crate::workers::Workers;

/// The weights of a layer with Mamba-2: the fields of [`Mamba2Weights`].
#[derive(Debug)]
pub(super) struct Mamba2 {
    pub(super) config: Mamba2Config,
    pub(super) gate: Linear,
    pub(super) xbc: Linear,
    pub(super) step: Linear,
    /// `[heads]`.
    step_bias: Vec<f32>,
    /// The decay rates per time step, `[heads]`, all negative.
    rates: Vec<f32>,
    /// `[heads]`.
    skip: Vec<f32>,
    /// `[heads * head_dim]`; `None` if the outputs are not normalized.
    norm: Option<Vec<f32>>,
    pub(super) output: Linear,
    recurrent: Recurrent,
}

impl Mamba2 {
    /// Loads what `spec` describes.
    pub(super) fn load(
        spec: &Mamba2Weights,
        kept: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let Mamba2Weights {
            config,
            inputs,
            step_bias,
            rates,
            skip,
            taps,
            convolution_bias,
            norm,
            output,
        } = spec;
        let [gate, xbc, step] = &inputs.parts;
        let mut by_channel = loader.vector(taps)?;
        let [_, value, key, query, _] = config.input_factors;
        // The convolution adds up its inputs, so their factors may be those of its taps.
        let (values, rest) = by_channel.split_at_mut(config.heads * config.head_dim * config.taps);
        let (keys, queries) = rest.split_at_mut(config.key_width() * config.taps);
        for (taps, factor) in [(values, value), (keys, key), (queries, query)] {
            taps.iter_mut().for_each(|tap| *tap *= factor);
        }
        let mut rates = loader.vector(rates)?;
        if config.log_rates {
            rates.iter_mut().for_each(|rate| *rate = -rate.exp());
        }
        Ok(Self {
            config: *config,
            gate: loader.linear(gate)?,
            xbc: loader.linear(xbc)?,
            step: loader.linear(step)?,
            step_bias: loader.vector(step_bias)?,
            rates,
            skip: loader.vector(skip)?,
            norm: loader.optional_vector(norm.as_ref())?,
            output: loader.linear(output)?,
            recurrent: Recurrent {
                shape: config.shape(),
                heads: (0..config.heads).map(|head| inputs_of(config, head)).collect(),
                taps: by_tap(&by_channel, config.taps),
                convolution_bias: loader.optional_vector(convolution_bias.as_ref())?,
                kept,
            },
        })
    }

    /// Fills the decays and strengths of a row, `[2, heads]`: strengths are the time steps.
    fn fill_factors(&self, steps: &[f32], factors: &mut [f32]) {
        let [.., step_scale] = self.config.input_factors;
        let (decays, strengths) = factors.split_at_mut(self.config.heads);
        let factors = decays.iter_mut().zip(strengths);
        let rates = self.rates.iter().zip(&self.step_bias);
        for (((decay, strength), step), (rate, bias)) in factors.zip(steps).zip(rates) {
            *strength = softplus(step_scale * step + bias);
            *decay = (rate * *strength).exp();
        }
    }
}

/// The channels of a head: all values are followed by the keys and the queries of all groups.
fn inputs_of(config: &Mamba2Config, head: usize) -> HeadInputs {
    let group = head / (config.heads / config.groups);
    let key = config.heads * config.head_dim + group * config.state_dim;
    HeadInputs { query: key + config.key_width(), key, value: head * config.head_dim }
}

impl Decoder {
    /// Computes the projections of layer `index` and, with those that later positions need, the
    /// state after each slice.
    pub(super) fn mamba2_inputs(
        &mut self,
        index: usize,
        inputs: Inputs,
        (batch, step): (&StepBatch, &mut StepState<'_>),
        workers: &Workers,
    ) {
        let Some(layer) = self.layers[index].mamba2() else { return };
        let activations = &mut self.activations;
        let (normed, buffers) = (&activations.normed, &mut activations.recurrent);
        let updates = self.adapters.some_updates(index, Site::MambaInputs);
        let products = [
            (inputs.own(), &layer.gate, &mut activations.gates),
            (inputs.kept(), &layer.xbc, &mut buffers.projected),
            (inputs.kept(), &layer.step, &mut buffers.steps),
        ];
        let wanted = products.into_iter().enumerate().filter(|(_, (wanted, ..))| *wanted);
        let products = wanted.map(|(part, (_, linear, out))| {
            let sink = linear.rows_sink(out, normed.rows());
            linear.product(updates.map(|updates| (updates, part)), sink)
        });
        linear::multiply_groups(self.path, normed, products, workers);
        let [gate_scale, ..] = layer.config.input_factors;
        if inputs.own() && gate_scale != 1.0 {
            let gates = &mut activations.gates[..normed.rows() * layer.gate.matrix.out_features()];
            let chunk = workers.chunk_rows(gates.len(), 1);
            let scale = |gates: &mut [f32]| kernels::scale(self.path, gates, gate_scale);
            workers.run(gates.chunks_mut(chunk), scale);
        }
        self.profile.mark(Stage::Qkv);
        if inputs.kept() {
            let finish = |_: &mut [f32], [_, steps]: [&[f32]; 2], factors: &mut [f32]| {
                layer.fill_factors(steps, factors);
            };
            let step = (&self.plan, batch, step);
            layer.recurrent.advance(self.path, buffers, step, &finish, workers);
            self.profile.mark(Stage::Recurrence);
        }
    }

    /// Gates and perhaps normalizes the outputs of the recurrence in layer `index`, and packs them
    /// for the output projection. `rows` rows have an output.
    pub(super) fn gate_mamba2(&mut self, index: usize, rows: usize, workers: &Workers) {
        let (path, eps) = (self.path, self.config.rms_norm_eps);
        let Some(layer) = self.layers[index].mamba2() else { return };
        let (shape, width) = (layer.recurrent.shape, layer.recurrent.shape.value_width());
        let group = width / layer.config.groups;
        let activations = &mut self.activations;
        let (buffers, gates) = (&activations.recurrent, &activations.gates);
        let plan = &self.plan;
        let row_of = |row: usize, out: &mut [f32]| {
            // The recurrence has computed all rows of the batch.
            let source = plan.batch_row(row);
            let values = &buffers.convolved[source * shape.channels..][..width];
            let heads = out.chunks_exact_mut(shape.value_dim).zip(&layer.skip);
            for (head, (out, skip)) in heads.enumerate() {
                let output = buffers.output(&shape, plan, (source, head));
                let values = &values[head * shape.value_dim..];
                for ((out, output), value) in out.iter_mut().zip(output).zip(values) {
                    *out = output + skip * value;
                }
            }
            kernels::mul_silu(path, out, &gates[row * width..][..width]);
            let Some(norm) = &layer.norm else { return };
            let groups = out.chunks_exact_mut(group).zip(norm.chunks_exact(group));
            groups.for_each(|(out, weight)| {
                kernels::rms_norm_in_place(path, out, weight, eps, 0.0);
            });
        };
        let mixed = &mut activations.mixed;
        mixed.reset(rows, &[&layer.output.matrix]);
        passes::pack_rows(mixed, workers.for_pass(rows, 4 * width), width, row_of);
        self.adapters.lower((index, Site::MambaOutput), path, workers, row_of);
        self.profile.mark(Stage::Recurrence);
    }
}
