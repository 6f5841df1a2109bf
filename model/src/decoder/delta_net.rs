//! Gated DeltaNet, which most layers of Qwen3.5 have in place of attention.
//!
//! A layer computes, in this order:
//!
//! 1. the projections to queries, keys and values, to the strengths and the time steps of the value
//!    heads, and to the gates of the outputs ([`Decoder::delta_net_inputs`]);
//! 2. the short convolution over queries, keys and values, the norms of queries and keys, and the
//!    decays and strengths (`prepare.rs`);
//! 3. the recurrence, token by token, in parallel over sequences and value heads (`recur.rs`), which
//!    also copies states to the checkpoints of the step;
//! 4. the norm and the gate of the outputs ([`Decoder::gate_delta_net`]).
//!
//! Steps 1 to 3 are computed for all rows, because later positions need the state; the gates and
//! step 4 only for rows whose output is needed.
//!
//! **Invariant: batch invariance.** All inputs of the recurrence are f32. Those of the convolution
//! at the positions before a slice are read from the state, with the bits that were computed, and
//! the recurrence takes one token after the other. So neither states nor outputs depend on chunks,
//! checkpoints, threads, or the rest of the batch.

mod prepare;
mod recur;

use stolon_backend::StepBatch;
use stolon_kernels::{self as kernels, Matrix, Product, Sink};

use super::attention::Inputs;
use super::layer::Mixer;
use super::linear::{Linear, Loader};
use super::profile::Stage;
use super::{Decoder, StepState};
use crate::config::{DeltaNetConfig, DeltaNetWeights};
use crate::error::ModelError;
use crate::workers::Workers;

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
    /// `[taps, channels]`, the oldest position first.
    taps: Vec<f32>,
    /// `[value_dim]`.
    norm: Vec<f32>,
    pub(super) output: Linear,
    /// Index of the layer in the states.
    kept: usize,
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
            taps: by_tap(&by_channel, config.taps),
            norm: loader.vector(norm)?,
            output: loader.linear(output)?,
            kept,
        })
    }
}

/// Transposes taps `[channels, taps]` to `[taps, channels]`.
fn by_tap(by_channel: &[f32], taps: usize) -> Vec<f32> {
    (0..taps).flat_map(|tap| by_channel.iter().skip(tap).step_by(taps).copied()).collect()
}

/// The buffers of layers with Gated DeltaNet, which are reused. Those with rows have at least as
/// many as the step.
#[derive(Debug, Default)]
pub(super) struct DeltaNetBuffers {
    /// Queries, keys and values before the convolution, `[rows, channels]`.
    projected: Vec<f32>,
    /// The same after the convolution and the norms.
    convolved: Vec<f32>,
    /// Strengths before their sigmoid, `[rows, value_heads]`.
    strengths: Vec<f32>,
    /// Time steps before their softplus, `[rows, value_heads]`.
    steps: Vec<f32>,
    /// Decays, then strengths, `[rows, 2, value_heads]`.
    factors: Vec<f32>,
    /// The outputs of each slice, `[value_heads, tokens of the slice, value_dim]`, one slice after
    /// the other.
    outputs: Vec<f32>,
}

impl DeltaNetBuffers {
    /// Grows the buffers to at least `rows` rows.
    pub(super) fn reserve(&mut self, config: &DeltaNetConfig, rows: usize) {
        for (buffer, width) in [
            (&mut self.projected, config.channels()),
            (&mut self.convolved, config.channels()),
            (&mut self.strengths, config.value_heads),
            (&mut self.steps, config.value_heads),
            (&mut self.factors, 2 * config.value_heads),
            (&mut self.outputs, config.value_width()),
        ] {
            if buffer.len() < rows * width {
                buffer.resize(rows * width, 0.0);
            }
        }
    }
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
        let Mixer::DeltaNet(layer) = &self.layers[index].mixer else { return };
        let activations = &mut self.activations;
        let (normed, buffers) = (&activations.normed, &mut activations.delta_net);
        let rows = normed.rows();
        let kept = inputs.kept();
        let products = [
            (kept, [&layer.qkv.matrix], &mut buffers.projected),
            (kept, [&layer.strength.matrix], &mut buffers.strengths),
            (kept, [&layer.step.matrix], &mut buffers.steps),
            (inputs.own(), [&layer.gate.matrix], &mut activations.gates),
        ];
        let mut products = Vec::from(products);
        products.retain(|(wanted, ..)| *wanted);
        let mut products: Vec<Product<'_>> = products
            .iter_mut()
            .map(|(_, matrices, out)| Product {
                group: 0,
                matrices: &*matrices,
                step: 1,
                epilogue: None,
                sink: Sink::Rows(&mut out[..rows * matrices[0].out_features()]),
            })
            .collect();
        let matrices: Vec<&Matrix> = products.iter().map(|product| product.matrices[0]).collect();
        let threads = workers.for_products(&matrices, rows);
        kernels::multiply(self.path, threads, normed, &mut products);
        drop(products);
        self.profile.mark(Stage::Qkv);
        if kept {
            let slices = self.plan.slices(batch);
            let mut states = step.states.layer_mut(layer.kept, &batch.sequences);
            layer.prepare(self.path, buffers, &slices, &states, workers);
            let mut copies = recur::StateCopies::new(&slices, layer.config.state_len());
            copies.copy_inputs(&layer.config, buffers, &slices, &states);
            layer.recur(self.path, buffers, &slices, (&mut states, &mut copies), workers);
            layer.keep_inputs(buffers, &slices, &mut states);
            copies.write(step.kv, step.states.offset_bytes(layer.kept));
            self.profile.mark(Stage::Recurrence);
        }
    }

    /// Normalizes and gates the outputs of the recurrence in layer `index`, and packs them for the
    /// output projection. `rows` rows have an output.
    pub(super) fn gate_delta_net(&mut self, index: usize, rows: usize, workers: &Workers) {
        let (path, eps) = (self.path, self.config.rms_norm_eps);
        let is_last = index + 1 == self.layers.len();
        let Mixer::DeltaNet(layer) = &self.layers[index].mixer else { return };
        let DeltaNetConfig { value_heads, value_dim, .. } = layer.config;
        let width = layer.config.value_width();
        let activations = &mut self.activations;
        let (outputs, gates) = (&activations.delta_net.outputs, &activations.gates);
        let plan = &self.plan;
        activations.mixed.reset(rows, &[&layer.output.matrix]);
        activations.mixed.fill(workers.for_pass(rows, 4 * width), |_, first, out| {
            for (row, out) in (first..).zip(out.chunks_exact_mut(width)) {
                // The last layer has only the rows whose output is needed.
                let source = if is_last { plan.output_rows[row] } else { row };
                let (slice_row, tokens) = plan.slice_of(source);
                for (head, out) in out.chunks_exact_mut(value_dim).enumerate() {
                    let token = head * tokens + source - slice_row;
                    let output = &outputs[(slice_row * value_heads + token) * value_dim..];
                    kernels::rms_norm(path, &output[..value_dim], &layer.norm, eps, 0.0, out);
                }
                kernels::mul_silu(path, out, &gates[row * width..][..width]);
            }
        });
        self.profile.mark(Stage::Recurrence);
    }
}
