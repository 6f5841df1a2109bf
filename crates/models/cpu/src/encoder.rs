//! Text encoders on the CPU: implements [`Backend`] for [`EncoderConfig`].
//!
//! A step is one ragged batch of whole texts ([`BackendSpec::whole_prompts`]), without padding: the
//! rows of all texts are one matrix, and attention runs over each text by itself. There is no KV
//! cache: the keys and values of a layer are overwritten by the next one. The blocks of the engine's
//! pool are numbers without memory, which count the positions in flight.
//!
//! One forward pass computes all families. Where it differs, it matches on a property of the
//! configuration, never on the family.
//!
//! **Invariant**: a hidden state has the same bits alone and in any batch, on any number of threads.

mod embed;
mod layer;
mod score_bias;
mod tasks;

use std::sync::Arc;

use stolon_backend::{Backend, BackendError, BackendSpec, BatchChecker, StepBatch, StepOutput};
use stolon_checkpoint::config::{Rope, RopeScaling};
use stolon_checkpoint::encoder::{
    EncoderConfig, EncoderNorm, EncoderNormWeights, EncoderRope, EncoderWeights,
};
use stolon_checkpoint::error::ModelError;
use stolon_checkpoint::kv::KvType;
use stolon_checkpoint::memory::check_free;
use stolon_checkpoint::weights::Weights;
use stolon_kernels::{self as kernels, LayerNorm, Operands, Path};

use crate::decoder::linear::Loader;
use crate::decoder::rope::RopeTable;
use crate::decoder::routing::Routing;
use crate::full_kv::{FullKv, FullMask, FullShape};
use crate::workers::Workers;
use crate::{CpuOptions, memory};
use embed::Embedding;
use layer::Layer;
use score_bias::BiasTable;
use tasks::{RowTasks, TableTasks};

/// Positions per block of the engine's pool. The blocks have no memory, so they are large.
const BLOCK_SIZE: usize = 256;

/// Computes the hidden states of texts.
#[derive(Debug)]
pub struct EncoderBackend {
    spec: BackendSpec,
    checker: BatchChecker,
    config: EncoderConfig,
    embedding: Embedding,
    layers: Vec<Layer>,
    final_norm: Option<Norm>,
    /// The cosines and sines of each rotary embedding.
    rotations: Vec<(EncoderRope, RopeTable)>,
    bias: Option<BiasTable>,
    activations: Activations,
    kv: FullKv,
    workers: Arc<Workers>,
    path: Path,
}

/// The activations of a step. They keep the size of the largest step.
#[derive(Debug, Default)]
struct Activations {
    /// The residual stream, `[rows, hidden_size]`.
    x: Vec<f32>,
    /// Memory for rows of the residual stream, of the same size.
    spare: Vec<f32>,
    /// Its rows, normalized or not, packed for a product.
    normed: Operands,
    /// The queries, `[rows, heads * head_dim]`.
    q: Vec<f32>,
    /// The output of attention, of the same size.
    attended: Vec<f32>,
    /// The output of attention, packed.
    mixed: Operands,
    /// The inner features of the MLP, packed.
    inner: Operands,
    /// The experts that the rows use.
    routing: Routing,
    /// The position of each row within its text.
    positions: Vec<u32>,
    tasks: RowTasks,
}

/// A norm of rows of the residual stream.
#[derive(Debug)]
struct Norm {
    kind: EncoderNorm,
    weight: Vec<f32>,
    /// Zeroes if the norm has no bias.
    bias: Vec<f32>,
    eps: f32,
}

impl Norm {
    fn load(
        weights: &EncoderNormWeights,
        config: &EncoderConfig,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let EncoderNormWeights { weight, bias } = weights;
        let weight = loader.vector(weight)?;
        let bias = loader.optional_vector(bias.as_ref())?;
        let bias = bias.unwrap_or_else(|| vec![0.0; weight.len()]);
        Ok(Self { kind: config.norm, weight, bias, eps: config.norm_eps })
    }

    /// Normalizes the rows of `x` into `out`.
    fn apply(&self, x: &[f32], out: &mut [f32], path: Path) {
        let Self { kind, weight, bias, eps } = self;
        match *kind {
            EncoderNorm::Layer => {
                kernels::layer_norm(path, x, &LayerNorm { weight, bias, eps: *eps }, out);
            }
            EncoderNorm::Rms { offset } => kernels::rms_norm(path, x, weight, *eps, offset, out),
        }
    }

    /// Normalizes the rows of `y` and adds them to those of `x`.
    fn add(&self, x: &mut [f32], y: &[f32], path: Path, workers: &Workers) {
        let width = self.weight.len();
        let chunk = workers.chunk_rows(x.len() / width, width) * width;
        workers.run(x.chunks_mut(chunk).zip(y.chunks(chunk)), |(x, y)| {
            let mut normed = vec![0.0; width];
            for (x, y) in x.chunks_exact_mut(width).zip(y.chunks_exact(width)) {
                self.apply(y, &mut normed, path);
                kernels::add(path, x, &normed);
            }
        });
    }

    /// Normalizes the rows of `x` in place. `spare` has the size of `x`.
    fn replace(&self, x: &mut Vec<f32>, spare: &mut Vec<f32>, path: Path, workers: &Workers) {
        let width = self.weight.len();
        let chunk = workers.chunk_rows(x.len() / width, width) * width;
        workers.run(x.chunks(chunk).zip(spare.chunks_mut(chunk)), |(x, out)| {
            self.apply(x, out, path);
        });
        std::mem::swap(x, spare);
    }
}

impl EncoderBackend {
    /// Packs the weights. Their files are not needed afterwards.
    ///
    /// # Errors
    /// [`ModelError`] if the configuration is out of range, if a tensor is missing or has the wrong
    /// shape or type, if the number of threads is 0, if the instruction set is not available, or if
    /// there is not enough memory.
    pub fn new(
        config: EncoderConfig,
        weights: Weights,
        options: CpuOptions,
    ) -> Result<Self, ModelError> {
        let workers = Arc::new(options.workers(options.thread_count()?));
        let load = |workers| Self::load(config, weights, options, workers);
        let mut backend = workers.load(options.yield_while_loading, load)?;
        backend.workers = workers;
        Ok(backend)
    }

    /// Loads a backend with these threads.
    fn load(
        config: EncoderConfig,
        weights: Weights,
        options: CpuOptions,
        workers: Arc<Workers>,
    ) -> Result<Self, ModelError> {
        config.check("the configuration")?;
        let tensors = config.tensors();
        weights.check_all(tensors.clone())?;
        let path = options.path()?;
        let weight_type = options.weight_type;
        let check = |needed| check_free(memory::PACKED, needed);
        let (map_tables, packed) = memory::place_tables(tensors, &weights, &options, check)?;
        let specs = config.weights();
        let dtype = weights.tensor(&specs.tokens.name, &specs.tokens.shape)?.dtype;
        // There is no cache that fewer bits would make smaller.
        let kv_type = options.kv_type.unwrap_or_else(|| KvType::of_weights(dtype)).without_scales();
        let mut loader = Loader { weights, weight_type, map_tables, path, workers: &workers };
        let EncoderWeights {
            tokens,
            positions,
            token_types,
            table_tasks,
            embedding_norm,
            score_bias,
            layers,
            final_norm,
        } = specs;
        let [token_tasks, type_tasks] = table_tasks.map(|weights| {
            weights.map(|weights| TableTasks::load(&weights, &mut loader)).transpose()
        });
        let norm =
            |norm: &EncoderNormWeights, loader: &mut Loader<'_>| Norm::load(norm, &config, loader);
        let embedding = Embedding {
            tokens: loader.table(&tokens)?,
            positions: loader.optional_vector(positions.as_ref())?,
            token_types: loader.optional_vector(token_types.as_ref())?,
            tasks: [token_tasks?, type_tasks?],
            norm: embedding_norm.map(|own| norm(&own, &mut loader)).transpose()?,
        };
        let learned = loader.optional_vector(score_bias.as_ref())?;
        let bias = BiasTable::new(&config, learned.as_deref());
        let layers = layers
            .iter()
            .map(|weights| Layer::load(weights, &config, &mut loader))
            .collect::<Result<Vec<_>, _>>()?;
        let final_norm = final_norm.map(|own| norm(&own, &mut loader)).transpose()?;
        drop(loader);
        let EncoderConfig { heads, kv_heads, head_dim, score_scale: scale, .. } = config;
        let shape = FullShape { heads, kv_heads, head_dim, scale, kv_type, path };
        let kv = FullKv::new(shape, std::iter::once(1))?;
        let blocks_each = config.max_positions.div_ceil(BLOCK_SIZE);
        let block_count = options.state_slots.max(1).saturating_mul(blocks_each);
        let spec = BackendSpec {
            vocab_size: config.vocab_size,
            max_positions: config.max_positions,
            block_size: BLOCK_SIZE,
            block_count,
            hidden_size: Some(config.hidden_size),
            whole_prompts: true,
            token_types: match &config.tasks {
                Some(tasks) => config.token_types.max(1) * (tasks.names.len() + 1),
                None => config.token_types,
            },
            ..BackendSpec::default()
        };
        let rotations = rotations(&config);
        tracing::info!(
            path = path.name(),
            threads = workers.count(),
            weight_bytes = packed,
            family = config.family.name(),
            "the CPU backend of the text encoder is ready"
        );
        Ok(Self {
            spec,
            checker: BatchChecker::new(block_count),
            config,
            embedding,
            layers,
            final_norm,
            rotations,
            bias,
            activations: Activations::default(),
            kv,
            workers,
            path,
        })
    }

    /// Computes the hidden states of the batch, `[rows, hidden_size]`, in `activations.x`.
    fn forward(&mut self, batch: &StepBatch) -> Result<(), BackendError> {
        let rows = batch.tokens.len();
        let size = rows * self.config.hidden_size;
        let attention_size = rows * self.config.heads * self.config.head_dim;
        let lens = batch.sequences.iter().map(|slice| slice.token_count);
        self.kv.reset(lens.clone()).map_err(|error| BackendError::Failed(error.to_string()))?;
        let Activations { x, spare, q, attended, positions, .. } = &mut self.activations;
        [x, spare].into_iter().for_each(|buffer| buffer.resize(size, 0.0));
        [q, attended].into_iter().for_each(|buffer| buffer.resize(attention_size, 0.0));
        positions.clear();
        positions.extend(lens.flat_map(|len| 0..len as u32));
        self.activations.tasks.fill(&self.config, batch);
        self.embed(batch);
        let longest = batch.sequences.iter().map(|slice| slice.token_count).max().unwrap_or(0);
        self.rotations.iter_mut().for_each(|(_, table)| table.grow(longest));
        let context = (self.path, &*self.workers);
        for (layer, config) in self.layers.iter().zip(&self.config.layers) {
            let rotations = config.rope.and_then(|rope| {
                self.rotations.iter().find(|(other, _)| *other == rope).map(|(_, table)| table)
            });
            let mask =
                FullMask { window: config.window, bias: self.bias.as_ref().map(BiasTable::view) };
            layer.forward(
                &self.config,
                &mut self.activations,
                (&mut self.kv, &mask, rotations),
                context,
            );
        }
        if let Some(norm) = &self.final_norm {
            let Activations { x, spare, .. } = &mut self.activations;
            norm.replace(x, spare, self.path, &self.workers);
        }
        Ok(())
    }
}

/// The tables of all rotary embeddings of the layers.
fn rotations(config: &EncoderConfig) -> Vec<(EncoderRope, RopeTable)> {
    let mut tables: Vec<(EncoderRope, RopeTable)> = Vec::new();
    for own in config.layers.iter().filter_map(|layer| layer.rope) {
        if tables.iter().all(|(other, _)| *other != own) {
            let EncoderRope { theta, divisor: factor } = own;
            let rope = Rope { theta, scaling: RopeScaling::Linear { factor }, sections: None };
            tables.push((own, RopeTable::new(&rope, config.head_dim, config.max_positions)));
        }
    }
    tables
}

impl Backend for EncoderBackend {
    fn spec(&self) -> &BackendSpec {
        &self.spec
    }

    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError> {
        self.checker.check(batch, &self.spec)?;
        let width = self.config.hidden_size;
        for slice in &batch.sequences {
            if slice.start != 0 || !slice.logit_rows.logits(slice.token_count).is_empty() {
                let reason = format!("expected whole prompts and hidden states, got {slice:?}");
                return Err(BackendError::MalformedBatch(reason));
            }
        }
        if batch.sequences.is_empty() {
            return Ok(StepOutput::default());
        }
        self.forward(batch)?;
        let mut hidden = Vec::new();
        let mut first = 0;
        for slice in &batch.sequences {
            let rows = slice.logit_rows.hidden(slice.token_count);
            let states = (first + rows.start) * width..(first + rows.end) * width;
            hidden.extend_from_slice(&self.activations.x[states]);
            first += slice.token_count;
        }
        Ok(StepOutput { hidden, ..StepOutput::default() })
    }

    fn sampling_threads(&self) -> usize {
        self.workers.count()
    }
}
