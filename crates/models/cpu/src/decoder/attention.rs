//! Attention: `output(gate * softmax(scale * q k^T) v)`, where queries, keys and values are
//! projections of the layer's input. Most layers have no gate.
//!
//! [`Attention::project`] writes keys and values to the KV store first, including those of the
//! current step, and [`Attention::mix`] reads all of them from there.

use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{AttentionConfig, AttentionWeights, QkNorm, QkvWeights};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{self as kernels, Epilogue, KvRows, Product, RowSums, Sink};

use super::adapters::RowUpdates;
use super::linear::{Linear, Loader, multiply_all};
use super::pass::{Inputs, Pass};
use super::passes;
use super::profile::Stage;
use super::selective::{Selective, SelectiveBuffers};
use super::sequences::Sequences;
use crate::kv_store::KvStore;
use crate::workers::Workers;

/// The weights of a layer's attention: the fields of [`AttentionWeights`].
#[derive(Debug)]
pub(super) struct Attention {
    config: AttentionConfig,
    projection: Projection,
    sinks: Option<Vec<f32>>,
    pub(super) output: Linear,
    /// Index in the KV store of the keys and values that the layer reads.
    kept: usize,
}

/// The projections of the layer's input.
#[derive(Debug)]
enum Projection {
    /// Queries, keys and values whose heads are processed independently of each other.
    Plain(Qkv),
    /// Queries and values are multiplied by factors that depend on all of a token's queries, keys
    /// and values.
    Selective(Selective),
}

/// The projections to queries, keys and values, and their norms.
#[derive(Debug)]
struct Qkv {
    q: Linear,
    /// The projection to keys; `None` if the layer reads the keys and values of another layer.
    k: Option<Linear>,
    /// The projection to values; `None` also if values are projected with the matrix of keys.
    v: Option<Linear>,
    q_norm: Option<Vec<f32>>,
    k_norm: Option<Vec<f32>>,
    /// The weights of the norm of values, `[head_dim]`, all 1.
    v_norm: Option<Vec<f32>>,
    /// The projection to the gates of the output, if there are any.
    gate: Option<Linear>,
}

/// The buffers of attention, which are reused. They have at least as many rows as the step.
#[derive(Debug, Default)]
pub(super) struct AttentionBuffers {
    /// Queries, `[rows, heads, head_dim]`.
    q: Vec<f32>,
    /// The gates of the outputs, `[rows, heads, head_dim]`.
    gates: Vec<f32>,
    /// Keys, `[rows, kv_heads, head_dim]`, that are normalized before they are written to the KV
    /// store. Used only with [`QkNorm::Position`].
    k: Vec<f32>,
    /// The output, `[rows, heads, head_dim]`.
    attended: Vec<f32>,
    selective: SelectiveBuffers,
}

impl AttentionBuffers {
    /// Grows the buffers to at least `rows` rows.
    pub(super) fn reserve(&mut self, config: &AttentionConfig, rows: usize) {
        let AttentionConfig { heads, kv_heads, head_dim, output_gate, qk_norm, .. } = *config;
        let (width, is_late) = (heads * head_dim, qk_norm == Some(QkNorm::Position));
        for (buffer, width) in [
            (&mut self.q, width),
            (&mut self.gates, if output_gate { width } else { 0 }),
            (&mut self.k, if is_late { kv_heads * head_dim } else { 0 }),
            (&mut self.attended, width),
        ] {
            passes::grow(buffer, rows * width);
        }
    }
}

impl Attention {
    /// Loads the attention of a layer.
    pub(super) fn load(
        spec: &AttentionWeights,
        kept: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let AttentionWeights { config, qkv, q_norm, k_norm, sinks, selective, gate, output } = spec;
        let QkvWeights { name: _, query, key, value } = qkv;
        let projection = match (selective, key, value) {
            (None, key, value) => Projection::Plain(Qkv {
                q: loader.linear(query)?,
                k: loader.optional(key.as_ref())?,
                v: loader.optional(value.as_ref())?,
                q_norm: loader.optional_vector(q_norm.as_ref())?,
                k_norm: loader.optional_vector(k_norm.as_ref())?,
                v_norm: config.value_norm.then(|| vec![1.0; config.head_dim]),
                gate: loader.optional(gate.as_ref())?,
            }),
            (Some(spec), Some(key), Some(value)) => {
                let qkv = [query, key, value];
                Projection::Selective(Selective::load(spec, config, qkv, loader)?)
            }
            (Some(_), ..) => {
                let (file, key) = ("the configuration", "tau_attn");
                let expected = "attention with its own keys and values";
                return Err(ModelError::unsupported(file, key, expected, true));
            }
        };
        Ok(Self {
            config: *config,
            projection,
            sinks: loader.optional_vector(sinks.as_ref())?,
            output: loader.linear(output)?,
            kept,
        })
    }

    /// Factor by which the output is multiplied.
    pub(super) fn output_factor(&self) -> f32 {
        self.config.output_factor
    }

    /// The projections of the layer's input.
    pub(super) fn inputs(&self) -> Vec<&Linear> {
        match &self.projection {
            Projection::Plain(Qkv { q, k, v, gate, .. }) => {
                [q].into_iter().chain(k).chain(v).chain(gate).collect()
            }
            Projection::Selective(selective) => selective.inputs().into(),
        }
    }

    /// Size in bytes of the packed matrices other than the input and output projections.
    pub(super) fn inner_bytes(&self) -> usize {
        match &self.projection {
            Projection::Plain(_) => 0,
            Projection::Selective(selective) => selective.bytes(),
        }
    }

    /// Computes queries, keys and values. Keys and values are written to `kv`.
    pub(super) fn project(
        &self,
        inputs: Inputs,
        kv: &mut KvStore,
        buffers: &mut AttentionBuffers,
        pass: &mut Pass<'_>,
    ) {
        match &self.projection {
            Projection::Plain(qkv) => {
                qkv.project(&self.config, inputs, (kv, self.kept), buffers, pass)
            }
            Projection::Selective(selective) => {
                let AttentionBuffers { q, selective: buffers, .. } = buffers;
                selective.project(inputs, (kv, self.kept), (q, buffers), pass);
            }
        }
    }

    /// Computes attention for `rows` rows and packs it for the output projection.
    pub(super) fn mix(
        &self,
        rows: usize,
        (kv, sequences): (&KvStore, &Sequences<'_>),
        buffers: &mut AttentionBuffers,
        pass: &mut Pass<'_>,
    ) {
        let Pass { index, path, workers, .. } = *pass;
        let AttentionConfig { heads, kv_heads, head_dim, output_gate, .. } = self.config;
        let AttentionBuffers { q, gates, attended, .. } = buffers;
        let width = heads * head_dim;
        let q = &q[..rows * width];
        let attended = &mut attended[..rows * width];
        let windowed = kv.is_windowed(self.kept);
        let sequences = if windowed { &sequences.windows } else { &sequences.blocks };
        let attention = passes::LayerAttention {
            path,
            kv,
            kept: self.kept,
            heads,
            kv_heads,
            head_dim,
            scale: self.config.scale,
            softcap: self.config.softcap,
            sliding_window: self.config.sliding_window,
            sinks: self.sinks.as_deref(),
        };
        attention.run_from(pass.first, q, sequences, attended, workers);
        if output_gate {
            let chunk = workers.chunk_rows(rows, 4 * width) * width;
            let parts = attended.chunks_mut(chunk).zip(gates[..rows * width].chunks(chunk));
            workers.run(parts, |(x, gates)| kernels::mul_sigmoid(path, x, gates));
        }
        pass.profile.mark(Stage::Attention);
        pass.mixed.reset(rows, &[&self.output.matrix]);
        pass.mixed.pack(workers.for_pass(rows, width), attended);
        pass.adapters.lower((index, Site::Output), path, workers, |row, out| {
            out.copy_from_slice(&attended[row * width..][..width]);
        });
    }
}

impl Qkv {
    /// See [`Attention::project`]. `kept` is the index of the keys and values in `kv`.
    fn project(
        &self,
        config: &AttentionConfig,
        inputs: Inputs,
        (kv, kept): (&mut KvStore, usize),
        buffers: &mut AttentionBuffers,
        pass: &mut Pass<'_>,
    ) {
        let Pass { index, path, plan, normed, workers, .. } = *pass;
        let AttentionBuffers { q, gates, k, .. } = buffers;
        let AttentionConfig { head_dim: dim, rope, qk_norm, query_scaling, .. } = *config;
        let heads = passes::Heads::of(pass.config, path, dim, pass.rope(rope), plan);
        let heads = heads.with(qk_norm, query_scaling);
        // With the offset that is added to them, these weights are 1.
        let neutral = (qk_norm == Some(QkNorm::HeadWithoutWeights))
            .then(|| vec![1.0 - pass.config.norms.offset; dim]);
        let [q_norm, k_norm] =
            [&self.q_norm, &self.k_norm].map(|own| own.as_ref().or(neutral.as_ref()));
        let updates = pass.adapters.updates(index, Site::Inputs);
        let epilogue_q = updates.then([0], |sums: RowSums<'_>| {
            heads.apply_to_queries(&self.q, q_norm.map(Vec::as_slice), sums);
        });
        let epilogue_k = updates.then([1], |sums: RowSums<'_>| {
            heads.apply(self.k.as_ref(), k_norm.map(Vec::as_slice), sums);
        });
        // Values that are projected with the matrix of keys get the updates of keys.
        let (v, v_part) = self.v.as_ref().map_or((self.k.as_ref(), 1), |v| (Some(v), 2));
        let epilogue_v = updates.then([v_part], |sums: RowSums<'_>| {
            heads.apply_to_values(v, self.v_norm.as_deref(), sums);
        });
        let epilogue_gate = updates.then([3], |sums: RowSums<'_>| {
            self.gate.iter().for_each(|gate| gate.add_bias(path, sums.feature, sums.first));
        });
        let [k_matrix, v_matrix, gate_matrix] = [self.k.as_ref(), v, self.gate.as_ref()]
            .map(|linear| linear.map(|linear| [&linear.matrix]));
        let q_matrix = [&self.q.matrix];
        let q = &mut q[..normed.rows() * self.q.out_features()];
        let gates = &mut gates[..gate_matrix.map_or(0, |_| q.len())];
        let k = &mut k[..self.late_keys_len(qk_norm, normed.rows())];
        let mut late_keys = None;
        let mut products: Vec<Product<'_>> = Vec::with_capacity(4);
        let mut push = |matrices, epilogue, sink| {
            let epilogue = Some(epilogue);
            products.push(Product { group: 0, matrices, step: dim, epilogue, sink });
        };
        if inputs.own() {
            push(&q_matrix[..], &epilogue_q as Epilogue<'_>, Sink::Rows(&mut *q));
        }
        if let (Some(k_matrix), Some(v_matrix), true) = (&k_matrix, &v_matrix, inputs.kept()) {
            let slots = if kv.is_windowed(kept) { &plan.window_slots } else { &plan.slots };
            let [keys, values] = kv.rows_mut(kept, path, slots);
            // Keys whose heads are normalized together are complete only after the GEMM.
            let keys = match qk_norm {
                Some(QkNorm::Position) => {
                    late_keys = Some(keys);
                    Sink::Rows(&mut *k)
                }
                Some(QkNorm::Head | QkNorm::HeadWithoutWeights) | None => Sink::Cache(keys),
            };
            push(k_matrix, &epilogue_k, keys);
            push(v_matrix, &epilogue_v, Sink::Cache(values));
        }
        if let (Some(matrices), true) = (&gate_matrix, inputs.own()) {
            push(matrices, &epilogue_gate, Sink::Rows(gates));
        }
        let epilogue_time = multiply_all(path, normed, &mut products, workers);
        drop(products);
        if qk_norm == Some(QkNorm::Position) {
            self.norm_positions(inputs, &heads, [q, k], late_keys.as_mut(), workers);
        }
        pass.profile.mark_with(Stage::Qkv, epilogue_time, Stage::Heads);
    }

    /// Normalizes all heads of each position of the queries and the keys together, and writes the
    /// keys to the KV store.
    fn norm_positions(
        &self,
        inputs: Inputs,
        heads: &passes::Heads<'_>,
        [q, k]: [&mut [f32]; 2],
        keys: Option<&mut KvRows<'_>>,
        workers: &Workers,
    ) {
        if let (Some(q_norm), true) = (&self.q_norm, inputs.own()) {
            heads.norm_positions(q, q_norm, workers);
        }
        if let (Some(k_norm), Some(keys)) = (&self.k_norm, keys) {
            heads.norm_positions(k, k_norm, workers);
            let rows = k.chunks_exact(k_norm.len()).enumerate();
            rows.for_each(|(row, values)| keys.write_row(row, values));
        }
    }

    /// Number of elements of `rows` rows of keys that are normalized before they are written; 0 if
    /// the epilogue writes the keys to the KV store.
    fn late_keys_len(&self, norm: Option<QkNorm>, rows: usize) -> usize {
        let is_late = norm == Some(QkNorm::Position);
        self.k.as_ref().filter(|_| is_late).map_or(0, |k| rows * k.out_features())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::decoder::tests::{Case, TOKENS, attend, dot};

    /// Goal: attention with groups of heads, norms of queries and keys, and a rotary embedding
    /// equals a plain loop, whether positions were computed in this step or in an earlier one.
    #[test]
    fn attention_equals_a_plain_loop() {
        let case = Case::run(
            &json!({
                "model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 8,
            }),
            13,
        );
        let heads = |part: &str, norm: Option<&str>, position: usize| -> Vec<Vec<f64>> {
            let all = case.project(&format!("self_attn.{part}"), &case.normed[position]);
            let finish = |head: &[f64]| match norm {
                Some(norm) => {
                    let mut head = case.rms_norm(head, case.weights(norm));
                    case.rotate(&mut head, position);
                    head
                }
                None => head.to_vec(),
            };
            all.chunks_exact(8).map(finish).collect()
        };
        let of_all =
            |part, norm| -> Vec<_> { (0..TOKENS).map(|at| heads(part, norm, at)).collect() };
        let q = of_all("q_proj", Some("self_attn.q_norm"));
        let (k, v) = (of_all("k_proj", Some("self_attn.k_norm")), of_all("v_proj", None));
        let expected = (0..TOKENS).map(|at| {
            let of_head = |head: usize| {
                let score = |other: usize| dot(&q[at][head], &k[other][head / 2]) / 8_f64.sqrt();
                let scores: Vec<f64> = (0..=at).map(score).collect();
                let values: Vec<&[f64]> = (0..=at).map(|other| &v[other][head / 2][..]).collect();
                attend(&scores, &values)
            };
            let all: Vec<f64> = (0..4).flat_map(of_head).collect();
            case.project("self_attn.o_proj", &all)
        });
        case.check(&expected.collect::<Vec<_>>());
    }
}
