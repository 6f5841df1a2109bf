//! Mamba-2, which layers have instead of attention or next to it.
//!
//! A layer projects its input to the gates of the outputs, to values, keys and queries, and to the
//! time steps of the heads ([`Mamba2::project`]). Each head adds a share of its value to the output
//! of its recurrence (`recurrent.rs`). The sums are gated, and then normalized ([`Mamba2::mix`]).

use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{Mamba2Config, Mamba2Weights, decay_rates};
use stolon_checkpoint::error::ModelError;
use stolon_kernels as kernels;

use super::linear::{self, Linear, Loader};
use super::pass::{Inputs, Kept, Pass};
use super::passes;
use super::profile::Stage;
use super::recurrent::{HeadInputs, Recurrent, RecurrentBuffers, by_tap, softplus};

/// The weights of a layer with Mamba-2: the fields of [`Mamba2Weights`].
#[derive(Debug)]
pub(super) struct Mamba2 {
    config: Mamba2Config,
    gate: Linear,
    xbc: Linear,
    step: Linear,
    /// Biases of the time steps, `[heads]`.
    step_bias: Vec<f32>,
    /// The decay rates per time step, `[heads]`, all negative.
    rates: Vec<f32>,
    /// The share of its value that each head adds to its output, `[heads]`.
    skip: Vec<f32>,
    /// Weights of the norm of the outputs, `[heads * head_dim]`; `None` if they are not normalized.
    norm: Option<Vec<f32>>,
    pub(super) output: Linear,
    recurrent: Recurrent,
}

impl Mamba2 {
    /// Loads the tensors that `spec` describes.
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
        config.scale_taps(&mut by_channel);
        Ok(Self {
            config: *config,
            gate: loader.linear(gate)?,
            xbc: loader.linear(xbc)?,
            step: loader.linear(step)?,
            step_bias: loader.vector(step_bias)?,
            rates: decay_rates(loader.vector(rates)?, config.log_rates),
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

    /// Factor by which the output is multiplied.
    pub(super) fn output_factor(&self) -> f32 {
        self.config.output_factor
    }

    /// The projections of the layer's input.
    pub(super) fn inputs(&self) -> [&Linear; 3] {
        [&self.gate, &self.xbc, &self.step]
    }

    /// Fills in the decays and strengths of a row, `[2, heads]`. Strengths are the time steps.
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

/// The channels of a head. The values of all heads are followed by the keys of all groups, and then
/// by their queries.
fn inputs_of(config: &Mamba2Config, head: usize) -> HeadInputs {
    let group = head / (config.heads / config.groups);
    let key = config.heads * config.head_dim + group * config.state_dim;
    HeadInputs { query: key + config.key_width(), key, value: head * config.head_dim }
}

/// The buffers of Mamba-2, which are reused. They have at least as many rows as the step.
#[derive(Debug, Default)]
pub(super) struct Mamba2Buffers {
    recurrent: RecurrentBuffers,
    /// The gates of the outputs, `[rows, heads, head_dim]`.
    gates: Vec<f32>,
}

impl Mamba2Buffers {
    /// Grows the buffers to at least `rows` rows.
    pub(super) fn reserve(&mut self, config: &Mamba2Config, rows: usize) {
        self.recurrent.reserve(&config.shape(), rows);
        passes::grow(&mut self.gates, rows * config.shape().value_width());
    }
}

impl Mamba2 {
    /// Computes the projections. If these include the ones that later positions need, it also
    /// computes the state after each slice.
    pub(super) fn project(
        &self,
        inputs: Inputs,
        kept: Kept<'_, '_>,
        buffers: &mut Mamba2Buffers,
        pass: &mut Pass<'_>,
    ) {
        let Pass { index, path, normed, workers, .. } = *pass;
        let Mamba2Buffers { recurrent, gates } = buffers;
        let updates = pass.adapters.some_updates(index, Site::MambaInputs);
        let products = [
            (inputs.own(), &self.gate, &mut *gates),
            (inputs.kept(), &self.xbc, &mut recurrent.projected),
            (inputs.kept(), &self.step, &mut recurrent.steps),
        ];
        let wanted = products.into_iter().enumerate().filter(|(_, (wanted, ..))| *wanted);
        let products = wanted.map(|(part, (_, linear, out))| {
            let sink = linear.rows_sink(out, normed.rows());
            linear.product(updates.map(|updates| (updates, part)), sink)
        });
        linear::multiply_groups(path, normed, products, workers);
        let [gate_scale, ..] = self.config.input_factors;
        if inputs.own() && gate_scale != 1.0 {
            let gates = &mut gates[..normed.rows() * self.gate.out_features()];
            let chunk = workers.chunk_rows(gates.len(), 1);
            let scale = |gates: &mut [f32]| kernels::scale(path, gates, gate_scale);
            workers.run(gates.chunks_mut(chunk), scale);
        }
        pass.profile.mark(Stage::Qkv);
        if inputs.kept() {
            let finish = |_: &mut [f32], [_, steps]: [&[f32]; 2], factors: &mut [f32]| {
                self.fill_factors(steps, factors);
            };
            self.recurrent.advance(path, recurrent, (pass.plan, kept), &finish, workers);
            pass.profile.mark(Stage::Recurrence);
        }
    }

    /// Gates and, if the model has a norm, normalizes the outputs of the recurrence, and packs them
    /// for the output projection. `rows` rows have an output.
    pub(super) fn mix(&self, rows: usize, buffers: &Mamba2Buffers, pass: &mut Pass<'_>) {
        let Pass { config, path, plan, .. } = *pass;
        let (shape, width) = (self.recurrent.shape, self.recurrent.shape.value_width());
        let group = width / self.config.groups;
        let Mamba2Buffers { recurrent, gates } = buffers;
        let row_of = |row: usize, out: &mut [f32]| {
            // The outputs of the recurrence include all rows of the batch.
            let source = plan.batch_row(row);
            let values = &recurrent.convolved[source * shape.channels..][..width];
            let heads = out.chunks_exact_mut(shape.value_dim).zip(&self.skip);
            for (head, (out, skip)) in heads.enumerate() {
                let output = recurrent.output(&shape, plan, (source, head));
                let values = &values[head * shape.value_dim..];
                for ((out, output), value) in out.iter_mut().zip(output).zip(values) {
                    *out = output + skip * value;
                }
            }
            kernels::mul_silu(path, out, &gates[row * width..][..width]);
            if let Some(norm) = &self.norm {
                let groups = out.chunks_exact_mut(group).zip(norm.chunks_exact(group));
                groups.for_each(|(out, weight)| {
                    kernels::rms_norm_in_place(path, out, weight, config.norms.eps, 0.0);
                });
            }
        };
        pass.pack_result((&self.output.matrix, Site::MambaOutput), (rows, 4 * width), row_of);
        pass.profile.mark(Stage::Recurrence);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::decoder::tests::{Case, convolve, dot, silu, softplus};

    /// Goal: Mamba-2 with two groups equals a plain loop over positions, whether these were
    /// computed in this step or in an earlier one.
    #[test]
    fn mamba2_equals_a_plain_loop() {
        let (heads, dim, groups, states) = (4, 16, 2, 6);
        let case = Case::run(
            &json!({
                "model_type": "granitemoehybrid", "num_attention_heads": 4,
                "num_hidden_layers": 2, "layer_types": ["mamba", "attention"],
                "num_local_experts": 0, "shared_intermediate_size": 32, "mamba_n_heads": heads,
                "mamba_d_head": dim, "mamba_n_groups": groups, "mamba_d_state": states,
                "mamba_expand": 2, "mamba_d_conv": 4, "position_embedding_type": "nope",
            }),
            13,
        );
        let weights = |part: &str| case.weights(&format!("mamba.{part}"));
        let project = |part: &str, x: &[f64]| case.project(&format!("mamba.{part}"), x);
        let inputs: Vec<_> = case.normed.iter().map(|x| project("in_proj.xbc", x)).collect();
        let mut state = vec![vec![vec![0.0; dim]; states]; heads];
        let mut expected = Vec::new();
        for (at, x) in case.normed.iter().enumerate() {
            let sums = convolve(&inputs, weights("conv1d"), at);
            let xbc = sums.iter().zip(weights("conv1d.bias")).map(|(sum, bias)| silu(sum + bias));
            let xbc: Vec<f64> = xbc.collect();
            let (steps, gates) = (project("in_proj.step", x), project("in_proj.gate", x));
            let mut outputs = Vec::new();
            for (head, state) in state.iter_mut().enumerate() {
                let step = softplus(steps[head] + weights("dt_bias")[head]);
                let decay = (-weights("A_log")[head].exp() * step).exp();
                let value = &xbc[head * dim..][..dim];
                let group = head / (heads / groups);
                let key = &xbc[heads * dim + group * states..][..states];
                let query = &xbc[heads * dim + (groups + group) * states..][..states];
                for (row, key) in state.iter_mut().zip(key) {
                    for (state, value) in row.iter_mut().zip(value) {
                        *state = decay * *state + step * key * value;
                    }
                }
                outputs.extend((0..dim).map(|index| {
                    let column: Vec<f64> = state.iter().map(|row| row[index]).collect();
                    dot(query, &column) + weights("D")[head] * value[index]
                }));
            }
            let gated: Vec<f64> =
                outputs.iter().zip(&gates).map(|(output, gate)| output * silu(*gate)).collect();
            let width = heads * dim / groups;
            let parts = gated.chunks_exact(width).zip(weights("norm").chunks_exact(width));
            let normed: Vec<f64> =
                parts.flat_map(|(part, weight)| case.rms_norm(part, weight)).collect();
            expected.push(project("out_proj", &normed));
        }
        case.check(&expected);
    }
}
