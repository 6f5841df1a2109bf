//! Multi-head latent attention. What is kept of a position is one key head: the rotated part of the
//! keys, and the normalized latent vector, which is also the value
//! ([`LatentConfig`](stolon_checkpoint::config::LatentConfig)).
//!
//! [`Decoder::latent_inputs`] computes it, and for each head a query of the same length. Then
//! [`Decoder::attend_latent`] projects the average of the latent vectors to the head's value. The
//! products with the matrices of heads are one call each, in which a head is a group of rows.

use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{LatentConfig, LatentSizes, LatentWeights};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{
    self as kernels, AttentionSequence, Epilogue, Matrix, Operands, Path, Product, RowSums, Sink,
};

use super::activations::Activations;
use super::adapters::{AdapterRows, RowUpdates};
use super::attention::{Inputs, multiply_all};
use super::linear::{GroupProduct, Linear, Loader};
use super::profile::Stage;
use super::{Decoder, linear, passes};
use crate::kv_store::KvStore;
use crate::workers::Workers;

/// The weights of a layer's latent attention: the fields of [`LatentWeights`].
#[derive(Debug)]
pub(super) struct Latent {
    config: LatentConfig,
    query_down: Option<(Linear, Vec<f32>)>,
    query: Linear,
    latent: Linear,
    latent_norm: Vec<f32>,
    keys: Vec<Matrix>,
    values: Vec<Matrix>,
    pub(super) output: Linear,
    /// Index of the layer in the KV store.
    kept: usize,
}

impl Latent {
    pub(super) fn load(
        spec: &LatentWeights,
        kept: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let LatentWeights {
            config,
            query_down,
            query,
            latent,
            latent_norm,
            keys,
            values,
            name: _,
            output,
        } = spec;
        let query_down = match query_down {
            Some((down, norm)) => Some((loader.linear(down)?, loader.vector(norm)?)),
            None => None,
        };
        Ok(Self {
            config: *config,
            query_down,
            query: loader.linear(query)?,
            latent: loader.linear(latent)?,
            latent_norm: loader.vector(latent_norm)?,
            keys: keys.iter().map(|spec| loader.matrix(spec)).collect::<Result<_, _>>()?,
            values: values.iter().map(|spec| loader.matrix(spec)).collect::<Result<_, _>>()?,
            output: loader.linear(output)?,
            kept,
        })
    }

    /// The projections of the residual stream: that of queries, or to the vector that queries are
    /// projections of, and that to what is kept.
    pub(super) fn inputs(&self) -> [&Linear; 2] {
        [self.query_down.as_ref().map_or(&self.query, |(down, _)| down), &self.latent]
    }

    /// Size in bytes of all packed matrices that are neither inputs nor the output.
    pub(super) fn inner_bytes(&self) -> usize {
        let query = self.query_down.as_ref().map_or(0, |_| self.query.bytes());
        query + self.keys.iter().chain(&self.values).map(Matrix::bytes).sum::<usize>()
    }
}

/// The buffers of latent attention, which are reused. They have at least as many rows as the step.
#[derive(Debug, Default)]
pub(super) struct LatentBuffers {
    /// The vectors that queries are projections of, `[rows, query_rank]`.
    low: Vec<f32>,
    /// The queries as they are projected, `[rows, num_heads, query_dim]`.
    queries: Vec<f32>,
    /// The products with the matrices of heads, `[num_heads, rows, width or value_dim]`.
    of_heads: Vec<f32>,
    /// The rows of these products, packed, with one group of rows for each head; or those of `low`.
    operands: Operands,
}

impl LatentBuffers {
    /// Grows the buffers to at least `rows` rows.
    pub(super) fn reserve(&mut self, config: &LatentConfig, rows: usize) {
        let LatentConfig { heads, sizes, .. } = *config;
        for (buffer, width) in [
            (&mut self.low, sizes.query_rank.unwrap_or(0)),
            (&mut self.queries, heads * sizes.query_dim()),
            (&mut self.of_heads, heads * sizes.width.max(sizes.value_dim)),
        ] {
            if buffer.len() < rows * width {
                buffer.resize(rows * width, 0.0);
            }
        }
    }

    /// Multiplies `rows` rows of each head with the head's matrix, at the site `at`, into
    /// `of_heads`. `rows_of` returns those of a head at a row of the step.
    fn multiply_heads<'a>(
        &mut self,
        matrices: &[Matrix],
        rows: usize,
        rows_of: impl Fn(usize, usize) -> &'a [f32] + Sync,
        (adapters, at): (&mut AdapterRows, (usize, Site)),
        (path, workers): (Path, &Workers),
    ) {
        adapters.lower_heads(at, matrices.len(), (path, workers), |row, head, out| {
            out.copy_from_slice(rows_of(row, head));
        });
        let updates = adapters.some_updates(at.0, at.1);
        let (inputs, outputs) = (matrices[0].in_features(), matrices[0].out_features());
        self.operands.reset_groups(matrices.iter().map(|matrix| (rows, [matrix])));
        let threads = workers.for_pass(rows * matrices.len(), inputs);
        self.operands.fill(threads, |head, first, block| {
            for (row, out) in (first..).zip(block.chunks_exact_mut(inputs)) {
                out.copy_from_slice(rows_of(row, head));
            }
        });
        let sinks = self.of_heads.chunks_exact_mut(rows * outputs).map(Sink::Rows);
        let products = matrices.iter().zip(sinks).enumerate();
        let products = products.map(|(group, (matrix, sink))| GroupProduct {
            group,
            matrix,
            updates: updates.map(|updates| (updates, group)),
            sink,
        });
        linear::multiply_groups(path, &self.operands, products, workers);
    }

    /// Makes queries that are compared with what is kept, `[rows, num_heads, kept_dim]`, of the
    /// projected ones.
    fn absorb(
        &mut self,
        (layer, index): (&Latent, usize),
        rows: usize,
        q: &mut [f32],
        adapters: &mut AdapterRows,
        (path, workers): (Path, &Workers),
    ) {
        let sizes = layer.config.sizes;
        let LatentSizes { width, rotary_dim, .. } = sizes;
        let (heads, dim) = (layer.keys.len(), sizes.query_dim());
        let queries = std::mem::take(&mut self.queries);
        let query = |row: usize, head: usize| &queries[(row * heads + head) * dim..][..dim];
        let plain = |row, head| &query(row, head)[rotary_dim..];
        let adapters = (adapters, (index, Site::Keys));
        self.multiply_heads(&layer.keys, rows, plain, adapters, (path, workers));
        let kept_dim = sizes.kept_dim();
        let chunk = workers.chunk_rows(rows, heads * kept_dim);
        let parts = q[..rows * heads * kept_dim].chunks_mut(chunk * heads * kept_dim).enumerate();
        let of_heads = &self.of_heads;
        workers.run(parts, |(part, q)| {
            for (index, q) in q.chunks_exact_mut(kept_dim).enumerate() {
                let (row, head) = (part * chunk + index / heads, index % heads);
                let (rotated, latent) = q.split_at_mut(rotary_dim);
                rotated.copy_from_slice(&query(row, head)[..rotary_dim]);
                latent.copy_from_slice(&of_heads[(head * rows + row) * width..][..width]);
            }
        });
        self.queries = queries;
    }
}

impl Decoder {
    /// Computes the queries of layer `index`, and what is kept of positions, which is written to
    /// `kv`.
    pub(super) fn latent_inputs(
        &mut self,
        index: usize,
        inputs: Inputs,
        kv: &mut KvStore,
        workers: &Workers,
    ) {
        let (config, path) = (&self.config, self.path);
        let Some(layer) = self.layers[index].latent() else { return };
        let LatentConfig { heads, sizes: latent, rope, query_scaling, .. } = layer.config;
        let (eps, offset) = (config.rms_norm_eps, config.norm_offset);
        let Activations { normed, latent: buffers, .. } = &mut self.activations;
        let rows = normed.rows();
        let rope = rope.map(|rope| &self.ropes[rope]);
        let rotate = |dim| {
            let heads = passes::Heads::of(config, path, dim, rope, &self.plan);
            heads.with(None, query_scaling)
        };
        let (of_queries, of_kept) = (rotate(latent.query_dim()), rotate(latent.kept_dim()));
        let updates = self.adapters.updates(index, Site::Inputs);
        let epilogue_q = updates.then([0], |sums: RowSums<'_>| {
            if layer.query_down.is_none() {
                of_queries.apply_to_queries(&layer.query, None, sums);
            }
        });
        let epilogue_kept = updates.then([1], |sums: RowSums<'_>| {
            let RowSums { row, feature, first, second } = sums;
            of_kept.apply(None, None, RowSums { row, feature, first: &mut *first, second });
            let vector = &mut first[latent.rotary_dim..];
            kernels::rms_norm_in_place(path, vector, &layer.latent_norm, eps, offset);
        });
        let [q_matrix, kept_matrix] = layer.inputs().map(|linear| [&linear.matrix]);
        let queries = &mut buffers.queries[..rows * heads * latent.query_dim()];
        let mut products: Vec<Product<'_>> = Vec::with_capacity(2);
        if inputs.kept() {
            products.push(Product {
                group: 0,
                matrices: &kept_matrix,
                step: latent.kept_dim(),
                epilogue: Some(&epilogue_kept),
                sink: Sink::Cache(kv.keys_mut(layer.kept, path, &self.plan.slots)),
            });
        }
        if inputs.own() {
            let (step, to) = match latent.query_rank {
                None => (latent.query_dim(), &mut *queries),
                Some(rank) => (1, &mut buffers.low[..rows * rank]),
            };
            let (matrices, sink) = (&q_matrix, Sink::Rows(to));
            let epilogue = Some(&epilogue_q as Epilogue<'_>);
            products.push(Product { group: 0, matrices, step, epilogue, sink });
        }
        let epilogue_time = multiply_all(path, normed, &mut products, workers);
        drop(products);
        self.profile.mark_with(Stage::Qkv, epilogue_time, Stage::Heads);
        if inputs.own() {
            self.latent_queries(index, rows, workers);
        }
    }

    /// Makes the queries of layer `index` that are compared with what is kept.
    fn latent_queries(&mut self, index: usize, rows: usize, workers: &Workers) {
        let (config, path) = (&self.config, self.path);
        let Some(layer) = self.layers[index].latent() else { return };
        let (eps, offset) = (config.rms_norm_eps, config.norm_offset);
        let Activations { q, latent: buffers, .. } = &mut self.activations;
        if let (Some((_, norm)), Some(rank)) = (&layer.query_down, layer.config.sizes.query_rank) {
            let LatentBuffers { low, operands, queries, .. } = &mut *buffers;
            let row_of = |row: usize, out: &mut [f32]| {
                kernels::rms_norm(path, &low[row * rank..][..rank], norm, eps, offset, out);
            };
            operands.reset(rows, &[&layer.query.matrix]);
            passes::pack_rows(operands, workers.for_pass(rows, rank), rank, row_of);
            self.adapters.lower((index, Site::Queries), path, workers, row_of);
            let LatentConfig { sizes, rope, query_scaling, .. } = layer.config;
            let dim = sizes.query_dim();
            let rope = rope.map(|rope| &self.ropes[rope]);
            let heads = passes::Heads::of(config, path, dim, rope, &self.plan);
            let heads = heads.with(None, query_scaling);
            let updates = self.adapters.updates(index, Site::Queries);
            let epilogue = updates.then([0], |sums: RowSums<'_>| {
                heads.apply_to_queries(&layer.query, None, sums);
            });
            let matrices = [&layer.query.matrix];
            let epilogue = Some(&epilogue as Epilogue<'_>);
            let sink = Sink::Rows(&mut queries[..rows * layer.query.out_features()]);
            let product = Product { group: 0, matrices: &matrices, step: dim, epilogue, sink };
            let epilogue_time = multiply_all(path, operands, &mut [product], workers);
            self.profile.mark_with(Stage::Qkv, epilogue_time, Stage::Heads);
        }
        buffers.absorb((layer, index), rows, q, &mut self.adapters, (path, workers));
        self.profile.mark(Stage::Heads);
    }

    /// Computes latent attention for `rows` rows and packs it for the output projection.
    pub(super) fn attend_latent(
        &mut self,
        index: usize,
        rows: usize,
        kv: &KvStore,
        sequences: &[AttentionSequence<'_>],
        workers: &Workers,
    ) {
        let path = self.path;
        let Some(layer) = self.layers[index].latent() else { return };
        let LatentConfig { heads, sizes, scale, .. } = layer.config;
        let LatentSizes { rotary_dim, width, value_dim, .. } = sizes;
        let dim = sizes.kept_dim();
        let Activations { q, attended, mixed, latent: buffers, .. } = &mut self.activations;
        let q = &q[..rows * heads * dim];
        let attended = &mut attended[..rows * heads * dim];
        let attention = passes::LayerAttention {
            path,
            kv,
            kept: layer.kept,
            heads,
            kv_heads: 1,
            head_dim: dim,
            scale,
            softcap: None,
            sliding_window: None,
            sinks: None,
        };
        attention.run(q, sequences, attended, workers);
        let attended = &*attended;
        let latent_of = |row, head| &attended[(row * heads + head) * dim + rotary_dim..][..width];
        let adapters = (&mut self.adapters, (index, Site::Values));
        buffers.multiply_heads(&layer.values, rows, latent_of, adapters, (path, workers));
        let values = &buffers.of_heads;
        mixed.reset(rows, &[&layer.output.matrix]);
        let row_of = |row: usize, out: &mut [f32]| {
            for (head, out) in out.chunks_exact_mut(value_dim).enumerate() {
                out.copy_from_slice(&values[(head * rows + row) * value_dim..][..value_dim]);
            }
        };
        let width = heads * value_dim;
        passes::pack_rows(mixed, workers.for_pass(rows, width), width, row_of);
        self.adapters.lower((index, Site::Output), path, workers, row_of);
        self.profile.mark(Stage::Attention);
    }
}
