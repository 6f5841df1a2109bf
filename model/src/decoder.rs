//! The one decoder behind all architectures: a [`DecoderConfig`] says which parts a layer has.
//!
//! Activations are f32 rows, one a token of the batch, in buffers that are reused between steps.
//! Keys and values go to the paged store first and are read from there, the step's own included,
//! so that a position's bits are the same whether it was computed now or long ago.
//!
//! Life: loaded once from [`Weights`]; [`Decoder::forward`] is called once a step by the backend
//! that owns it.

use crate::backend::{LogitRows, StepBatch};
use crate::config::DecoderConfig;
use crate::cpu::WeightType;
use crate::error::ModelError;
use crate::kernels::{AttentionSequence, Matrix, Path};
use crate::kv_store::{KvStore, Plane};
use crate::weights::Weights;

mod activations;
mod layer;
mod linear;
mod passes;
mod plan;
mod profile;
mod rope;
mod workers;

use activations::Activations;
use layer::Layer;
use linear::Loader;
use passes::Norm;
use plan::StepPlan;
use profile::Profile;
use rope::RopeTable;

pub use profile::{Stage, StageTimes};
pub(crate) use workers::Workers;

/// A model ready to compute. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Decoder {
    config: DecoderConfig,
    path: Path,
    /// `[vocab_size, hidden_size]`; the output matrix too where that is tied.
    embedding: Matrix,
    /// `[vocab_size, hidden_size]` where it is not.
    head: Option<Matrix>,
    layers: Vec<Layer>,
    /// `[hidden_size]`.
    final_norm: Vec<f32>,
    /// In the order of `config.ropes`.
    ropes: Vec<RopeTable>,
    plan: StepPlan,
    activations: Activations,
    profile: Profile,
}

impl Decoder {
    /// Packs all weights for `path`. The file's bytes are not needed afterwards.
    ///
    /// # Errors
    /// [`ModelError`] naming the tensor that is missing, or of a wrong shape or type.
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
            .map(|rope| RopeTable::new(rope, config.head_dim, config.max_positions))
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

    /// The configuration it was loaded with.
    pub(crate) fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Where the time of all steps went.
    pub(crate) fn stage_times(&self) -> StageTimes {
        self.profile.times()
    }

    /// Bytes of all packed matrices.
    pub(crate) fn weight_bytes(&self) -> usize {
        let head = self.head.as_ref().map_or(0, Matrix::bytes);
        self.embedding.bytes() + head + self.layers.iter().map(Layer::bytes).sum::<usize>()
    }

    /// Computes a batch that was checked before: writes keys and values to `kv`, returns the
    /// logits asked for, `[rows, vocab_size]`.
    pub(crate) fn forward(
        &mut self,
        batch: &StepBatch,
        kv: &mut KvStore,
        workers: &Workers,
    ) -> Vec<f32> {
        self.profile.begin();
        self.plan.fill(batch, kv.shape().block_size);
        let mut rows = self.plan.positions.len();
        self.activations.reserve(&self.config, rows);
        let context = self.plan.positions.iter().max().map_or(0, |&last| last as usize + 1);
        self.ropes.iter_mut().for_each(|rope| rope.grow(context));
        let mut sequences = whole_slices(batch);

        self.embed(&batch.tokens, workers);
        self.profile.mark(Stage::Batch);
        for index in 0..self.layers.len() {
            self.keys_and_values(index, rows, kv, workers);
            if index + 1 == self.layers.len() {
                // Nothing reads the other rows after their keys and values are written.
                rows = self.keep_output_rows(rows);
                self.profile.mark(Stage::Batch);
                if rows == 0 {
                    return Vec::new();
                }
                sequences = output_slices(batch);
            }
            self.attend(index, rows, kv, &sequences, workers);
            self.mlp(index, rows, workers);
        }
        let mut logits = vec![0.0; rows * self.config.vocab_size];
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        let normed = &self.activations.normed[..rows * self.config.hidden_size];
        head.matmul(workers.for_product(head, rows), normed, rows, &mut logits);
        self.profile.mark(Stage::Logits);
        logits
    }

    /// Fills the residual stream, and norms it for the first layer.
    fn embed(&mut self, tokens: &[u32], workers: &Workers) {
        let Activations { x, normed, .. } = &mut self.activations;
        let width = self.config.hidden_size;
        let len = tokens.len() * width;
        let first = self.layers.first().map_or(&self.final_norm, |layer| &layer.input_norm);
        let norm = Norm::of(&self.config, first, self.path);
        let (embedding, scale) = (&self.embedding, self.config.embedding_scale);
        let chunk = workers.chunk_rows(tokens.len(), width);
        let parts = x[..len]
            .chunks_mut(chunk * width)
            .zip(normed[..len].chunks_mut(chunk * width))
            .zip(tokens.chunks(chunk));
        workers.run(parts, |((x, normed), tokens)| {
            for (row, &token) in x.chunks_exact_mut(width).zip(tokens) {
                embedding.row(token as usize, row);
                if let Some(scale) = scale {
                    row.iter_mut().for_each(|value| *value *= scale);
                }
            }
            norm.apply(x, normed);
        });
    }

    /// Computes the layer's keys and values of all rows and stores those that are to be written.
    fn keys_and_values(&mut self, index: usize, rows: usize, kv: &mut KvStore, workers: &Workers) {
        let layer = &self.layers[index];
        let Activations { normed, k, v, .. } = &mut self.activations;
        let width = self.config.num_kv_heads * self.config.head_dim;
        let normed = &normed[..rows * self.config.hidden_size];
        let (k, v) = (&mut k[..rows * width], &mut v[..rows * width]);
        layer.k.product(normed, rows, k, workers);
        layer.v.product(normed, rows, v, workers);
        self.profile.mark(Stage::Qkv);
        let heads = passes::Heads {
            path: self.path,
            head_dim: self.config.head_dim,
            eps: self.config.rms_norm_eps,
            norm_offset: self.config.norm_offset,
            rope: &self.ropes[self.config.layers[index].rope],
        };
        let positions = &self.plan.positions;
        passes::keys_and_values(layer, &heads, positions, k, v, workers);
        let writes = &self.plan.writes;
        let write = |(plane, rows): (&mut Plane, &[f32])| {
            for run in writes {
                let from = run.row * width..(run.row + run.count) * width;
                plane.write(run.block, run.offset, &rows[from]);
            }
        };
        let planes = kv.layer_mut(index).into_iter().zip([&*k, &*v]);
        if workers.chunk_rows(rows, 2 * width) < rows {
            workers.run(planes, write);
        } else {
            planes.for_each(write);
        }
        self.profile.mark(Stage::Heads);
    }

    /// Moves the rows that get logits to the front of the residual stream and of the normed
    /// rows; returns how many they are.
    fn keep_output_rows(&mut self, rows: usize) -> usize {
        let kept = self.plan.output_rows.len();
        if kept < rows {
            let width = self.config.hidden_size;
            let Activations { x, normed, .. } = &mut self.activations;
            for (to, &from) in self.plan.output_rows.iter().enumerate() {
                x.copy_within(from * width..(from + 1) * width, to * width);
                normed.copy_within(from * width..(from + 1) * width, to * width);
                self.plan.positions[to] = self.plan.positions[from];
            }
        }
        self.plan.positions.truncate(kept);
        kept
    }

    /// Attention of `rows` normed rows, added to the residual stream; norms it for the MLP.
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
        let Activations { x, normed, q, attended, projected, .. } = &mut self.activations;
        let q = &mut q[..rows * config.num_heads * config.head_dim];
        let normed = &mut normed[..rows * config.hidden_size];
        layer.q.product(normed, rows, q, workers);
        self.profile.mark(Stage::Qkv);
        let heads = passes::Heads {
            path: self.path,
            head_dim: config.head_dim,
            eps: config.rms_norm_eps,
            norm_offset: config.norm_offset,
            rope: &self.ropes[config.layers[index].rope],
        };
        passes::queries(layer, &heads, &self.plan.positions, q, workers);
        self.profile.mark(Stage::Heads);
        let attended = &mut attended[..q.len()];
        passes::attend(config, index, self.path, kv, q, sequences, attended, workers);
        self.profile.mark(Stage::Attention);
        let projected = &mut projected[..rows * config.hidden_size];
        layer.o.product(attended, rows, projected, workers);
        self.profile.mark(Stage::Output);
        let residual = passes::Residual {
            bias: layer.o.bias(),
            own_norm: layer.post_attention_norm.as_deref(),
            next_norm: &layer.mlp_norm,
        };
        let x = &mut x[..rows * config.hidden_size];
        residual.add(config, self.path, x, projected, normed, workers);
        self.profile.mark(Stage::Residual);
    }

    /// The MLP of `rows` normed rows, added to the residual stream; norms it for what follows.
    fn mlp(&mut self, index: usize, rows: usize, workers: &Workers) {
        let config = &self.config;
        let layer = &self.layers[index];
        let Activations { x, normed, gate, up, projected, .. } = &mut self.activations;
        let normed = &mut normed[..rows * config.hidden_size];
        let inner = rows * config.intermediate_size;
        let (gate, up) = (&mut gate[..inner], &mut up[..inner]);
        layer.gate.product(normed, rows, gate, workers);
        layer.up.product(normed, rows, up, workers);
        self.profile.mark(Stage::GateUp);
        passes::gate(config, layer, self.path, gate, up, workers);
        self.profile.mark(Stage::Gate);
        let projected = &mut projected[..rows * config.hidden_size];
        layer.down.product(gate, rows, projected, workers);
        self.profile.mark(Stage::Down);
        let next = self.layers.get(index + 1).map_or(&self.final_norm, |next| &next.input_norm);
        let residual = passes::Residual {
            bias: layer.down.bias(),
            own_norm: layer.post_mlp_norm.as_deref(),
            next_norm: next,
        };
        let x = &mut x[..rows * config.hidden_size];
        residual.add(config, self.path, x, projected, normed, workers);
        self.profile.mark(Stage::Residual);
    }
}

/// Every slice as attention sees it.
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

/// The slices that get logits, cut down to those rows.
fn output_slices(batch: &StepBatch) -> Vec<AttentionSequence<'_>> {
    let slices = batch.sequences.iter();
    slices
        .filter(|slice| slice.logit_rows != LogitRows::None)
        .map(|slice| {
            let count = if slice.logit_rows == LogitRows::Last { 1 } else { slice.token_count };
            AttentionSequence {
                start: slice.start + slice.token_count - count,
                count,
                block_table: &slice.block_table,
            }
        })
        .collect()
}
