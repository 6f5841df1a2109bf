//! The first half of a layer: queries, keys and values, attention, and its projection.

use std::ops::Range;

use stolon_backend::{LogitRows, SequenceSlice, StepBatch};
use stolon_kernels::{
    self as kernels, AttentionSequence, Epilogue, KvRows, Matrix, Product, RowSums, Sink,
};

use super::activations::Activations;
use super::layer::Mixer;
use super::linear::{Linear, Loader};
use super::profile::Stage;
use super::{Decoder, StepState, passes, plan};
use crate::adapter::Site;
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
    /// The gates of the output.
    pub(super) gate: Option<Linear>,
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
        let AttentionWeights { qkv, qk_norms, sinks, gate, output } = spec;
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
            gate: gate.as_ref().map(|gate| loader.linear(gate)).transpose()?,
            output: loader.linear(output)?,
            kept,
        })
    }
}

impl Attention {
    /// Normalizes all heads of each position of the queries and the keys together, and writes the
    /// keys to the KV store.
    fn norm_positions(
        &self,
        inputs: Inputs,
        heads: &passes::Heads<'_>,
        [q, k]: [&mut [f32]; 2],
        keys: &mut KvRows<'_>,
        workers: &Workers,
    ) {
        let (Some(q_norm), Some(k_norm)) = (&self.q_norm, &self.k_norm) else { return };
        if inputs.own() {
            heads.norm_positions(q, q_norm, workers);
        }
        if inputs.kept() {
            heads.norm_positions(k, k_norm, workers);
            let rows = k.chunks_exact(k_norm.len()).enumerate();
            rows.for_each(|(row, values)| keys.write_row(row, values));
        }
    }
}

/// What [`Decoder::project`] computes of a layer's inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Inputs {
    /// Everything.
    All,
    /// What later positions need: keys and values, the inputs of the convolution, or the state.
    Kept,
    /// What only rows with an output need: queries, or gates.
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
    /// later positions need is written to the KV store or the states.
    pub(super) fn project(
        &mut self,
        index: usize,
        inputs: Inputs,
        (batch, step): (&StepBatch, &mut StepState<'_>),
        workers: &Workers,
    ) {
        for mixer in 0..self.layers[index].mixers.len() {
            let step = (batch, &mut *step);
            match &self.layers[index].mixers[mixer] {
                Mixer::Attention(_) => self.heads(index, inputs, step.1.kv, workers),
                Mixer::Convolution(_) => {
                    self.convolution_inputs(index, inputs, step.1.kv, workers);
                }
                Mixer::DeltaNet(_) => self.delta_net_inputs(index, inputs, step, workers),
                Mixer::Mamba2(_) => self.mamba2_inputs(index, inputs, step, workers),
            }
        }
    }

    /// Computes queries, keys and values. Keys and values are written to `kv`.
    fn heads(&mut self, index: usize, inputs: Inputs, kv: &mut KvStore, workers: &Workers) {
        let (config, path) = (&self.config, self.path);
        let Some(layer) = self.layers[index].attention() else { return };
        let Activations { normed, q, k, gates, .. } = &mut self.activations;
        let heads = passes::Heads {
            path,
            head_dim: config.head_dim,
            eps: config.rms_norm_eps,
            norm_offset: config.norm_offset,
            norm: config.qk_norm,
            query_scaling: config.query_scaling,
            rope: config.layers[index].rope.map(|rope| &self.ropes[rope]),
            plan: &self.plan,
        };
        let updates = self.adapters.updates(index, Site::Inputs);
        let epilogue_q = |sums: RowSums<'_>| {
            updates.add(0, sums.row, sums.feature, sums.first);
            heads.apply_to_queries(&layer.q, layer.q_norm.as_deref(), sums);
        };
        let epilogue_k = |sums: RowSums<'_>| {
            updates.add(1, sums.row, sums.feature, sums.first);
            heads.apply(&layer.k, layer.k_norm.as_deref(), sums);
        };
        let epilogue_v = |sums: RowSums<'_>| {
            updates.add(2, sums.row, sums.feature, sums.first);
            layer.v.add_bias(path, sums.feature, sums.first);
        };
        let epilogue_gate = |sums: RowSums<'_>| {
            updates.add(3, sums.row, sums.feature, sums.first);
            layer.gate.iter().for_each(|gate| gate.add_bias(path, sums.feature, sums.first));
        };
        let matrices = [&layer.q, &layer.k, &layer.v].map(|linear| [&linear.matrix]);
        let gate_matrix = layer.gate.as_ref().map(|gate| [&gate.matrix]);
        let q = &mut q[..normed.rows() * config.num_heads * config.head_dim];
        let gates = &mut gates[..gate_matrix.map_or(0, |_| q.len())];
        let key_width = config.num_kv_heads * config.head_dim;
        let [keys, values] = kv.rows_mut(layer.kept, path, &self.plan.slots);
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
        if let (Some(matrices), true) = (&gate_matrix, inputs.own()) {
            let (step, epilogue) = (config.head_dim, Some(&epilogue_gate as Epilogue<'_>));
            products.push(Product { group: 0, matrices, step, epilogue, sink: Sink::Rows(gates) });
        }
        let matrices: Vec<&Matrix> = products.iter().map(|product| product.matrices[0]).collect();
        let threads = workers.for_products(&matrices, normed.rows());
        let epilogue_time = kernels::multiply(path, threads, normed, &mut products);
        drop(products);
        if let Some(keys) = &mut late_keys {
            let rows = [q, &mut k[..normed.rows() * key_width]];
            layer.norm_positions(inputs, &heads, rows, keys, workers);
        }
        self.profile.mark_with(Stage::Qkv, epilogue_time, Stage::Heads);
    }

    /// Mixes positions for `rows` rows, unless [`Decoder::project`] has done it, and adds the
    /// projection of the result to the residual stream.
    pub(super) fn mix(
        &mut self,
        index: usize,
        rows: usize,
        kv: &KvStore,
        sequences: &[AttentionSequence<'_>],
        workers: &Workers,
    ) {
        for mixer in 0..self.layers[index].mixers.len() {
            match &self.layers[index].mixers[mixer] {
                Mixer::Attention(_) => self.attend(index, rows, kv, sequences, workers),
                Mixer::Convolution(_) => self.convolve(index, rows, kv, workers),
                Mixer::DeltaNet(_) => self.gate_delta_net(index, rows, workers),
                Mixer::Mamba2(_) => self.gate_mamba2(index, rows, workers),
            }
            let layer = &self.layers[index];
            let Activations { x, mixed, projected, .. } = &mut self.activations;
            let x = &mut x[..rows * self.config.hidden_size];
            let mixer = &layer.mixers[mixer];
            let is_attention = matches!(mixer, Mixer::Attention(_));
            let residual = passes::Residual {
                config: &self.config,
                path: self.path,
                linear: mixer.output(),
                own_norm: layer.attention_output_norm.as_deref(),
                updates: is_attention.then(|| self.adapters.updates(index, Site::Output)),
                scale: self.config.output_scale(|multipliers| match is_attention {
                    true => multipliers.attention_output,
                    false => multipliers.mamba_output,
                }),
            };
            let epilogue_time = residual.add(mixed, x, projected, workers);
            self.profile.mark_with(Stage::Output, epilogue_time, Stage::Residual);
        }
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
        let Some(layer) = self.layers[index].attention() else { return };
        let Activations { q, gates, attended, mixed, .. } = &mut self.activations;
        let width = config.num_heads * config.head_dim;
        let q = &q[..rows * width];
        let attended = &mut attended[..rows * width];
        let (kept, sinks) = (layer.kept, layer.sinks.as_deref());
        let attention = passes::LayerAttention { config, path, kv, index, kept, sinks };
        attention.run(q, sequences, attended, workers);
        if layer.gate.is_some() {
            let chunk = workers.chunk_rows(rows, 4 * width) * width;
            let parts = attended.chunks_mut(chunk).zip(gates[..rows * width].chunks(chunk));
            workers.run(parts, |(x, gates)| kernels::mul_sigmoid(path, x, gates));
        }
        self.profile.mark(Stage::Attention);
        mixed.reset(rows, &[&layer.output.matrix]);
        mixed.pack(workers.for_pass(rows, width), attended);
        self.adapters.lower((index, Site::Output), path, workers, |row, out| {
            out.copy_from_slice(&attended[row * width..][..width]);
        });
    }
}

/// All rows of all slices, as input of the attention kernel.
pub(super) fn whole_slices(batch: &StepBatch) -> Vec<AttentionSequence<'_>> {
    let mut sequences = Vec::with_capacity(batch.sequences.len());
    for slice in &batch.sequences {
        divide_at_images(slice, slice.start..slice.start + slice.token_count, &mut sequences);
    }
    sequences
}

/// Divides positions of a slice into images with full attention, of which `positions` has all rows
/// or none, and the causal parts between them.
fn divide_at_images<'a>(
    slice: &'a SequenceSlice,
    positions: Range<usize>,
    sequences: &mut Vec<AttentionSequence<'a>>,
) {
    let mut push = |positions: Range<usize>, full| {
        let (start, count) = (positions.start, positions.len());
        if count > 0 {
            let block_table = slice.block_table.as_slice();
            sequences.push(AttentionSequence { start, count, full, block_table });
        }
    };
    let mut next = positions.start;
    for image in slice.images.iter().filter(|image| image.full_attention) {
        let image = image.positions();
        if image.start >= positions.start {
            push(next..image.start, false);
            next = image.end;
            push(image, true);
        }
    }
    push(next..positions.end, false);
}

/// Only the rows that get logits or whose hidden states are returned, as input of the attention
/// kernel.
pub(super) fn output_slices(batch: &StepBatch) -> Vec<AttentionSequence<'_>> {
    let mut sequences = Vec::with_capacity(batch.sequences.len());
    let slices = batch.sequences.iter();
    slices.filter(|slice| slice.logit_rows != LogitRows::None).for_each(|slice| {
        let end = slice.start + slice.token_count;
        divide_at_images(slice, end - plan::output_count(slice)..end, &mut sequences);
    });
    sequences
}
