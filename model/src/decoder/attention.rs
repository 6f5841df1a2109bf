//! The first half of a layer: queries, keys and values, attention, and its projection.

use stolon_backend::{LogitRows, StepBatch};
use stolon_kernels::{
    self as kernels, AttentionSequence, Epilogue, KvLayout, KvRows, Matrix, Product, RowSums, Sink,
};

use super::activations::Activations;
use super::profile::Stage;
use super::{Decoder, passes, plan};
use crate::config::QkNorm;
use crate::kv_store::KvStore;
use crate::workers::Workers;

/// The projections that [`Decoder::heads`] computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Queries,
    Keys,
    Values,
}

impl Part {
    pub(super) const ALL: [Self; 3] = [Self::Queries, Self::Keys, Self::Values];
}

impl Decoder {
    /// Computes the given `parts` of queries, keys and values. Keys and values are written to `kv`.
    pub(super) fn heads(
        &mut self,
        index: usize,
        parts: &[Part],
        kv: &mut KvStore,
        workers: &Workers,
    ) {
        let (config, path) = (&self.config, self.path);
        let (layer, plan) = (&self.layers[index], &self.plan);
        let Activations { normed, q, k, .. } = &mut self.activations;
        let heads = passes::Heads {
            path,
            head_dim: config.head_dim,
            eps: config.rms_norm_eps,
            norm_offset: config.norm_offset,
            norm: config.qk_norm,
            rope: config.layers[index].rope.map(|rope| &self.ropes[rope]),
            positions: &plan.positions,
        };
        let epilogue_q = |sums: RowSums<'_>| heads.apply(&layer.q, layer.q_norm.as_deref(), sums);
        let epilogue_k = |sums: RowSums<'_>| heads.apply(&layer.k, layer.k_norm.as_deref(), sums);
        let epilogue_v = |sums: RowSums<'_>| layer.v.add_bias(path, sums.feature, sums.first);
        let matrices = [[&layer.q.matrix], [&layer.k.matrix], [&layer.v.matrix]];
        let q = &mut q[..normed.rows() * config.num_heads * config.head_dim];
        let key_width = config.num_kv_heads * config.head_dim;
        let key_layout = kv.shape().key_layout;
        let [keys, values] = kv.layer_mut(index);
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
        let all = Part::ALL.into_iter().zip(&matrices).zip(epilogues).zip(sinks);
        let mut products: Vec<Product<'_>> = all
            .filter(|(((part, _), _), _)| parts.contains(part))
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
            if parts.contains(&Part::Queries) {
                heads.norm_positions(q, q_norm, workers);
            }
            if parts.contains(&Part::Keys) {
                let k = &mut k[..normed.rows() * key_width];
                heads.norm_positions(k, k_norm, workers);
                let keys = k.chunks_exact(key_width).enumerate();
                keys.for_each(|(row, values)| rows.write_row(row, values));
            }
        }
        self.profile.mark_with(Stage::Qkv, epilogue_time, Stage::Heads);
    }

    /// Computes attention for `rows` rows and adds it to the residual stream.
    pub(super) fn attend(
        &mut self,
        index: usize,
        rows: usize,
        kv: &KvStore,
        sequences: &[AttentionSequence<'_>],
        workers: &Workers,
    ) {
        let config = &self.config;
        let layer = &self.layers[index];
        let Activations { x, q, attended, attended_packed, projected, .. } = &mut self.activations;
        let width = config.num_heads * config.head_dim;
        let q = &q[..rows * width];
        let attended = &mut attended[..rows * width];
        let (path, sinks) = (self.path, layer.sinks.as_deref());
        let attention = passes::LayerAttention { config, path, kv, index, sinks };
        attention.run(q, sequences, attended, workers);
        self.profile.mark(Stage::Attention);
        attended_packed.reset(rows, &[&layer.output.matrix]);
        attended_packed.pack(workers.for_pass(rows, width), attended);
        let x = &mut x[..rows * config.hidden_size];
        let residual = passes::Residual {
            config,
            path: self.path,
            linear: &layer.output,
            own_norm: layer.attention_output_norm.as_deref(),
        };
        let epilogue_time = residual.add(attended_packed, x, projected, workers);
        self.profile.mark_with(Stage::Output, epilogue_time, Stage::Residual);
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
