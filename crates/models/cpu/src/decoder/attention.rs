//! The first half of a layer: queries, keys and values, attention, and its projection.

use std::ops::Range;
use std::time::Duration;

use stolon_backend::{SequenceSlice, StepBatch};
use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{AttentionConfig, AttentionWeights, QkNorm, QkvWeights};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{
    self as kernels, AttentionSequence, Epilogue, KvRows, Matrix, Operands, Path, Product, RowSums,
    Sink,
};
use stolon_kvcache::BlockId;

use super::activations::Activations;
use super::adapters::RowUpdates;
use super::layer::Mixer;
use super::linear::{Linear, Loader};
use super::plan::BatchRows;
use super::profile::Stage;
use super::selective::Selective;
use super::{Decoder, StepState, passes};
use crate::kv_store::KvStore;
use crate::workers::Workers;

/// The weights of a layer's attention: the fields of [`AttentionWeights`].
#[derive(Debug)]
pub(super) struct Attention {
    pub(super) q: Linear,
    /// `None` if the layer reads the keys and values of another one.
    pub(super) k: Option<Linear>,
    /// `None` also if values are projected with the matrix of keys.
    pub(super) v: Option<Linear>,
    q_norm: Option<Vec<f32>>,
    k_norm: Option<Vec<f32>>,
    /// The weights of the norm of values, `[head_dim]`, all 1.
    v_norm: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    pub(super) selective: Option<Selective>,
    /// The gates of the output.
    pub(super) gate: Option<Linear>,
    pub(super) output: Linear,
    pub(super) config: AttentionConfig,
    /// Index in the KV store of the keys and values that the layer reads.
    pub(super) kept: usize,
}

impl Attention {
    /// Loads the attention of a layer.
    pub(super) fn load(
        spec: &AttentionWeights,
        kept: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let AttentionWeights { config, qkv, q_norm, k_norm, sinks, selective, gate, output } = spec;
        let selective = selective.as_ref().map(|spec| Selective::load(spec, loader));
        let QkvWeights { name: _, query, key, value } = qkv;
        Ok(Self {
            q: loader.linear(query)?,
            k: loader.optional(key.as_ref())?,
            v: loader.optional(value.as_ref())?,
            q_norm: loader.optional_vector(q_norm.as_ref())?,
            k_norm: loader.optional_vector(k_norm.as_ref())?,
            v_norm: config.value_norm.then(|| vec![1.0; config.head_dim]),
            sinks: loader.optional_vector(sinks.as_ref())?,
            selective: selective.transpose()?,
            gate: loader.optional(gate.as_ref())?,
            output: loader.linear(output)?,
            config: *config,
            kept,
        })
    }

    /// Width of the queries of all heads.
    fn query_width(&self) -> usize {
        self.q.matrix.out_features()
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
                Mixer::Attention(Attention { selective: Some(_), .. }) => {
                    self.selective_heads(index, inputs, step.1.kv, workers);
                }
                Mixer::Attention(_) => self.heads(index, inputs, step.1.kv, workers),
                Mixer::Convolution(_) => {
                    self.convolution_inputs(index, inputs, step.1.kv, workers);
                }
                Mixer::DeltaNet(_) => self.delta_net_inputs(index, inputs, step, workers),
                Mixer::Mamba2(_) => self.mamba2_inputs(index, inputs, step, workers),
                Mixer::Latent(_) => self.latent_inputs(index, inputs, step.1.kv, workers),
            }
        }
    }

    /// Computes queries, keys and values. Keys and values are written to `kv`.
    fn heads(&mut self, index: usize, inputs: Inputs, kv: &mut KvStore, workers: &Workers) {
        let (config, path) = (&self.config, self.path);
        let Some(layer) = self.layers[index].attention() else { return };
        let Activations { normed, q, k, gates, .. } = &mut self.activations;
        let AttentionConfig { head_dim: dim, rope, qk_norm, query_scaling, .. } = layer.config;
        let rope = rope.map(|rope| &self.ropes[rope]);
        let heads = passes::Heads::of(config, path, dim, rope, &self.plan);
        let heads = heads.with(qk_norm, query_scaling);
        let updates = self.adapters.updates(index, Site::Inputs);
        let epilogue_q = updates.then([0], |sums: RowSums<'_>| {
            heads.apply_to_queries(&layer.q, layer.q_norm.as_deref(), sums);
        });
        let epilogue_k = updates.then([1], |sums: RowSums<'_>| {
            heads.apply(layer.k.as_ref(), layer.k_norm.as_deref(), sums);
        });
        // Values that are projected as keys are have the updates of keys.
        let (v, v_part) = layer.v.as_ref().map_or((layer.k.as_ref(), 1), |v| (Some(v), 2));
        let epilogue_v = updates.then([v_part], |sums: RowSums<'_>| {
            heads.apply_to_values(v, layer.v_norm.as_deref(), sums);
        });
        let epilogue_gate = updates.then([3], |sums: RowSums<'_>| {
            layer.gate.iter().for_each(|gate| gate.add_bias(path, sums.feature, sums.first));
        });
        let [k_matrix, v_matrix, gate_matrix] = [layer.k.as_ref(), v, layer.gate.as_ref()]
            .map(|linear| linear.map(|linear| [&linear.matrix]));
        let q_matrix = [&layer.q.matrix];
        let q = &mut q[..normed.rows() * layer.query_width()];
        let gates = &mut gates[..gate_matrix.map_or(0, |_| q.len())];
        let k = &mut k[..late_keys_len(layer, normed.rows())];
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
            let windowed = kv.is_windowed(layer.kept);
            let slots = if windowed { &self.plan.window_slots } else { &self.plan.slots };
            let [keys, values] = kv.rows_mut(layer.kept, path, slots);
            // Keys that are normalized together are complete only after the GEMM.
            let keys = match qk_norm {
                Some(QkNorm::Position) => {
                    late_keys = Some(keys);
                    Sink::Rows(&mut *k)
                }
                Some(QkNorm::Head) | None => Sink::Cache(keys),
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
            layer.norm_positions(inputs, &heads, [q, k], late_keys.as_mut(), workers);
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
        sequences: &Sequences<'_>,
        workers: &Workers,
    ) {
        for mixer in 0..self.layers[index].mixers.len() {
            match &self.layers[index].mixers[mixer] {
                Mixer::Attention(_) => self.attend(index, rows, kv, sequences, workers),
                Mixer::Convolution(_) => self.convolve(index, rows, kv, workers),
                Mixer::DeltaNet(_) => self.gate_delta_net(index, rows, workers),
                Mixer::Mamba2(_) => self.gate_mamba2(index, rows, workers),
                Mixer::Latent(_) => {
                    self.attend_latent(index, rows, kv, &sequences.blocks, workers);
                }
            }
            let layer = &self.layers[index];
            let Activations { x, mixed, projected, .. } = &mut self.activations;
            let x = &mut x[..rows * self.config.hidden_size];
            let mixer = &layer.mixers[mixer];
            let residual = passes::Residual {
                config: &self.config,
                path: self.path,
                linear: mixer.output(),
                own_norm: layer.attention_output_norm.as_deref(),
                updates: Some(self.adapters.updates(index, mixer.sites()[1])),
                scale: passes::output_scale(&self.config, mixer.output_factor()),
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
        sequences: &Sequences<'_>,
        workers: &Workers,
    ) {
        let path = self.path;
        let Some(layer) = self.layers[index].attention() else { return };
        let Activations { q, gates, attended, mixed, .. } = &mut self.activations;
        let width = layer.query_width();
        let q = &q[..rows * width];
        let attended = &mut attended[..rows * width];
        let Attention { config, kept, .. } = *layer;
        let windowed = kv.is_windowed(kept);
        let sequences = if windowed { &sequences.windows } else { &sequences.blocks };
        let sinks = layer.sinks.as_deref();
        let attention = passes::LayerAttention {
            path,
            kv,
            kept,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            scale: config.scale,
            softcap: config.softcap,
            sliding_window: config.sliding_window,
            sinks,
        };
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

/// Number of elements of `rows` rows of keys that are normalized before they are written; 0 if keys
/// are written as they are computed.
fn late_keys_len(layer: &Attention, rows: usize) -> usize {
    let is_late = layer.config.qk_norm == Some(QkNorm::Position);
    layer.k.as_ref().filter(|_| is_late).map_or(0, |k| rows * k.matrix.out_features())
}

/// Computes products of the rows `normed`. Returns the time of their epilogues.
pub(super) fn multiply_all(
    path: Path,
    normed: &Operands,
    products: &mut [Product<'_>],
    workers: &Workers,
) -> Duration {
    let matrices: Vec<&Matrix> = products.iter().map(|product| product.matrices[0]).collect();
    let threads = workers.for_products(&matrices, normed.rows());
    kernels::multiply(path, threads, normed, products)
}

/// The rows of a step as input of the attention kernel.
#[derive(Debug)]
pub(super) struct Sequences<'a> {
    /// With the block tables of the step.
    pub(super) blocks: Vec<AttentionSequence<'a>>,
    /// With the block tables of windowed layers; empty if there are none.
    pub(super) windows: Vec<AttentionSequence<'a>>,
}

impl<'a> Sequences<'a> {
    /// The rows of all slices that the residual stream has according to `rows`. `windows` has the
    /// block tables of windowed layers, if there are any.
    pub(super) fn of(batch: &'a StepBatch, windows: &'a [Vec<BlockId>], rows: &BatchRows) -> Self {
        let of_tables = |tables: &mut dyn Iterator<Item = &'a Vec<BlockId>>| {
            let mut sequences = Vec::with_capacity(batch.sequences.len());
            for (slice, table) in batch.sequences.iter().zip(tables) {
                let end = slice.start + slice.token_count;
                divide_at_images(slice, table, end - rows.count_in(slice)..end, &mut sequences);
            }
            sequences
        };
        let mut tables = batch.sequences.iter().map(|slice| &slice.block_table);
        Self { blocks: of_tables(&mut tables), windows: of_tables(&mut windows.iter()) }
    }
}

/// Divides positions of a slice into images with full attention, of which `positions` has all rows
/// or none, and the causal parts between them.
fn divide_at_images<'a>(
    slice: &SequenceSlice,
    block_table: &'a [BlockId],
    positions: Range<usize>,
    sequences: &mut Vec<AttentionSequence<'a>>,
) {
    let mut push = |positions: Range<usize>, full| {
        let (start, count) = (positions.start, positions.len());
        if count > 0 {
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
