//! Selective attention (Moondream 3). Queries and values are multiplied by factors that depend on
//! the token and on its position. [`AttentionConfig::selective`] has the formula.
//!
//! The factors of a token depend on all its queries, keys and values. Queries and keys are
//! therefore rotated, and keys and values written to the KV store, only after the projections are
//! complete.
//!
//! [`AttentionConfig::selective`]: stolon_checkpoint::config::AttentionConfig::selective

use std::time::Duration;

use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{AttentionConfig, LinearWeights, SelectiveWeights, sigmoid};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{
    self as kernels, ColumnsMut, Epilogue, Operands, Path, Product, RowSums, Sink,
};

use super::adapters::RowUpdates;
use super::linear::{self, Linear, Loader, multiply_all};
use super::pass::{Inputs, Pass};
use super::passes;
use super::profile::Stage;
use crate::kv_store::KvStore;
use crate::workers::Workers;

/// The projections to queries, keys and values, and the weights of the factors: the fields of
/// [`SelectiveWeights`].
#[derive(Debug)]
pub(super) struct Selective {
    config: AttentionConfig,
    q: Linear,
    k: Linear,
    v: Linear,
    queries: Linear,
    values: Linear,
    alpha: Vec<f32>,
}

impl Selective {
    /// Loads the projections to queries, keys and values, and the weights of the factors.
    pub(super) fn load(
        spec: &SelectiveWeights,
        config: &AttentionConfig,
        [query, key, value]: [&LinearWeights; 3],
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let SelectiveWeights { queries, values, alpha } = spec;
        Ok(Self {
            config: *config,
            q: loader.linear(query)?,
            k: loader.linear(key)?,
            v: loader.linear(value)?,
            queries: loader.unbiased(queries)?,
            values: loader.unbiased(values)?,
            alpha: loader.vector(alpha)?,
        })
    }

    /// The projections to queries, keys and values.
    pub(super) fn inputs(&self) -> [&Linear; 3] {
        [&self.q, &self.k, &self.v]
    }

    /// Size in bytes of the packed matrices of the factors.
    pub(super) fn bytes(&self) -> usize {
        self.queries.bytes() + self.values.bytes()
    }

    /// The part of the factor of `head` that depends on the position.
    fn of_position(&self, head: usize, position: u32) -> f32 {
        sigmoid(self.alpha[head] * ((position + 1) as f32).ln()) + 0.5
    }

    /// Multiplies the heads of a row, `[heads, head_dim]`, by their factors. `of_token` has the
    /// parts of the factors that depend on the token, before the tanh, `[heads]`.
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
    /// Computes queries, keys and values, `[rows, width]` side by side in `qkv`. Returns the time
    /// of the epilogues.
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

    /// Multiplies queries and values by their factors, and rotates queries and keys.
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

    /// Computes the parts of the factors that depend on the tokens, from the rows in `qkv`.
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

impl Selective {
    /// Computes queries, keys and values. Queries are written to `q`, and keys and values to `kv`,
    /// at the layer index `kept`.
    pub(super) fn project(
        &self,
        inputs: Inputs,
        (kv, kept): (&mut KvStore, usize),
        (q, buffers): (&mut [f32], &mut SelectiveBuffers),
        pass: &mut Pass<'_>,
    ) {
        let Pass { index, path, plan, normed, workers, .. } = *pass;
        let linears = self.inputs();
        let updates = pass.adapters.updates(index, Site::Inputs);
        let add_bias = |part: usize| {
            updates.then([part], move |sums: RowSums<'_>| {
                linears[part].add_bias(path, sums.feature, sums.first);
            })
        };
        let epilogues = [0, 1, 2].map(add_bias);
        let epilogues = epilogues.each_ref().map(|epilogue| epilogue as Epilogue<'_>);
        let epilogue_time = buffers.project(normed, linears, epilogues, (path, workers));
        pass.profile.mark_with(Stage::Qkv, epilogue_time, Stage::Heads);

        let rope = pass.rope(self.config.rope);
        let heads = passes::Heads::of(pass.config, path, self.config.head_dim, rope, plan);
        buffers.weigh(self, normed.rows(), (path, workers));
        buffers.finish(self, &heads, &plan.positions, (path, workers));
        let width = self.q.out_features();
        let parts = buffers.qkv.chunks_exact(3 * width).map(|qkv| qkv.split_at(width));
        if inputs.own() {
            let to = q.chunks_exact_mut(width);
            to.zip(parts.clone()).for_each(|(to, (q, _))| to.copy_from_slice(q));
        }
        if inputs.kept() {
            let [mut keys, mut values] = kv.rows_mut(kept, path, &plan.slots);
            for (row, (_, kv)) in parts.enumerate() {
                keys.write_row(row, &kv[..width]);
                values.write_row(row, &kv[width..]);
            }
        }
        pass.profile.mark(Stage::Heads);
    }
}
