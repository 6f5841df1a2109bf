//! The first half of a layer: queries, keys and values, attention, and its projection.

use stolon_backend::{LogitRows, StepBatch};
use stolon_kernels::{
    self as kernels, AttentionSequence, Epilogue, KvLayout, KvRows, Matrix, Product, RowSums, Sink,
};

use super::activations::Activations;
use super::layer::Mixer;
use super::linear::{Linear, Loader};
use super::profile::Stage;
use super::{Decoder, passes, plan};
use crate::config::{AttentionWeights, QkNorm};
use crate::error::ModelError;
use crate::kv_store::KvStore;
use crate::workers::Workers;

/// The weights of a layer's attention: the fields of [`AttentionWeights`].
#[derive(Debug)]
pub(super) struct Attention {
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    q_norm: Option<Vec<f32>>,
    k_norm: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    pub(super) output: Linear,
    /// Index of the layer in the KV store.
    kept: usize,
}

impl Attention {
    pub(super) fn load(
        spec: &AttentionWeights,
        kept: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let AttentionWeights { qkv, qk_norms, sinks, output } = spec;
        let [q, k, v] = &qkv.parts;
        let [q_norm, k_norm] = match qk_norms {
            Some([q, k]) => [Some(q), Some(k)],
            None => [None, None],
        };
        Ok(Self {
            q: loader.linear(q)?,
            k: loader.linear(k)?,
            v: loader.linear(v)?,
            q_norm: loader.optional_vector(q_norm)?,
            k_norm: loader.optional_vector(k_norm)?,
            sinks: loader.optional_vector(sinks.as_ref())?,
            output: loader.linear(output)?,
            kept,
        })
    }
}

/// What [`Decoder::project`] computes of a layer's inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Inputs {
    /// Everything.
    All,
    /// What later positions need: keys and values, or the inputs of the convolution.
    Kept,
    /// What only rows with an output need: queries, or the gates of the convolution.
    Own,
}

impl Inputs {
    pub(super) fn kept(self) -> bool {
        self != Self::Own
    }

    pub(super) fn own(self) -> bool {
        self != Self::Kept
    }
}

impl Decoder {
    /// Computes what layer `index` needs of its normalized input before it mixes positions. What
    /// later positions need is written to `kv`.
    pub(super) fn project(
        &mut self,
        index: usize,
        inputs: Inputs,
        kv: &mut KvStore,
        workers: &Workers,
    ) {
        match &self.layers[index].mixer {
            Mixer::Attention(_) => self.heads(index, inputs, kv, workers),
            Mixer::Convolution(_) => self.convolution_inputs(index, inputs, kv, workers),
        }
    }

    /// Computes queries, keys and values. Keys and values are written to `kv`.
    fn heads(&mut self, index: usize, inputs: Inputs, kv: &mut KvStore, workers: &Workers) {
        let (config, path) = (&self.config, self.path);
        let Mixer::Attention(layer) = &self.layers[index].mixer else { return };
        let plan = &self.plan;
        let Activations { normed, q, k, .. } = &mut self.activations;
        let heads = passes::Heads {
            path,
            head_dim: config.head_dim,
            eps: config.rms_norm_eps,
            norm_offset: config.norm_offset,
            norm: config.qk_norm,
            query_scaling: config.query_scaling,
            rope: config.layers[index].rope.map(|rope| &self.ropes[rope]),
            positions: &plan.positions,
        };
        let epilogue_q =
            |sums: RowSums<'_>| heads.apply_to_queries(&layer.q, layer.q_norm.as_deref(), sums);
        let epilogue_k = |sums: RowSums<'_>| heads.apply(&layer.k, layer.k_norm.as_deref(), sums);
        let epilogue_v = |sums: RowSums<'_>| layer.v.add_bias(path, sums.feature, sums.first);
        let matrices = [[&layer.q.matrix], [&layer.k.matrix], [&layer.v.matrix]];
        let q = &mut q[..normed.rows() * config.num_heads * config.head_dim];
        let key_width = config.num_kv_heads * config.head_dim;
        let key_layout = kv.shape().key_layout;
        let [keys, values] = kv.layer_mut(layer.kept);
        let [keys, values] =
            [(keys, key_layout), (values, KvLayout::Rows)].map(|(plane, layout)| {
                let (kv_heads, head_dim) = (config.num_kv_heads, config.head_dim);
                let store = plane.slice_mut();
                KvRows::new(path, store, layout, &plan.slots, kv_heads, head_dim)
            });
        // Keys that are normalized together are complete only after the GEMM.
        let (keys, mut late_keys) = match config.qk_norm {
            Some(QkNorm::Position) => (Sink::Rows(&mut k[..normed.rows() * key_width]), Some(keys)),
            Some(QkNorm::Head) | None => (Sink::Cache(keys), None),
        };
        let epilogues: [Epilogue<'_>; 3] = [&epilogue_q, &epilogue_k, &epilogue_v];
        let sinks = [Sink::Rows(&mut *q), keys, Sink::Cache(values)];
        let wanted = [inputs.own(), inputs.kept(), inputs.kept()].into_iter();
        let all = wanted.zip(&matrices).zip(epilogues).zip(sinks);
        let mut products: Vec<Product<'_>> = all
            .filter(|(((wanted, _), _), _)| *wanted)
            .map(|(((_, matrices), epilogue), sink)| Product {
                group: 0,
                matrices,
                step: config.head_dim,
                epilogue: Some(epilogue),
                sink,
            })
            .collect();
        let matrices: Vec<&Matrix> = products.iter().map(|product| product.matrices[0]).collect();
        let threads = workers.for_products(&matrices, normed.rows());
        let epilogue_time = kernels::multiply(path, threads, normed, &mut products);
        drop(products);
        if let (Some(rows), Some(q_norm), Some(k_norm)) =
            (&mut late_keys, &layer.q_norm, &layer.k_norm)
        {
            if inputs.own() {
                heads.norm_positions(q, q_norm, workers);
            }
            if inputs.kept() {
                let k = &mut k[..normed.rows() * key_width];
                heads.norm_positions(k, k_norm, workers);
                let keys = k.chunks_exact(key_width).enumerate();
                keys.for_each(|(row, values)| rows.write_row(row, values));
            }
        }
        self.profile.mark_with(Stage::Qkv, epilogue_time, Stage::Heads);
    }

    /// Mixes positions for `rows` rows, by attention or by convolution, and adds the projection of
    /// the result to the residual stream.
    pub(super) fn mix(
        &mut self,
        index: usize,
        rows: usize,
        kv: &KvStore,
        sequences: &[AttentionSequence<'_>],
        workers: &Workers,
    ) {
        match &self.layers[index].mixer {
            Mixer::Attention(_) => self.attend(index, rows, kv, sequences, workers),
            Mixer::Convolution(_) => self.convolve(index, rows, kv, workers),
        }
        let layer = &self.layers[index];
        let Activations { x, mixed, projected, .. } = &mut self.activations;
        let x = &mut x[..rows * self.config.hidden_size];
        let residual = passes::Residual {
            config: &self.config,
            path: self.path,
            linear: layer.mixer.output(),
            own_norm: layer.attention_output_norm.as_deref(),
        };
        let epilogue_time = residual.add(mixed, x, projected, workers);
        self.profile.mark_with(Stage::Output, epilogue_time, Stage::Residual);
    }

    /// Computes attention for `rows` rows and packs it for the output projection.
    fn attend(
        &mut self,
        index: usize,
        rows: usize,
        kv: &KvStore,
        sequences: &[AttentionSequence<'_>],
        workers: &Workers,
    ) {
        let (config, path) = (&self.config, self.path);
        let Mixer::Attention(layer) = &self.layers[index].mixer else { return };
        let Activations { q, attended, mixed, .. } = &mut self.activations;
        let width = config.num_heads * config.head_dim;
        let q = &q[..rows * width];
        let attended = &mut attended[..rows * width];
        let (kept, sinks) = (layer.kept, layer.sinks.as_deref());
        let attention = passes::LayerAttention { config, path, kv, index, kept, sinks };
        attention.run(q, sequences, attended, workers);
        self.profile.mark(Stage::Attention);
        mixed.reset(rows, &[&layer.output.matrix]);
        mixed.pack(workers.for_pass(rows, width), attended);
    }
}

/// All rows of all slices, as input of the attention kernel.
pub(super) fn whole_slices(batch: &StepBatch) -> Vec<AttentionSequence<'_>> {
    let slices = batch.sequences.iter();
    slices
        .map(|slice| AttentionSequence {
            start: slice.start,
            count: slice.token_count,
            block_table: &slice.block_table,
        })
        .collect()
}

/// Only the rows that get logits or whose hidden states are returned, as input of the attention
/// kernel.
pub(super) fn output_slices(batch: &StepBatch) -> Vec<AttentionSequence<'_>> {
    let slices = batch.sequences.iter();
    slices
        .filter(|slice| slice.logit_rows != LogitRows::None)
        .map(|slice| {
            let count = plan::output_count(slice);
            AttentionSequence {
                start: slice.start + slice.token_count - count,
                count,
                block_table: &slice.block_table,
            }
        })
        .collect()
}
