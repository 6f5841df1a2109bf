//! Per-layer embeddings (Gemma 4): each token has values for each layer, from an embedding of its
//! own and from a projection of the usual one. At the end of a layer, its values are the other
//! factor of a gated projection of the residual stream, whose result is added to it.
//!
//! All values of a step are computed before the first layer. Each row depends on its token only.

use stolon_backend::StepBatch;
use stolon_checkpoint::config::{
    GateFunction, PerLayerEmbeddingWeights, PerLayerInput, PerLayerWeights,
};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{
    self as kernels, Epilogue, HeadNorm, Matrix, Product, RowSums, Sink, multiply,
};

use super::Decoder;
use super::activations::Activations;
use super::linear::{Linear, Loader};
use super::passes;
use super::profile::Stage;
use crate::workers::Workers;

/// The embeddings of all layers: the fields of [`PerLayerEmbeddingWeights`].
#[derive(Debug)]
pub(super) struct PerLayerEmbedding {
    embedding: Matrix,
    projection: Linear,
    norm: Vec<f32>,
}

impl PerLayerEmbedding {
    pub(super) fn load(
        spec: &PerLayerEmbeddingWeights,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let PerLayerEmbeddingWeights { embedding, projection, norm } = spec;
        Ok(Self {
            embedding: loader.matrix(embedding)?,
            projection: loader.linear(projection)?,
            norm: loader.vector(norm)?,
        })
    }

    /// Size in bytes of all packed matrices.
    pub(super) fn bytes(&self) -> usize {
        self.embedding.bytes() + self.projection.bytes()
    }

    /// Number of values of a token, for all layers.
    pub(super) fn width(&self) -> usize {
        self.projection.matrix.out_features()
    }
}

/// What a layer has for its values: the fields of [`PerLayerWeights`].
#[derive(Debug)]
pub(super) struct PerLayer {
    gate: Linear,
    /// The function of the gate.
    function: GateFunction,
    projection: Linear,
    norm: Vec<f32>,
}

impl PerLayer {
    pub(super) fn load(
        spec: &PerLayerWeights,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let PerLayerWeights {
            config: PerLayerInput { width: _, gate: function },
            gate,
            projection,
            norm,
        } = spec;
        Ok(Self {
            gate: loader.linear(gate)?,
            function: *function,
            projection: loader.linear(projection)?,
            norm: loader.vector(norm)?,
        })
    }

    /// Size in bytes of all packed matrices.
    pub(super) fn bytes(&self) -> usize {
        self.gate.bytes() + self.projection.bytes()
    }
}

impl Decoder {
    /// Computes the values of all rows for all layers from the residual stream before the first
    /// layer, if the model has per-layer embeddings.
    pub(super) fn embed_per_layer(&mut self, batch: &StepBatch, workers: &Workers) {
        let Some(PerLayerEmbedding { embedding, projection, norm: weight }) = &self.per_layer
        else {
            return;
        };
        let (config, path) = (&self.config, self.path);
        let Activations { x, normed, per_layer, .. } = &mut self.activations;
        let (rows, own) = (batch.tokens.len(), weight.len());
        let width = projection.matrix.out_features();
        let per_layer = &mut per_layer[..rows * width];
        normed.reset(rows, &[&projection.matrix]);
        normed.pack(workers.for_pass(rows, config.hidden_size), &x[..rows * config.hidden_size]);
        let scale = (config.hidden_size as f32).powf(-0.5);
        let norm = HeadNorm { weight, eps: config.rms_norm_eps, offset: config.norm_offset };
        let finish = |sums: RowSums<'_>| {
            projection.add_bias(path, sums.feature, sums.first);
            kernels::scale(path, sums.first, scale);
            kernels::norm_and_rope(path, sums.first, own, Some(norm), (&[], &[]));
        };
        let matrices = [&projection.matrix];
        let epilogue = Some(&finish as Epilogue<'_>);
        let sink = Sink::Rows(&mut *per_layer);
        let product = Product { group: 0, matrices: &matrices, step: own, epilogue, sink };
        multiply(path, workers.for_products(&matrices, rows), normed, &mut [product]);

        let scale = (own as f32).sqrt();
        let chunk = workers.chunk_rows(rows, 2 * width);
        let parts = per_layer.chunks_mut(chunk * width).zip(batch.tokens.chunks(chunk));
        workers.run(parts, |(values, tokens)| {
            let mut row = vec![0.0; width];
            for (values, &token) in values.chunks_exact_mut(width).zip(tokens) {
                embedding.row(token as usize, &mut row);
                kernels::scale(path, &mut row, scale);
                kernels::add(path, values, &row);
                kernels::scale(path, values, std::f32::consts::FRAC_1_SQRT_2);
            }
        });
    }

    /// Adds what layer `index` computes of its values to the residual stream of `rows` rows, and
    /// multiplies the result by the factor of the layer. Models without them have neither.
    pub(super) fn finish_layer(&mut self, index: usize, rows: usize, workers: &Workers) {
        self.add_per_layer(index, rows, workers);
        let (path, width) = (self.path, self.config.hidden_size);
        let Some(factor) = self.layers[index].scale else { return };
        let x = &mut self.activations.x[..rows * width];
        let chunk = workers.chunk_rows(rows, width) * width;
        workers.run(x.chunks_mut(chunk), |x| kernels::scale(path, x, factor));
    }

    fn add_per_layer(&mut self, index: usize, rows: usize, workers: &Workers) {
        let (config, path) = (&self.config, self.path);
        let all = self.per_layer.as_ref().map_or(0, PerLayerEmbedding::width);
        let Some(PerLayer { gate, function, projection, norm }) = &self.layers[index].per_layer
        else {
            return;
        };
        let Activations { x, normed, inner, per_layer, projected, .. } = &mut self.activations;
        let x = &mut x[..rows * config.hidden_size];
        normed.reset(rows, &[&gate.matrix]);
        normed.pack(workers.for_pass(rows, config.hidden_size), x);
        inner.reset(rows, &[&projection.matrix]);
        let first = index * gate.matrix.out_features();
        let multiply_gate = |sums: RowSums<'_>| {
            let RowSums { row, feature, first: gates, .. } = sums;
            gate.add_bias(path, feature, gates);
            let values = &per_layer[row * all + first + feature..][..gates.len()];
            passes::apply_gate(*function, path, gates, values);
        };
        let matrices = [&gate.matrix];
        let epilogue = Some(&multiply_gate as Epilogue<'_>);
        let sink = Sink::Operands(inner.only());
        let product = Product { group: 0, matrices: &matrices, step: 1, epilogue, sink };
        multiply(path, workers.for_products(&matrices, rows), normed, &mut [product]);
        let (linear, own_norm) = (projection, Some(&norm[..]));
        let (updates, scale) = (None, None);
        let residual = passes::Residual { config, path, linear, own_norm, updates, scale };
        residual.add(inner, x, projected, workers);
        self.profile.mark(Stage::PerLayer);
    }
}
