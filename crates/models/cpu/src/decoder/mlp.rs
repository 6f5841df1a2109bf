//! The second half of a layer: an MLP with or without a gate, or a mixture of experts.

use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{DecoderConfig, GateConfig, MlpInputs, MlpWeights, PlainFunction};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{self as kernels, Epilogue, Matrix, Path, Product, RowSums, Sink, multiply};

use super::Decoder;
use super::activations::Activations;
use super::adapters::{RowUpdates, Updates};
use super::experts::ExpertsPass;
use super::layer::FeedForward;
use super::linear::{Linear, Loader};
use super::passes::{self, Norm, Residual};
use super::profile::Stage;
use crate::workers::Workers;

/// An MLP: the fields of [`MlpWeights`].
#[derive(Debug)]
pub(super) struct Mlp {
    inner: Inner,
    pub(super) down: Linear,
    output_factor: f32,
}

/// The projections to the inner features, and what is made of these.
#[derive(Debug)]
enum Inner {
    /// A gate, and the features that it is multiplied with.
    Gated { gate: Linear, up: Linear, config: GateConfig },
    /// Only features.
    Plain { up: Linear, function: PlainFunction },
}

impl Mlp {
    /// Loads an MLP.
    pub(super) fn load(spec: &MlpWeights, loader: &mut Loader<'_>) -> Result<Self, ModelError> {
        let MlpWeights { inputs, down, output_factor } = spec;
        let inner = match inputs {
            MlpInputs::Gated(gate_up, config) => {
                let [gate, up] = &gate_up.parts;
                let (gate, up) = (loader.linear(gate)?, loader.linear(up)?);
                Inner::Gated { gate, up, config: *config }
            }
            MlpInputs::Plain(up, function) => {
                Inner::Plain { up: loader.linear(up)?, function: *function }
            }
        };
        Ok(Self { inner, down: loader.linear(down)?, output_factor: *output_factor })
    }

    /// The projection to the features, apart from that to the gate.
    fn up(&self) -> &Linear {
        match &self.inner {
            Inner::Gated { up, .. } | Inner::Plain { up, .. } => up,
        }
    }

    /// Adds `offset` to the features.
    pub(super) fn shift(&mut self, offset: f32) {
        match &mut self.inner {
            Inner::Gated { up, .. } | Inner::Plain { up, .. } => up.shift(offset),
        }
    }

    /// Number of multiply-adds of the projection of a row to the features.
    pub(super) fn work(&self) -> usize {
        self.up().matrix.in_features() * self.up().matrix.out_features()
    }

    /// The matrices that the input is multiplied with: that of the gate, if there is one, then that
    /// of the features.
    pub(super) fn inputs(&self) -> Vec<&Matrix> {
        match &self.inner {
            Inner::Gated { gate, up, .. } => vec![&gate.matrix, &up.matrix],
            Inner::Plain { up, .. } => vec![&up.matrix],
        }
    }

    /// The epilogue of the projections to the inner features: adds the biases and applies the
    /// activation function. The result replaces the values of the gate, or of the only projection.
    pub(super) fn activate(&self, path: Path, sums: RowSums<'_>) {
        let RowSums { feature, first, second, .. } = sums;
        match &self.inner {
            Inner::Gated { gate, up, config: GateConfig { function, factor } } => {
                gate.add_bias(path, feature, first);
                if *factor != 1.0 {
                    kernels::scale(path, first, *factor);
                }
                up.add_bias(path, feature, second);
                passes::apply_gate(*function, path, first, second);
            }
            Inner::Plain { up, function } => {
                up.add_bias(path, feature, first);
                match function {
                    PlainFunction::GeluTanh => kernels::gelu_tanh_in_place(path, first),
                    PlainFunction::SquaredRelu => kernels::squared_relu_in_place(path, first),
                }
            }
        }
    }

    /// Size in bytes of all packed matrices.
    pub(super) fn bytes(&self) -> usize {
        self.inputs().into_iter().map(Matrix::bytes).sum::<usize>() + self.down.bytes()
    }
}

impl Decoder {
    /// Normalizes the residual stream of `rows` rows, computes the MLP or the experts of layer
    /// `index`, and adds the result to the residual stream. The MLP of a parallel layer reads the
    /// rows that were packed for attention, and [`Self::route`] must have chosen its experts.
    pub(super) fn feed_forward(&mut self, index: usize, rows: usize, workers: &Workers) {
        match &self.layers[index].feed_forward {
            Some(FeedForward::Dense(_)) => self.dense(index, rows, workers),
            Some(FeedForward::Experts(_)) => self.mixture(index, rows, workers),
            Some(FeedForward::DenseAndExperts(_)) => self.dense_and_mixture(index, rows, workers),
            None => {}
        }
    }

    /// Computes the MLP of layer `index` and adds the result to the residual stream.
    fn dense(&mut self, index: usize, rows: usize, workers: &Workers) {
        self.dense_inputs(index, rows, workers);
        let (config, path, layer) = (&self.config, self.path, &self.layers[index]);
        let Some(FeedForward::Dense(mlp)) = &layer.feed_forward else { return };
        let own_norm = layer.mlp_output_norm.as_deref();
        let updates = self.adapters.updates(index, Site::Down);
        let residual = Residual { own_norm, ..output(config, path, mlp, updates) };
        let Activations { x, inner, projected, .. } = &mut self.activations;
        let x = &mut x[..rows * config.hidden_size];
        let epilogue_time = residual.add(inner, x, projected, workers);
        self.profile.mark_with(Stage::Down, epilogue_time, Stage::Residual);
    }

    /// Normalizes the residual stream of `rows` rows for the experts of layer `index`, if it has
    /// any, and chooses them. Those of a parallel layer read what attention reads, so they are chosen
    /// before attention changes the residual stream.
    pub(super) fn route(&mut self, index: usize, rows: usize, workers: &Workers) {
        let (config, path, layer) = (&self.config, self.path, &self.layers[index]);
        let Some(FeedForward::Experts(experts)) = &layer.feed_forward else { return };
        let Activations { x, normed, routing, .. } = &mut self.activations;
        let vectors = match layer.parallel {
            true => &layer.attention_input_norm,
            false => &layer.mlp_input_norm,
        };
        let norm = Norm::of(config, vectors.as_ref(), path);
        let pass = ExpertsPass { config, path, workers, experts, index };
        let x = &x[..rows * config.hidden_size];
        pass.route(norm, x, normed, routing, &mut self.adapters);
        self.profile.mark(Stage::Route);
    }

    /// Computes the experts of layer `index` and adds the result to the residual stream.
    fn mixture(&mut self, index: usize, rows: usize, workers: &Workers) {
        if !self.layers[index].parallel {
            self.route(index, rows, workers);
        }
        let (config, path, layer) = (&self.config, self.path, &self.layers[index]);
        let Some(FeedForward::Experts(experts)) = &layer.feed_forward else { return };
        let Activations { x, normed, inner, routing, .. } = &mut self.activations;
        let pass = ExpertsPass { config, path, workers, experts, index };
        let x = &mut x[..rows * config.hidden_size];
        pass.add(x, [normed, inner], routing, &mut self.adapters, &mut self.profile);
    }

    /// Computes the MLP and the experts of layer `index`, both from the residual stream, and adds
    /// their sum to it. Both outputs are normalized, and so is the sum.
    fn dense_and_mixture(&mut self, index: usize, rows: usize, workers: &Workers) {
        self.dense_inputs(index, rows, workers);
        let (config, path, layer) = (&self.config, self.path, &self.layers[index]);
        let Some(FeedForward::DenseAndExperts(both)) = &layer.feed_forward else { return };
        let Activations { x, normed, inner, routing, projected, mixture, .. } =
            &mut self.activations;
        let len = rows * config.hidden_size;
        let (x, projected, mixture) = (&mut x[..len], &mut projected[..len], &mut mixture[..len]);
        let updates = self.adapters.updates(index, Site::Down);
        let residual = output(config, path, &both.mlp, updates);
        residual.multiply(inner, Sink::Rows(&mut *projected), workers);
        self.profile.mark(Stage::Down);

        let experts = &both.experts;
        let norm = Norm::of(config, Some(&both.experts_input_norm), path);
        let pass = ExpertsPass { config, path, workers, experts, index };
        pass.route(norm, x, normed, routing, &mut self.adapters);
        mixture.fill(0.0);
        pass.add(mixture, [normed, inner], routing, &mut self.adapters, &mut self.profile);

        let (eps, offset, width) = (config.rms_norm_eps, config.norm_offset, config.hidden_size);
        let chunk = workers.chunk_rows(rows, 2 * width) * width;
        let parts = projected.chunks_mut(chunk).zip(mixture.chunks_mut(chunk));
        workers.run(parts, |(projected, mixture)| {
            let norm = |rows: &mut [f32], weight: &[f32]| {
                kernels::rms_norm_in_place(path, rows, weight, eps, offset);
            };
            norm(projected, &both.mlp_output_norm);
            norm(mixture, &both.experts_output_norm);
            kernels::add(path, projected, mixture);
        });
        if let Some(norm) = layer.mlp_output_norm.as_deref() {
            passes::add_normed(config, path, (norm, None), [x, projected], workers);
        }
        self.profile.mark(Stage::Residual);
    }

    /// Computes the inner rows of the MLP of layer `index`, `[rows, width]`, and packs them for its
    /// last projection.
    fn dense_inputs(&mut self, index: usize, rows: usize, workers: &Workers) {
        let (config, path, layer) = (&self.config, self.path, &self.layers[index]);
        let Some(mlp) = layer.feed_forward.as_ref().and_then(FeedForward::dense) else { return };
        let Activations { x, normed, inner, inner_rows, .. } = &mut self.activations;
        let x = &x[..rows * config.hidden_size];
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
        let gate = updates.then([0, 1], |sums: RowSums<'_>| mlp.activate(path, sums));
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
    }
}

/// The last projection of an MLP, without a norm. `updates` are those by adapters.
fn output<'a>(
    config: &'a DecoderConfig,
    path: Path,
    mlp: &'a Mlp,
    updates: Updates<'a>,
) -> Residual<'a> {
    let scale = passes::output_scale(config, mlp.output_factor);
    let updates = Some(updates);
    Residual { config, path, linear: &mlp.down, own_norm: None, updates, scale }
}
