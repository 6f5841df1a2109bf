//! The second half of a layer: an MLP with or without a gate, or a mixture of experts.

use stolon_kernels::{Epilogue, Matrix, Product, RowSums, Sink, multiply};

use super::Decoder;
use super::activations::Activations;
use super::experts::ExpertsPass;
use super::layer::FeedForward;
use super::linear::{Linear, Loader};
use super::passes::{self, Norm};
use super::profile::Stage;
use crate::adapter::Site;
use crate::config::{MlpInputs, MlpWeights};
use crate::error::ModelError;
use crate::workers::Workers;

/// An MLP: the fields of [`MlpWeights`].
#[derive(Debug)]
pub(super) struct Mlp {
    /// `None` if the MLP has no gate.
    pub(super) gate: Option<Linear>,
    pub(super) up: Linear,
    pub(super) down: Linear,
}

impl Mlp {
    /// Loads an MLP.
    pub(super) fn load(spec: &MlpWeights, loader: &mut Loader<'_>) -> Result<Self, ModelError> {
        let MlpWeights { inputs, down } = spec;
        let (gate, up) = match inputs {
            MlpInputs::Gated(gate_up) => {
                let [gate, up] = &gate_up.parts;
                (Some(loader.linear(gate)?), up)
            }
            MlpInputs::Plain(up) => (None, up),
        };
        Ok(Self { gate, up: loader.linear(up)?, down: loader.linear(down)? })
    }

    /// The matrices that the input is multiplied with: that of the gate, if there is one, then that
    /// of `up`.
    pub(super) fn inputs(&self) -> Vec<&Matrix> {
        self.gate.iter().chain([&self.up]).map(|linear| &linear.matrix).collect()
    }

    /// Size in bytes of all packed matrices.
    pub(super) fn bytes(&self) -> usize {
        self.inputs().into_iter().map(Matrix::bytes).sum::<usize>() + self.down.bytes()
    }
}

impl Decoder {
    /// Normalizes the residual stream of `rows` rows, computes the MLP or the experts of layer
    /// `index`, and adds the result to the residual stream. The MLP of a parallel layer reads the
    /// rows that were packed for attention.
    pub(super) fn feed_forward(&mut self, index: usize, rows: usize, workers: &Workers) {
        let (config, path, layer) = (&self.config, self.path, &self.layers[index]);
        match &layer.feed_forward {
            Some(FeedForward::Dense(_)) => self.dense(index, rows, workers),
            Some(FeedForward::Experts(experts)) => {
                let Activations { x, normed, inner, routing, .. } = &mut self.activations;
                let norm = Norm::of(config, layer.mlp_input_norm.as_ref(), path);
                let pass = ExpertsPass { config, path, workers, experts };
                let x = &mut x[..rows * config.hidden_size];
                pass.add(norm, x, normed, inner, routing, &mut self.profile);
            }
            None => {}
        }
    }

    /// Computes the MLP of layer `index` and adds the result to the residual stream.
    fn dense(&mut self, index: usize, rows: usize, workers: &Workers) {
        let (config, path, layer) = (&self.config, self.path, &self.layers[index]);
        let Some(FeedForward::Dense(mlp)) = &layer.feed_forward else { return };
        let Activations { x, normed, inner, inner_rows, projected, .. } = &mut self.activations;
        let x = &mut x[..rows * config.hidden_size];
        let matrices = mlp.inputs();
        if !layer.parallel {
            let norm = Norm::of(config, layer.mlp_input_norm.as_ref(), path);
            normed.reset(rows, &matrices);
            norm.pack(x, normed, workers);
            self.adapters.lower((index, Site::GateUp), path, workers, |row, out| {
                norm.apply(&x[row * out.len()..][..out.len()], out);
            });
            self.profile.mark(Stage::Residual);
        }
        inner.reset(rows, &[&mlp.down.matrix]);
        let updates = self.adapters.updates(index, Site::GateUp);
        let gate = |sums: RowSums<'_>| {
            updates.add(0, sums.row, sums.feature, sums.first);
            if mlp.gate.is_some() {
                updates.add(1, sums.row, sums.feature, sums.second);
            }
            passes::activate(config, mlp, path, sums);
        };
        let epilogue = Some(&gate as Epilogue<'_>);
        // An adapter of the down projection reads the inner rows, too, as they are before they are
        // packed.
        let width = mlp.down.matrix.in_features();
        let is_read = self.adapters.has(index, Site::Down);
        inner_rows.resize(if is_read { rows * width } else { 0 }, 0.0);
        let sink = if is_read { Sink::Rows(inner_rows) } else { Sink::Operands(inner.only()) };
        let product = Product { group: 0, matrices: &matrices, step: 1, epilogue, sink };
        let threads = workers.for_products(&matrices, rows);
        let epilogue_time = multiply(path, threads, normed, &mut [product]);
        if is_read {
            inner.pack(workers.for_pass(rows, width), inner_rows);
            self.adapters.lower((index, Site::Down), path, workers, |row, out| {
                out.copy_from_slice(&inner_rows[row * width..][..width]);
            });
        }
        self.profile.mark_with(Stage::GateUp, epilogue_time, Stage::Gate);
        let own_norm = layer.mlp_output_norm.as_deref();
        let updates = Some(self.adapters.updates(index, Site::Down));
        let scale = config.output_scale(|multipliers| multipliers.mlp_output);
        let linear = &mlp.down;
        let residual = passes::Residual { config, path, linear, own_norm, updates, scale };
        let epilogue_time = residual.add(inner, x, projected, workers);
        self.profile.mark_with(Stage::Down, epilogue_time, Stage::Residual);
    }
}
