//! Per-layer embeddings (Gemma 4). Each token has a vector for each layer, the sum of an embedding
//! of its own and of a projection of the usual embedding. At the end of a layer, a gate computed
//! from the residual stream is multiplied with this vector, and the projection of the product is
//! added to the residual stream.
//!
//! The vectors of all layers are computed before the first layer. Each row depends on its token
//! only.

use stolon_checkpoint::config::{
    DecoderConfig, GateFunction, PerLayerEmbeddingWeights, PerLayerInput, PerLayerWeights,
};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{self as kernels, Epilogue, HeadNorm, Path, Product, RowSums, Sink, multiply};

use super::activations::Activations;
use super::linear::{Linear, Loader};
use super::passes::{self, NormVectors};
use crate::table::Table;
use crate::workers::Workers;

/// The per-layer embeddings of a model: the fields of [`PerLayerEmbeddingWeights`].
#[derive(Debug)]
pub(super) struct PerLayerEmbedding {
    embedding: Table,
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
            embedding: loader.table(embedding)?,
            projection: loader.linear(projection)?,
            norm: loader.vector(norm)?,
        })
    }

    /// Size in bytes of all packed matrices.
    pub(super) fn bytes(&self) -> usize {
        self.embedding.bytes() + self.projection.bytes()
    }

    /// Computes the per-layer embeddings of `tokens` for all layers. The projected part is computed
    /// from the residual stream before the first layer.
    pub(super) fn fill(
        &self,
        tokens: &[u32],
        (config, path): (&DecoderConfig, Path),
        activations: &mut Activations,
        workers: &Workers,
    ) {
        let Self { embedding, projection, norm: weight } = self;
        let Activations { x, normed, per_layer, .. } = activations;
        let (rows, own) = (tokens.len(), weight.len());
        let width = projection.matrix.out_features();
        let per_layer = &mut per_layer[..rows * width];
        normed.reset(rows, &[&projection.matrix]);
        normed.pack(workers.for_pass(rows, config.hidden_size), &x[..rows * config.hidden_size]);
        let scale = (config.hidden_size as f32).powf(-0.5);
        let norm = HeadNorm { weight, eps: config.norms.eps, offset: config.norms.offset };
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
        let parts = per_layer.chunks_mut(chunk * width).zip(tokens.chunks(chunk));
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

    /// Number of values that a token has in all layers together.
    pub(super) fn width(&self) -> usize {
        self.projection.matrix.out_features()
    }
}

/// The weights with which one layer applies its per-layer embeddings: the fields of
/// [`PerLayerWeights`].
#[derive(Debug)]
pub(super) struct PerLayer {
    gate: Linear,
    /// The function of the gate.
    function: GateFunction,
    projection: Linear,
    norm: NormVectors,
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
            norm: NormVectors::load(norm, loader)?,
        })
    }

    /// Size in bytes of all packed matrices.
    pub(super) fn bytes(&self) -> usize {
        self.gate.bytes() + self.projection.bytes()
    }

    /// Adds the result of the per-layer embeddings of layer `index` to the residual stream of
    /// `rows` rows. A token has `all` values in all layers together.
    pub(super) fn add(
        &self,
        (index, all): (usize, usize),
        rows: usize,
        (config, path): (&DecoderConfig, Path),
        activations: &mut Activations,
        workers: &Workers,
    ) {
        let Self { gate, function, projection, norm } = self;
        let Activations { x, normed, inner, per_layer, projected, .. } = activations;
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
        let (linear, own_norm) = (projection, Some(norm));
        let (updates, scale) = (None, None);
        let residual = passes::Residual { path, linear, own_norm, updates, scale };
        residual.add(inner, x, projected, workers);
    }
}
