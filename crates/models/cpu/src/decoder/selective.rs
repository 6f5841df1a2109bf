//! Selective attention (Moondream 3): queries and values have factors that depend on the token and
//! on its position, as [`AttentionConfig::selective`] says.
//!
//! All of a token's queries, keys and values enter its factors, so they are complete before queries
//! and keys are rotated, and before keys and values are written to the KV store.
//!
//! [`AttentionConfig::selective`]: stolon_checkpoint::config::AttentionConfig::selective

use std::time::Duration;

use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{SelectiveWeights, sigmoid};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{
    self as kernels, ColumnsMut, Epilogue, Operands, Path, Product, RowSums, Sink,
};

use super::Decoder;
use super::activations::Activations;
use super::adapters::RowUpdates;
use super::attention::{Inputs, multiply_all};
use super::linear::{self, Linear, Loader};
use super::passes;
use super::profile::Stage;
use crate::kv_store::KvStore;
use crate::workers::Workers;

/// The weights of the factors: the fields of [`SelectiveWeights`].
#[derive(Debug)]
pub(super) struct Selective {
    queries: Linear,
    values: Linear,
    alpha: Vec<f32>,
}

impl Selective {
    /// Loads the weights.
    pub(super) fn load(
        spec: &SelectiveWeights,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let SelectiveWeights { queries, values, alpha } = spec;
        Ok(Self {
            queries: loader.unbiased(queries)?,
            values: loader.unbiased(values)?,
            alpha: loader.vector(alpha)?,
        })
    }

    /// Size in bytes of all packed matrices.
    pub(super) fn bytes(&self) -> usize {
        self.queries.bytes() + self.values.bytes()
    }

    /// The part of the factor of `head` that depends on the position.
    fn of_position(&self, head: usize, position: u32) -> f32 {
        sigmoid(self.alpha[head] * ((position + 1) as f32).ln()) + 0.5
    }

    /// Multiplies the heads of a row, `[heads, head_dim]`, with their factors. `of_token` are the
    /// parts that depend on the token, before the tanh.
    fn scale(&self, path: Path, row: &mut [f32], of_token: &[f32], position: u32) {
        let head_dim = row.len() / of_token.len();
        let heads = row.chunks_exact_mut(head_dim).zip(of_token).enumerate();
        for (head, (values, of_token)) in heads {
            kernels::scale(path, values, of_token.tanh() + self.of_position(head, position));
        }
    }
}

/// The buffers of selective attention, which are reused.
#[derive(Debug, Default)]
pub(super) struct SelectiveBuffers {
    /// Queries, keys and values of each row, one after the other.
    qkv: Vec<f32>,
    /// The same after the activation function, packed.
    operands: Operands,
    /// The parts of the factors of queries and of values that depend on the token, `[rows, heads]`.
    of_tokens: [Vec<f32>; 2],
}

impl SelectiveBuffers {
    /// Computes queries, keys and values, each of the same width. Returns the time of the
    /// epilogues.
    fn project(
        &mut self,
        normed: &Operands,
        linears: [&Linear; 3],
        epilogues: [Epilogue<'_>; 3],
        (path, workers): (Path, &Workers),
    ) -> Duration {
        let (rows, widths) = (normed.rows(), linears.map(Linear::out_features));
        self.qkv.resize(rows * widths.iter().sum::<usize>(), 0.0);
        let matrices = linears.map(|linear| [&linear.matrix]);
        let columns = ColumnsMut::divide(&mut self.qkv, rows, widths);
        let parts = matrices.iter().zip(epilogues).zip(columns);
        let mut products: Vec<Product<'_>> = parts
            .map(|((matrices, epilogue), columns)| Product {
                group: 0,
                matrices,
                step: 1,
                epilogue: Some(epilogue),
                sink: Sink::Columns(columns),
            })
            .collect();
        multiply_all(path, normed, &mut products, workers)
    }

    /// Multiplies queries and values with their factors, and rotates queries and keys.
    fn finish(
        &mut self,
        layer: &Selective,
        heads: &passes::Heads<'_>,
        positions: &[u32],
        (path, workers): (Path, &Workers),
    ) {
        let Self { qkv, of_tokens, .. } = self;
        let (rows, count) = (positions.len(), layer.alpha.len());
        let width = qkv.len() / rows / 3;
        let [of_queries, of_values] = of_tokens
            .each_ref()
            .map(|of_tokens| move |row: usize| &of_tokens[row * count..][..count]);
        let chunk = workers.chunk_rows(rows, 3 * width);
        let parts = qkv.chunks_mut(chunk * 3 * width).enumerate();
        workers.run(parts, |(part, qkv)| {
            for (row, qkv) in (part * chunk..).zip(qkv.chunks_exact_mut(3 * width)) {
                let (q, kv) = qkv.split_at_mut(width);
                let (k, v) = kv.split_at_mut(width);
                layer.scale(path, q, of_queries(row), positions[row]);
                layer.scale(path, v, of_values(row), positions[row]);
                heads.rotate(row, q);
                heads.rotate(row, k);
            }
        });
    }

    /// Computes what the factors of the rows in `qkv` take from their tokens.
    fn weigh(&mut self, layer: &Selective, rows: usize, (path, workers): (Path, &Workers)) {
        let Self { qkv, operands, of_tokens: [of_queries, of_values] } = self;
        let width = qkv.len() / rows;
        operands.reset(rows, &[&layer.queries.matrix, &layer.values.matrix]);
        operands.fill(workers.for_pass(rows, width), |_, first, block| {
            block.copy_from_slice(&qkv[first * width..][..block.len()]);
            kernels::gelu_tanh_in_place(path, block);
        });
        let mut products = [(&layer.queries, of_queries), (&layer.values, of_values)];
        for (linear, out) in &mut products {
            out.resize(rows * linear.out_features(), 0.0);
        }
        let products = products
            .into_iter()
            .map(|(linear, out)| linear.product(None, linear.rows_sink(out, rows)));
        linear::multiply_groups(path, operands, products, workers);
    }
}

impl Decoder {
    /// Computes queries, keys and values of a layer with selective attention. Keys and values are
    /// written to `kv`.
    pub(super) fn selective_heads(
        &mut self,
        index: usize,
        inputs: Inputs,
        kv: &mut KvStore,
        workers: &Workers,
    ) {
        let (config, path) = (&self.config, self.path);
        let Some(layer) = self.layers[index].attention() else { return };
        let (Some(selective), Some(k), Some(v)) = (&layer.selective, &layer.k, &layer.v) else {
            return;
        };
        let Activations { normed, q, selective: buffers, .. } = &mut self.activations;
        let linears = [&layer.q, k, v];
        let updates = self.adapters.updates(index, Site::Inputs);
        let add_bias = |part: usize| {
            updates.then([part], move |sums: RowSums<'_>| {
                linears[part].add_bias(path, sums.feature, sums.first);
            })
        };
        let epilogues = [0, 1, 2].map(add_bias);
        let epilogues = epilogues.each_ref().map(|epilogue| epilogue as Epilogue<'_>);
        let epilogue_time = buffers.project(normed, linears, epilogues, (path, workers));
        self.profile.mark_with(Stage::Qkv, epilogue_time, Stage::Heads);

        let rows = normed.rows();
        let rope = layer.config.rope.map(|rope| &self.ropes[rope]);
        let heads = passes::Heads::of(config, path, layer.config.head_dim, rope, &self.plan);
        buffers.weigh(selective, rows, (path, workers));
        buffers.finish(selective, &heads, &self.plan.positions, (path, workers));
        let width = layer.q.out_features();
        let parts = buffers.qkv.chunks_exact(3 * width).map(|qkv| qkv.split_at(width));
        if inputs.own() {
            let to = q.chunks_exact_mut(width);
            to.zip(parts.clone()).for_each(|(to, (q, _))| to.copy_from_slice(q));
        }
        if inputs.kept() {
            let [mut keys, mut values] = kv.rows_mut(layer.kept, path, &self.plan.slots);
            for (row, (_, kv)) in parts.enumerate() {
                keys.write_row(row, &kv[..width]);
                values.write_row(row, &kv[width..]);
            }
        }
        self.profile.mark(Stage::Heads);
    }
}
