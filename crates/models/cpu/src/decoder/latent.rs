//! Multi-head latent attention. The KV store keeps one key head per position, which consists of the
//! rotated part of the keys and the normalized latent vector. The latent vector is also the value
//! ([`LatentConfig`]).
//!
//! [`Latent::project`] computes this key head, and a query of the same length for each head. After
//! attention, [`Latent::mix`] projects the average of the latent vectors to the value of each head.
//! The products with the heads' matrices are computed in one call, in which each head is a group of
//! rows.

use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{LatentConfig, LatentSizes, LatentWeights};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{self as kernels, Epilogue, Matrix, Operands, Path, Product, RowSums, Sink};

use super::adapters::{AdapterRows, RowUpdates};
use super::linear::{self, GroupProduct, Linear, Loader, multiply_all};
use super::pass::{Inputs, Pass};
use super::passes;
use super::profile::Stage;
use super::sequences::Sequences;
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

    /// The projections of the residual stream: the projection to queries or to their low-rank
    /// vector, and the projection to the key head.
    pub(super) fn inputs(&self) -> [&Linear; 2] {
        [self.query_down.as_ref().map_or(&self.query, |(down, _)| down), &self.latent]
    }

    /// Size in bytes of the packed matrices other than the input and output projections.
    pub(super) fn inner_bytes(&self) -> usize {
        let query = self.query_down.as_ref().map_or(0, |_| self.query.bytes());
        query + self.keys.iter().chain(&self.values).map(Matrix::bytes).sum::<usize>()
    }
}

/// The buffers of latent attention, which are reused. They have at least as many rows as the step.
#[derive(Debug, Default)]
pub(super) struct LatentBuffers {
    /// The low-rank vectors from which queries are projected, `[rows, query_rank]`.
    low: Vec<f32>,
    /// The queries after their projection, `[rows, heads, query_dim]`.
    queries: Vec<f32>,
    /// The absorbed queries, which are multiplied with the key heads in the KV store: `[rows,
    /// heads, kept_dim]`.
    q: Vec<f32>,
    /// The averages of the key heads, weighted by attention: `[rows, heads, kept_dim]`.
    attended: Vec<f32>,
    /// The products with the heads' matrices, `[heads, rows, width]` for keys and `[heads, rows,
    /// value_dim]` for values.
    of_heads: Vec<f32>,
    /// The inputs of these products, packed, with one group of rows for each head; also the packed
    /// rows of `low`.
    operands: Operands,
}

impl LatentBuffers {
    /// Grows the buffers to at least `rows` rows.
    pub(super) fn reserve(&mut self, config: &LatentConfig, rows: usize) {
        let LatentConfig { heads, sizes, .. } = *config;
        for (buffer, width) in [
            (&mut self.low, sizes.query_rank.unwrap_or(0)),
            (&mut self.queries, heads * sizes.query_dim()),
            (&mut self.q, heads * sizes.kept_dim()),
            (&mut self.attended, heads * sizes.kept_dim()),
            (&mut self.of_heads, heads * sizes.width.max(sizes.value_dim)),
        ] {
            passes::grow(buffer, rows * width);
        }
    }

    /// Multiplies `rows` rows of each head with the head's matrix, at the site `at`, and writes the
    /// results to `of_heads`. `rows_of` returns the input of a row and a head.
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

    /// Computes the absorbed queries of `rows` rows in layer `index` from the projected ones: the
    /// heads' key matrices are applied to the queries instead of the latent vectors.
    fn absorb(
        &mut self,
        layer: &Latent,
        (index, rows): (usize, usize),
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
        let parts =
            self.q[..rows * heads * kept_dim].chunks_mut(chunk * heads * kept_dim).enumerate();
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

impl Latent {
    /// Computes the queries and the key heads of positions. The key heads are written to `kv`.
    pub(super) fn project(
        &self,
        inputs: Inputs,
        kv: &mut KvStore,
        buffers: &mut LatentBuffers,
        pass: &mut Pass<'_>,
    ) {
        let Pass { index, config, path, plan, normed, workers, .. } = *pass;
        let LatentConfig { heads, sizes, rope, query_scaling, .. } = self.config;
        let (eps, offset) = (config.norms.eps, config.norms.offset);
        let rows = normed.rows();
        let rope = pass.rope(rope);
        let rotate =
            |dim| passes::Heads::of(config, path, dim, rope, plan).with(None, query_scaling);
        let (of_queries, of_kept) = (rotate(sizes.query_dim()), rotate(sizes.kept_dim()));
        let updates = pass.adapters.updates(index, Site::Inputs);
        let epilogue_q = updates.then([0], |sums: RowSums<'_>| {
            if self.query_down.is_none() {
                of_queries.apply_to_queries(&self.query, None, sums);
            }
        });
        let epilogue_kept = updates.then([1], |sums: RowSums<'_>| {
            let RowSums { row, feature, first, second } = sums;
            of_kept.apply(None, None, RowSums { row, feature, first: &mut *first, second });
            let vector = &mut first[sizes.rotary_dim..];
            kernels::rms_norm_in_place(path, vector, &self.latent_norm, eps, offset);
        });
        let [q_matrix, kept_matrix] = self.inputs().map(|linear| [&linear.matrix]);
        let queries = &mut buffers.queries[..rows * heads * sizes.query_dim()];
        let mut products: Vec<Product<'_>> = Vec::with_capacity(2);
        if inputs.kept() {
            products.push(Product {
                group: 0,
                matrices: &kept_matrix,
                step: sizes.kept_dim(),
                epilogue: Some(&epilogue_kept),
                sink: Sink::Cache(kv.keys_mut(self.kept, path, &plan.slots)),
            });
        }
        if inputs.own() {
            let (step, to) = match sizes.query_rank {
                None => (sizes.query_dim(), &mut *queries),
                Some(rank) => (1, &mut buffers.low[..rows * rank]),
            };
            let (matrices, sink) = (&q_matrix, Sink::Rows(to));
            let epilogue = Some(&epilogue_q as Epilogue<'_>);
            products.push(Product { group: 0, matrices, step, epilogue, sink });
        }
        let epilogue_time = multiply_all(path, normed, &mut products, workers);
        drop(products);
        pass.profile.mark_with(Stage::Qkv, epilogue_time, Stage::Heads);
        if inputs.own() {
            if let Some((down, norm)) = &self.query_down {
                self.project_low(down.out_features(), norm, buffers, pass);
            }
            buffers.absorb(self, (index, rows), pass.adapters, (path, workers));
            pass.profile.mark(Stage::Heads);
        }
    }

    /// Computes the queries from their low-rank vectors, which have `rank` elements.
    fn project_low(
        &self,
        rank: usize,
        norm: &[f32],
        buffers: &mut LatentBuffers,
        pass: &mut Pass<'_>,
    ) {
        let Pass { index, config, path, plan, normed, workers, .. } = *pass;
        let (rows, eps, offset) = (normed.rows(), config.norms.eps, config.norms.offset);
        let LatentBuffers { low, operands, queries, .. } = buffers;
        let row_of = |row: usize, out: &mut [f32]| {
            kernels::rms_norm(path, &low[row * rank..][..rank], norm, eps, offset, out);
        };
        operands.reset(rows, &[&self.query.matrix]);
        passes::pack_rows(operands, workers.for_pass(rows, rank), rank, row_of);
        pass.adapters.lower((index, Site::Queries), path, workers, row_of);
        let LatentConfig { sizes, rope, query_scaling, .. } = self.config;
        let dim = sizes.query_dim();
        let heads = passes::Heads::of(config, path, dim, pass.rope(rope), plan);
        let heads = heads.with(None, query_scaling);
        let updates = pass.adapters.updates(index, Site::Queries);
        let epilogue = updates.then([0], |sums: RowSums<'_>| {
            heads.apply_to_queries(&self.query, None, sums);
        });
        let matrices = [&self.query.matrix];
        let epilogue = Some(&epilogue as Epilogue<'_>);
        let sink = Sink::Rows(&mut queries[..rows * self.query.out_features()]);
        let product = Product { group: 0, matrices: &matrices, step: dim, epilogue, sink };
        let epilogue_time = multiply_all(path, operands, &mut [product], workers);
        pass.profile.mark_with(Stage::Qkv, epilogue_time, Stage::Heads);
    }

    /// Computes latent attention for `rows` rows and packs it for the output projection.
    pub(super) fn mix(
        &self,
        rows: usize,
        (kv, sequences): (&KvStore, &Sequences<'_>),
        buffers: &mut LatentBuffers,
        pass: &mut Pass<'_>,
    ) {
        let Pass { index, path, workers, .. } = *pass;
        let LatentConfig { heads, sizes, scale, .. } = self.config;
        let LatentSizes { rotary_dim, width, value_dim, .. } = sizes;
        let dim = sizes.kept_dim();
        let mut attended = std::mem::take(&mut buffers.attended);
        let attention = passes::LayerAttention {
            path,
            kv,
            kept: self.kept,
            heads,
            kv_heads: 1,
            head_dim: dim,
            scale,
            softcap: None,
            sliding_window: None,
            sinks: None,
        };
        let len = rows * heads * dim;
        let (q, sequences) = (&buffers.q[..len], &sequences.blocks);
        attention.run_from(pass.first, q, sequences, &mut attended[..len], workers);
        let latent_of = |row, head| &attended[(row * heads + head) * dim + rotary_dim..][..width];
        let adapters = (&mut *pass.adapters, (index, Site::Values));
        buffers.multiply_heads(&self.values, rows, latent_of, adapters, (path, workers));
        let values = &buffers.of_heads;
        let row_of = |row: usize, out: &mut [f32]| {
            for (head, out) in out.chunks_exact_mut(value_dim).enumerate() {
                out.copy_from_slice(&values[(head * rows + row) * value_dim..][..value_dim]);
            }
        };
        let output = (&self.output.matrix, Site::Output);
        pass.pack_result(output, (rows, heads * value_dim), row_of);
        pass.profile.mark(Stage::Attention);
        buffers.attended = attended;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::decoder::tests::{Case, TOKENS, attend, dot};

    /// Goal: latent attention equals a plain loop that projects the keys and values of all heads.
    #[test]
    fn latent_attention_equals_a_plain_loop() {
        let (rotated, plain, width, value_dim) = (4, 6, 12, 5);
        let case = Case::run(
            &json!({
                "model_type": "deepseek_v2", "num_attention_heads": 3, "q_lora_rank": 10,
                "kv_lora_rank": width, "qk_rope_head_dim": rotated, "qk_nope_head_dim": plain,
                "v_head_dim": value_dim, "first_k_dense_replace": 1, "rope_theta": 10_000.0,
            }),
            13,
        );
        let weights = |part: &str| case.weights(&format!("self_attn.{part}"));
        let project = |part: &str, x: &[f64]| case.project(&format!("self_attn.{part}"), x);
        let positions = || (0..TOKENS).zip(&case.normed);
        let queries: Vec<Vec<Vec<f64>>> = positions()
            .map(|(at, x)| {
                let low = case.rms_norm(&project("q_a_proj", x), weights("q_a_layernorm"));
                let mut all = project("q_b_proj", &low);
                let heads = all.chunks_exact_mut(rotated + plain);
                heads
                    .map(|head| {
                        case.rotate(&mut head[..rotated], at);
                        head.to_vec()
                    })
                    .collect()
            })
            .collect();
        let kept: Vec<(Vec<f64>, Vec<f64>)> = positions()
            .map(|(at, x)| {
                let mut all = project("kv_a_proj_with_mqa", x);
                case.rotate(&mut all[..rotated], at);
                let latent = case.rms_norm(&all[rotated..], weights("kv_a_layernorm"));
                (all[..rotated].to_vec(), latent)
            })
            .collect();
        let expected = (0..TOKENS).map(|at| {
            let of_head = |head: usize| {
                // The heads' matrices of keys are stored transposed, `[width, plain]`.
                let matrix = weights(&format!("k_b_proj.{head}"));
                let key = |latent: &[f64], index: usize| -> f64 {
                    latent.iter().enumerate().map(|(i, x)| matrix[i * plain + index] * x).sum()
                };
                let score = |other: usize| {
                    let (rotary, latent) = &kept[other];
                    let keys: Vec<f64> = (0..plain).map(|index| key(latent, index)).collect();
                    let query = &queries[at][head];
                    (dot(&query[..rotated], rotary) + dot(&query[rotated..], &keys))
                        / ((rotated + plain) as f64).sqrt()
                };
                let scores: Vec<f64> = (0..=at).map(score).collect();
                let value = |other: usize| project(&format!("v_b_proj.{head}"), &kept[other].1);
                let values: Vec<Vec<f64>> = (0..=at).map(value).collect();
                attend(&scores, &values.iter().map(Vec::as_slice).collect::<Vec<_>>())
            };
            let all: Vec<f64> = (0..3).flat_map(of_head).collect();
            project("o_proj", &all)
        });
        case.check(&expected.collect::<Vec<_>>());
    }
}
