//! Gated DeltaNet and Kimi Delta Attention, which most layers of Qwen3.5 and Kimi Linear have
//! instead of attention.
//!
//! A layer projects its input to queries, keys and values, to the strengths and the time steps of
//! the value heads, and to the gates of the outputs ([`DeltaNet::project`]). Queries and
//! keys are normalized after the convolution. The outputs of the recurrence (`recurrent.rs`) are
//! normalized, and then gated ([`DeltaNet::mix`]).
//!
//! The gates and all later operations are computed only for rows whose output is needed. Everything
//! else is computed for all rows, because later positions need the state.

use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{
    DeltaNetConfig, DeltaNetKind, DeltaNetWeights, decay_rates, sigmoid,
};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{self as kernels, ColumnsMut, Operands, Path, Sink};

use super::linear::{self, Factored, GroupProduct, Linear, Loader};
use super::pass::{Inputs, Kept, Pass};
use super::passes;
use super::profile::Stage;
use super::recurrent::{HeadInputs, Recurrent, RecurrentBuffers, by_tap, softplus};

/// Epsilon that is added to the sum of squares of a query or key before the square root.
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
    /// The bias of each time step, one for each decay.
    step_bias: Vec<f32>,
    /// The decay rates per time step, `[value_heads]`, all negative.
    rates: Vec<f32>,
    /// Weights of the norm of the outputs, `[value_dim]`.
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
        Ok(Self {
            config: *config,
            qkv: qkv.iter().map(|part| loader.linear(part)).collect::<Result<_, _>>()?,
            gate: loader.factored(gate)?,
            strength: loader.linear(strength)?,
            step: loader.factored(step)?,
            step_bias: loader.vector(step_bias)?,
            rates: decay_rates(loader.vector(rates)?, config.log_rates),
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

    /// Size in bytes of the packed matrices other than the input and output projections.
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

    /// Computes the projections. If these include the ones that later positions need, it also
    /// computes the state after each slice.
    pub(super) fn project(
        &self,
        inputs: Inputs,
        kept: Kept<'_, '_>,
        buffers: &mut DeltaNetBuffers,
        pass: &mut Pass<'_>,
    ) {
        self.multiply(inputs, buffers, pass);
        pass.profile.mark(Stage::Qkv);
        if inputs.kept() {
            let (path, norms) = (pass.path, self.head_norms());
            let finish = |row: &mut [f32], gates: [&[f32]; 2], factors: &mut [f32]| {
                self.normalize(path, &norms, row);
                self.fill_factors(path, gates, factors);
            };
            let recurrent = &mut buffers.recurrent;
            self.recurrent.advance(path, recurrent, (pass.plan, kept), &finish, pass.workers);
            pass.profile.mark(Stage::Recurrence);
        }
    }

    /// Normalizes and gates the outputs of the recurrence, and packs them for the output
    /// projection. `rows` rows have an output.
    pub(super) fn mix(&self, rows: usize, buffers: &DeltaNetBuffers, pass: &mut Pass<'_>) {
        let Pass { config, path, plan, .. } = *pass;
        let (shape, width) = (self.recurrent.shape, self.config.value_width());
        let DeltaNetBuffers { recurrent, gates, .. } = buffers;
        let row_of = |row: usize, out: &mut [f32]| {
            // The outputs of the recurrence include all rows of the batch.
            let source = plan.batch_row(row);
            for (head, out) in out.chunks_exact_mut(shape.value_dim).enumerate() {
                let output = recurrent.output(&shape, plan, (source, head));
                kernels::rms_norm(path, output, &self.norm, config.norms.eps, 0.0, out);
            }
            let gates = &gates[row * width..][..width];
            match self.config.kind {
                DeltaNetKind::Gated => kernels::mul_silu(path, out, gates),
                DeltaNetKind::Kimi { .. } => kernels::mul_sigmoid(path, out, gates),
            }
        };
        pass.pack_result((&self.output.matrix, Site::Output), (rows, 4 * width), row_of);
        pass.profile.mark(Stage::Recurrence);
    }

    /// Computes the projections of the layer's input.
    fn multiply(&self, inputs: Inputs, buffers: &mut DeltaNetBuffers, pass: &mut Pass<'_>) {
        let Pass { index, path, normed, workers, .. } = *pass;
        let adapters = &mut *pass.adapters;
        let (rows, channels) = (normed.rows(), self.config.shape().channels);
        let DeltaNetBuffers { recurrent, gates, low, operands } = buffers;
        let RecurrentBuffers { projected, strengths, steps, .. } = recurrent;
        let [low_steps, low_gates] = low;
        let updates = adapters.some_updates(index, Site::Inputs);
        let update = |part| updates.map(|updates| (updates, part));
        // The site has the parts of `qkv`, followed by the gates, the strengths and the time steps.
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

    /// Weights of the RMS norms of query heads and key heads. With them, an RMS norm divides by the
    /// square root of the sum of squares instead of their mean. Queries are also multiplied by
    /// `key_dim^-0.5`.
    fn head_norms(&self) -> [Vec<f32>; 2] {
        let size = self.config.key_dim as f32;
        [1.0 / size, 1.0 / size.sqrt()].map(|weight| vec![weight; self.config.key_dim])
    }

    /// Fills in the factors of a row: the decays of each head, followed by one strength per head.
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

/// The buffers of [`DeltaNet`], which are reused. They have at least as many rows as the step.
#[derive(Debug, Default)]
pub(super) struct DeltaNetBuffers {
    recurrent: RecurrentBuffers,
    /// The gates of the outputs, `[rows, value_heads, value_dim]`.
    gates: Vec<f32>,
    /// The low-rank vectors of time steps and of gates, `[rows, rank]` each, if these projections
    /// are products of two matrices.
    low: [Vec<f32>; 2],
    /// These vectors, packed, with one group of rows for time steps and one for gates.
    operands: Operands,
}

impl DeltaNetBuffers {
    /// Grows the buffers to at least `rows` rows.
    pub(super) fn reserve(&mut self, config: &DeltaNetConfig, rows: usize) {
        self.recurrent.reserve(&config.shape(), rows);
        passes::grow(&mut self.gates, rows * config.value_width());
        let rank = config.rank().unwrap_or(0);
        self.low.iter_mut().for_each(|low| passes::grow(low, rows * rank));
    }
}

/// The channels of a value head.
fn inputs_of(config: &DeltaNetConfig, head: usize) -> HeadInputs {
    let query = config.key_head(head) * config.key_dim;
    let key = config.key_width() + query;
    HeadInputs { query, key, value: 2 * config.key_width() + head * config.value_dim }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::decoder::tests::{Case, convolve, dot, silu, softplus};

    /// Goal: Gated DeltaNet with two value heads for each key head equals a plain loop over
    /// positions, whether these were computed in this step or in an earlier one.
    #[test]
    fn gated_delta_net_equals_a_plain_loop() {
        let (key_heads, heads, key_dim, dim) = (2, 4, 6, 10);
        let case = Case::run(
            &json!({
                "model_type": "qwen3_5_text", "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 8, "num_hidden_layers": 2,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_key_heads": key_heads, "linear_num_value_heads": heads,
                "linear_key_head_dim": key_dim, "linear_value_head_dim": dim,
            }),
            13,
        );
        let weights = |part: &str| case.weights(&format!("linear_attn.{part}"));
        let project = |part: &str, x: &[f64]| case.project(&format!("linear_attn.{part}"), x);
        let inputs: Vec<_> = case.normed.iter().map(|x| project("in_proj_qkv", x)).collect();
        let mut state = vec![vec![vec![0.0; dim]; key_dim]; heads];
        let mut expected = Vec::new();
        for (at, x) in case.normed.iter().enumerate() {
            let sums = convolve(&inputs, weights("conv1d"), at);
            let qkv: Vec<f64> = sums.into_iter().map(silu).collect();
            let (strengths, steps) = (project("in_proj_b", x), project("in_proj_a", x));
            let gates = project("in_proj_z", x);
            let mut outputs = Vec::new();
            for (head, state) in state.iter_mut().enumerate() {
                let unit = |first: usize| -> Vec<f64> {
                    let part = &qkv[first * key_dim..][..key_dim];
                    let norm = (dot(part, part) + 1e-6).sqrt();
                    part.iter().map(|value| value / norm).collect()
                };
                let key_head = head / (heads / key_heads);
                let (query, key) = (unit(key_head), unit(key_heads + key_head));
                let value = &qkv[2 * key_heads * key_dim + head * dim..][..dim];
                let step = softplus(steps[head] + weights("dt_bias")[head]);
                let decay = (-weights("A_log")[head].exp() * step).exp();
                let strength = 1.0 / (1.0 + (-strengths[head]).exp());
                state.iter_mut().flatten().for_each(|state| *state *= decay);
                let output: Vec<f64> = (0..dim)
                    .map(|index| {
                        let read = |by: &[f64], state: &[Vec<f64>]| -> f64 {
                            by.iter().zip(state).map(|(by, row)| by * row[index]).sum()
                        };
                        let change = strength * (value[index] - read(&key, state));
                        let rows = state.iter_mut().zip(&key);
                        rows.for_each(|(row, key)| row[index] += key * change);
                        read(&query, state) / (key_dim as f64).sqrt()
                    })
                    .collect();
                let normed = case.rms_norm(&output, weights("norm"));
                let gates = &gates[head * dim..][..dim];
                outputs.extend(normed.iter().zip(gates).map(|(value, gate)| value * silu(*gate)));
            }
            expected.push(project("out_proj", &outputs));
        }
        case.check(&expected);
    }
}
