//! The second half of a layer: an MLP, a mixture of experts, or both next to each other.

use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::DecoderConfig;
use stolon_kernels::{self as kernels, Epilogue, Path, Product, RowSums, Sink, multiply};

use super::Decoder;
use super::activations::Activations;
use super::adapters::{AdapterRows, RowUpdates, Updates};
use super::experts::{DenseAndExperts, Experts, ExpertsPass};
use super::layer::{FeedForward, Layer};
use super::mlp::Mlp;
use super::passes::{self, Norm, NormVectors, Residual};
use super::profile::{Profile, Stage};
use crate::workers::Workers;

/// The inputs and buffers of the second half of a layer for `rows` rows.
struct MlpPass<'a> {
    /// Index of the layer.
    index: usize,
    rows: usize,
    config: &'a DecoderConfig,
    path: Path,
    layer: &'a Layer,
    activations: &'a mut Activations,
    adapters: &'a mut AdapterRows,
    profile: &'a mut Profile,
    workers: &'a Workers,
}

impl Decoder {
    /// Normalizes the residual stream of `rows` rows, computes the MLP or the experts of layer
    /// `index`, and adds the result to the residual stream. In a parallel layer, the MLP reads the
    /// rows that were packed for attention, and [`Self::route`] has already chosen the experts.
    pub(super) fn feed_forward(&mut self, index: usize, rows: usize, workers: &Workers) {
        let mut pass = self.mlp_pass(index, rows, workers);
        let layer = pass.layer;
        match &layer.feed_forward {
            Some(FeedForward::Dense(mlp)) => pass.add_dense(mlp),
            Some(FeedForward::Experts(experts)) => {
                if !layer.parallel {
                    pass.route(experts, layer.mlp_input_norm.as_ref());
                }
                pass.add_experts(experts);
            }
            Some(FeedForward::DenseAndExperts(both)) => pass.add_dense_and_experts(both),
            None => {}
        }
    }

    /// If the parallel layer `index` has experts, normalizes the residual stream of `rows` rows and
    /// chooses the experts. They have the same input as attention, so they must be chosen before
    /// attention changes the residual stream.
    pub(super) fn route(&mut self, index: usize, rows: usize, workers: &Workers) {
        let mut pass = self.mlp_pass(index, rows, workers);
        let layer = pass.layer;
        match &layer.feed_forward {
            Some(FeedForward::Experts(experts)) => {
                pass.route(experts, layer.attention_input_norm.as_ref());
            }
            Some(FeedForward::Dense(_) | FeedForward::DenseAndExperts(_)) | None => {}
        }
    }

    fn mlp_pass<'a>(&'a mut self, index: usize, rows: usize, workers: &'a Workers) -> MlpPass<'a> {
        let Self { config, path, layers, activations, adapters, profile, .. } = self;
        let layer = &layers[index];
        let path = *path;
        MlpPass { index, rows, config, path, layer, activations, adapters, profile, workers }
    }
}

impl MlpPass<'_> {
    /// Computes an MLP and adds the result to the residual stream.
    fn add_dense(&mut self, mlp: &Mlp) {
        self.multiply_inputs(mlp);
        let Self { index, config, path, layer, workers, .. } = *self;
        let own_norm = layer.mlp_output_norm.as_ref();
        let updates = self.adapters.updates(index, Site::Down);
        let residual = Residual { own_norm, ..output(config, path, mlp, updates) };
        let Activations { x, inner, projected, .. } = &mut *self.activations;
        let x = &mut x[..self.rows * config.hidden_size];
        let epilogue_time = residual.add(inner, x, projected, workers);
        self.profile.mark_with(Stage::Down, epilogue_time, Stage::Residual);
    }

    /// Normalizes the residual stream for experts, and chooses them.
    fn route(&mut self, experts: &Experts, norm: Option<&NormVectors>) {
        let Activations { x, normed, routing, .. } = &mut *self.activations;
        let norm = Norm::of(self.config.hidden_size, norm, self.path);
        let x = &x[..self.rows * self.config.hidden_size];
        let pass = experts_pass(experts, self.index, (self.config, self.path, self.workers));
        pass.route(norm, x, normed, routing, self.adapters);
        self.profile.mark(Stage::Route);
    }

    /// Computes the experts that were chosen and adds the result to the residual stream.
    fn add_experts(&mut self, experts: &Experts) {
        let Activations { x, normed, inner, routing, .. } = &mut *self.activations;
        let x = &mut x[..self.rows * self.config.hidden_size];
        let pass = experts_pass(experts, self.index, (self.config, self.path, self.workers));
        pass.add(x, [normed, inner], routing, self.adapters, self.profile);
    }

    /// Computes an MLP and experts, both from the residual stream, and adds the sum of their
    /// outputs to it. Both outputs are normalized, and so is their sum.
    fn add_dense_and_experts(&mut self, both: &DenseAndExperts) {
        self.multiply_inputs(&both.mlp);
        let Self { index, config, path, layer, workers, .. } = *self;
        let Activations { x, normed, inner, routing, projected, mixture, .. } =
            &mut *self.activations;
        let len = self.rows * config.hidden_size;
        let (x, projected, mixture) = (&mut x[..len], &mut projected[..len], &mut mixture[..len]);
        let updates = self.adapters.updates(index, Site::Down);
        let residual = output(config, path, &both.mlp, updates);
        residual.multiply(inner, Sink::Rows(&mut *projected), workers);
        self.profile.mark(Stage::Down);

        let norm = Norm::of(config.hidden_size, Some(&both.experts_input_norm), path);
        let pass = experts_pass(&both.experts, index, (config, path, workers));
        pass.route(norm, x, normed, routing, self.adapters);
        mixture.fill(0.0);
        pass.add(mixture, [normed, inner], routing, self.adapters, self.profile);

        let width = config.hidden_size;
        let chunk = workers.chunk_rows(self.rows, 2 * width) * width;
        let parts = projected.chunks_mut(chunk).zip(mixture.chunks_mut(chunk));
        workers.run(parts, |(projected, mixture)| {
            both.mlp_output_norm.apply_in_place(path, projected);
            both.experts_output_norm.apply_in_place(path, mixture);
            kernels::add(path, projected, mixture);
        });
        match &layer.mlp_output_norm {
            Some(norm) => {
                passes::add_normed(path, (norm, None), [x, projected], workers);
            }
            None => {
                let parts = x.chunks_mut(chunk).zip(projected.chunks(chunk));
                workers.run(parts, |(x, projected)| kernels::add(path, x, projected));
            }
        }
        self.profile.mark(Stage::Residual);
    }

    /// Computes the inner activations of an MLP, `[rows, width]`, and packs them for the down
    /// projection.
    fn multiply_inputs(&mut self, mlp: &Mlp) {
        let Self { index, rows, config, path, layer, workers, .. } = *self;
        let Activations { x, normed, inner, inner_rows, .. } = &mut *self.activations;
        let x = &x[..rows * config.hidden_size];
        let matrices = mlp.inputs();
        if !layer.parallel {
            let norm = Norm::of(config.hidden_size, layer.mlp_input_norm.as_ref(), path);
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
        // If an adapter changes the down projection, it reads the inner activations before they are
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

/// The forward pass of the experts of layer `index`.
fn experts_pass<'a>(
    experts: &'a Experts,
    index: usize,
    (config, path, workers): (&'a DecoderConfig, Path, &'a Workers),
) -> ExpertsPass<'a> {
    let (width, residual_scale) = (config.hidden_size, config.residual_scale.unwrap_or(1.0));
    ExpertsPass { width, residual_scale, path, workers, experts, index }
}

/// The down projection of an MLP, without a norm. `updates` are the updates of it by adapters.
fn output<'a>(
    config: &'a DecoderConfig,
    path: Path,
    mlp: &'a Mlp,
    updates: Updates<'a>,
) -> Residual<'a> {
    let scale = passes::output_scale(config, mlp.output_factor);
    let updates = Some(updates);
    Residual { path, linear: &mlp.down, own_norm: None, updates, scale }
}
