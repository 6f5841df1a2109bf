//! The decoder. There is one for all architectures: a [`DecoderConfig`] says which parts a layer
//! has.
//!
//! Activations are f32 rows, one per token of the batch, in buffers that are reused between steps.
//! Keys and values are first written to the paged KV store and then read from there, including
//! those of the current step. Therefore attention reads the same bits for a position, whether it
//! was computed in this step or in an earlier one.
//!
//! The decoder is loaded once from [`Weights`]. The backend that owns it calls [`Decoder::forward`]
//! once per step.

use stolon_backend::{LogitRows, StepBatch, StepOutput};
use stolon_kernels::{
    self as kernels, AttentionSequence, Epilogue, KvLayout, KvRows, Matrix, Path, Product, RowSums,
    Sink,
};

use crate::config::{DecoderConfig, QkNorm};
use crate::cpu::WeightType;
use crate::error::ModelError;
use crate::kv_store::KvStore;
use crate::weights::Weights;

mod activations;
mod experts;
mod layer;
mod linear;
mod passes;
mod plan;
mod profile;
mod rope;
mod routing;
mod workers;

use activations::Activations;
use experts::ExpertsPass;
use layer::{Layer, Mlp};
use linear::Loader;
use passes::Norm;
use plan::StepPlan;
use profile::Profile;
use rope::RopeTable;

pub use profile::{Stage, StageTimes};
pub(crate) use workers::Workers;

/// A model with packed weights and the buffers of its forward pass. See the
/// [module documentation](self).
#[derive(Debug)]
pub(crate) struct Decoder {
    config: DecoderConfig,
    path: Path,
    /// `[vocab_size, hidden_size]`. It is also the output matrix if `head` is `None`.
    embedding: Matrix,
    /// The output matrix `[vocab_size, hidden_size]`, unless it is tied to the embedding.
    head: Option<Matrix>,
    layers: Vec<Layer>,
    /// `[hidden_size]`: weight of the norm before the output matrix.
    final_norm: Vec<f32>,
    /// One table per entry of `config.ropes`, in the same order.
    ropes: Vec<RopeTable>,
    plan: StepPlan,
    activations: Activations,
    profile: Profile,
}

impl Decoder {
    /// Packs all weights for the instruction set `path`. The file of the weights is not needed
    /// afterwards.
    ///
    /// # Errors
    /// [`ModelError`] with the name of a tensor that is missing or has the wrong shape or type.
    pub(crate) fn load(
        config: DecoderConfig,
        weights: Weights,
        weight_type: WeightType,
        path: Path,
        workers: &Workers,
    ) -> Result<Self, ModelError> {
        let mut loader = Loader { weights, weight_type, path, workers };
        let shape = [config.vocab_size, config.hidden_size];
        let embedding = loader.matrix("model.embed_tokens.weight", shape)?;
        let head = match config.tie_word_embeddings {
            true => None,
            false => Some(loader.matrix("lm_head.weight", shape)?),
        };
        let layers = (0..config.layers.len())
            .map(|index| Layer::load(&config, index, &mut loader))
            .collect::<Result<_, _>>()?;
        let final_norm = loader.vector("model.norm.weight", config.hidden_size)?;
        let ropes = config
            .ropes
            .iter()
            .map(|rope| RopeTable::new(rope, config.rotary_dim(), config.max_positions))
            .collect();
        Ok(Self {
            config,
            path,
            embedding,
            head,
            layers,
            final_norm,
            ropes,
            plan: StepPlan::default(),
            activations: Activations::default(),
            profile: Profile::new(),
        })
    }

    /// The model's configuration.
    pub(crate) fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The time that all steps so far have spent in each stage.
    pub(crate) fn stage_times(&self) -> StageTimes {
        self.profile.times()
    }

    /// Size in bytes of all packed matrices.
    pub(crate) fn weight_bytes(&self) -> usize {
        let head = self.head.as_ref().map_or(0, Matrix::bytes);
        self.embedding.bytes() + head + self.layers.iter().map(Layer::bytes).sum::<usize>()
    }

    /// Computes a batch that the batch checker has accepted: writes keys and values to `kv` and
    /// returns the requested logits and hidden states.
    pub(crate) fn forward(
        &mut self,
        batch: &StepBatch,
        kv: &mut KvStore,
        workers: &Workers,
    ) -> StepOutput {
        self.profile.begin();
        self.plan.fill(batch, kv.shape().block_size);
        let mut rows = self.plan.positions.len();
        self.activations.reserve(&self.config, rows);
        let context = self.plan.positions.iter().max().map_or(0, |&last| last as usize + 1);
        self.ropes.iter_mut().for_each(|rope| rope.grow(context));
        let mut sequences = whole_slices(batch);

        self.embed(&batch.tokens, workers);
        self.norm_for(0, rows, workers);
        self.profile.mark(Stage::Batch);
        for index in 0..self.layers.len() {
            let last = index + 1 == self.layers.len();
            self.heads(
                index,
                if last { &[Part::Keys, Part::Values] } else { &Part::ALL },
                kv,
                workers,
            );
            if last {
                // In the last layer, rows without output are needed for their keys and values only.
                rows = self.keep_output_rows(rows, workers);
                self.profile.mark(Stage::Batch);
                if rows == 0 {
                    return StepOutput::default();
                }
                sequences = output_slices(batch);
                self.heads(index, &[Part::Queries], kv, workers);
            }
            self.attend(index, rows, kv, &sequences, workers);
            self.mlp(index, rows, workers);
        }
        let hidden = self.take_hidden(workers);
        let rows = rows - hidden.len() / self.config.hidden_size;
        if rows == 0 {
            return StepOutput { hidden, ..StepOutput::default() };
        }
        let mut logits = vec![0.0; rows * self.config.vocab_size];
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        let sink = Sink::Rows(&mut logits);
        let product = Product { group: 0, matrices: &[head], step: 1, epilogue: None, sink };
        let threads = workers.for_products(&[head], rows);
        kernels::multiply(self.path, threads, &self.activations.normed, &mut [product]);
        passes::finish_logits(&self.config, self.path, &mut logits, workers);
        self.profile.mark(Stage::Logits);
        StepOutput { logits, hidden, ..StepOutput::default() }
    }

    /// Returns the hidden states that the batch requests, `[rows, hidden_size]`, and leaves only
    /// the rows that get logits packed for the output matrix.
    fn take_hidden(&mut self, workers: &Workers) -> Vec<f32> {
        let is_hidden = &self.plan.hidden_rows;
        let count = is_hidden.iter().filter(|is_hidden| **is_hidden).count();
        if count == 0 {
            return Vec::new();
        }
        let width = self.config.hidden_size;
        let x = &mut self.activations.x;
        let mut states = Vec::with_capacity(count * width);
        let mut kept = 0;
        for (row, &is_hidden) in is_hidden.iter().enumerate() {
            if is_hidden {
                states.extend_from_slice(&x[row * width..][..width]);
            } else {
                x.copy_within(row * width..(row + 1) * width, kept * width);
                kept += 1;
            }
        }
        let mut hidden = vec![0.0; states.len()];
        let norm = Norm::of(&self.config, Some(&self.final_norm), self.path);
        norm.rows(&states, &mut hidden, workers);
        if kept > 0 {
            self.norm_for(self.layers.len(), kept, workers);
        }
        hidden
    }

    /// Fills the residual stream with the embeddings of `tokens`.
    fn embed(&mut self, tokens: &[u32], workers: &Workers) {
        let width = self.config.hidden_size;
        let (embedding, scale) = (&self.embedding, self.config.embedding_scale);
        let chunk = workers.chunk_rows(tokens.len(), width);
        let x = &mut self.activations.x[..tokens.len() * width];
        let parts = x.chunks_mut(chunk * width).zip(tokens.chunks(chunk));
        workers.run(parts, |(x, tokens)| {
            for (row, &token) in x.chunks_exact_mut(width).zip(tokens) {
                embedding.row(token as usize, row);
                if let Some(scale) = scale {
                    row.iter_mut().for_each(|value| *value *= scale);
                }
            }
        });
    }

    /// Normalizes the residual stream for the attention of layer `index`, or for the output matrix
    /// if `index` is the number of layers.
    fn norm_for(&mut self, index: usize, rows: usize, workers: &Workers) {
        let Activations { x, normed, .. } = &mut self.activations;
        let weight = match self.layers.get(index) {
            Some(layer) => {
                normed.reset(rows, &[&layer.q.matrix, &layer.k.matrix, &layer.v.matrix]);
                layer.input_norm.as_deref()
            }
            None => {
                normed.reset(rows, &[self.head.as_ref().unwrap_or(&self.embedding)]);
                Some(&self.final_norm[..])
            }
        };
        let x = &x[..rows * self.config.hidden_size];
        Norm::of(&self.config, weight, self.path).pack(x, normed, workers);
    }

    /// Computes the given `parts` of queries, keys and values. Keys and values are written to `kv`.
    fn heads(&mut self, index: usize, parts: &[Part], kv: &mut KvStore, workers: &Workers) {
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
            _ => (Sink::Cache(keys), None),
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

    /// Moves the rows that get logits or whose hidden states are returned to the front of the
    /// residual stream and returns their number. If other rows were dropped, the remaining ones are
    /// packed again for the last layer's queries.
    fn keep_output_rows(&mut self, rows: usize, workers: &Workers) -> usize {
        let kept = self.plan.output_rows.len();
        if kept < rows {
            let width = self.config.hidden_size;
            let x = &mut self.activations.x;
            for (to, &from) in self.plan.output_rows.iter().enumerate() {
                x.copy_within(from * width..(from + 1) * width, to * width);
                self.plan.positions[to] = self.plan.positions[from];
            }
            self.plan.positions.truncate(kept);
            self.norm_for(self.layers.len() - 1, kept, workers);
        }
        kept
    }

    /// Computes attention for `rows` rows and adds it to the residual stream.
    fn attend(
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
        let sinks = layer.sinks.as_deref();
        passes::attend(config, index, self.path, kv, q, sinks, sequences, attended, workers);
        self.profile.mark(Stage::Attention);
        attended_packed.reset(rows, &[&layer.o.matrix]);
        attended_packed.pack(workers.for_pass(rows, width), attended);
        let x = &mut x[..rows * config.hidden_size];
        let residual = passes::Residual {
            config,
            path: self.path,
            linear: &layer.o,
            own_norm: layer.post_attention_norm.as_deref(),
        };
        let epilogue_time = residual.add(attended_packed, x, projected, workers);
        self.profile.mark_with(Stage::Output, epilogue_time, Stage::Residual);
    }

    /// Normalizes the residual stream of `rows` rows, computes the MLP or the experts of layer
    /// `index`, adds the result to the residual stream, and normalizes that for the next layer or
    /// the output matrix.
    fn mlp(&mut self, index: usize, rows: usize, workers: &Workers) {
        let (config, path, layer) = (&self.config, self.path, &self.layers[index]);
        let Activations { x, normed, inner, projected, routing, .. } = &mut self.activations;
        let x = &mut x[..rows * config.hidden_size];
        let norm = Norm::of(config, layer.mlp_norm.as_deref(), path);
        match &layer.mlp {
            Mlp::Dense(mlp) => {
                let matrices = [&mlp.gate.matrix, &mlp.up.matrix];
                normed.reset(rows, &matrices);
                norm.pack(x, normed, workers);
                self.profile.mark(Stage::Residual);
                inner.reset(rows, &[&mlp.down.matrix]);
                let gate = |sums: RowSums<'_>| passes::gate(config.activation, mlp, path, sums);
                let product = Product {
                    group: 0,
                    matrices: &matrices,
                    step: 1,
                    epilogue: Some(&gate),
                    sink: Sink::Operands(inner.only()),
                };
                let threads = workers.for_products(&matrices, rows);
                let epilogue_time = kernels::multiply(path, threads, normed, &mut [product]);
                self.profile.mark_with(Stage::GateUp, epilogue_time, Stage::Gate);
                let own_norm = layer.post_mlp_norm.as_deref();
                let residual = passes::Residual { config, path, linear: &mlp.down, own_norm };
                let epilogue_time = residual.add(inner, x, projected, workers);
                self.profile.mark_with(Stage::Down, epilogue_time, Stage::Residual);
            }
            Mlp::Experts(experts) => {
                let pass = ExpertsPass { config, path, workers, experts };
                pass.add(norm, x, normed, inner, routing, &mut self.profile);
            }
        }
        self.norm_for(index + 1, rows, workers);
        self.profile.mark(Stage::Residual);
    }
}

/// The projections that [`Decoder::heads`] computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Queries,
    Keys,
    Values,
}

impl Part {
    const ALL: [Self; 3] = [Self::Queries, Self::Keys, Self::Values];
}

/// All rows of all slices, as input of the attention kernel.
fn whole_slices(batch: &StepBatch) -> Vec<AttentionSequence<'_>> {
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
fn output_slices(batch: &StepBatch) -> Vec<AttentionSequence<'_>> {
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
