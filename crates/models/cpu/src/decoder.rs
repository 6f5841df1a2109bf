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

use std::cmp::Ordering;
use std::sync::Arc;

use stolon_backend::{StepBatch, StepOutput};
use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{DecoderConfig, DecoderWeights, DraftHeadKind, MtpInput};
use stolon_checkpoint::error::ModelError;
use stolon_checkpoint::{DraftHead, Weights};
use stolon_kernels::{self as kernels, Epilogue, Path, Product, RowSums, Sink};

use crate::kv_store::KvStore;
use crate::workers::Workers;

mod activations;
mod adapters;
mod assistant;
mod attention;
mod convolution;
mod delta_net;
mod embed;
pub(crate) mod experts;
mod feed_forward;
mod head_input;
mod latent;
mod layer;
pub(crate) mod linear;
mod mamba2;
mod mixer;
mod mlp;
mod pass;
mod passes;
mod per_layer;
mod plan;
mod profile;
mod recurrent;
mod regions;
pub(crate) mod rope;
pub(crate) mod routing;
mod row_states;
mod selective;
mod sequences;

use activations::Activations;
use adapters::{AdapterRows, RowUpdates};
use assistant::Assistant;
use embed::TokenMatrices;
use head_input::HeadInput;
use layer::Layer;
use linear::Loader;
use pass::{Inputs, Kept, Pass};
use passes::{Norm, NormVectors};
use per_layer::PerLayerEmbedding;
use plan::BatchRows;
use profile::Profile;
use rope::RopeTable;
use row_states::RowStates;
use sequences::Sequences;

pub(crate) use pass::StepState;
pub(crate) use plan::{output_count, slot_of};
pub use profile::{Stage, StageTimes};
pub(crate) use regions::Regions;

/// A model with packed weights and the buffers of its forward pass. See the
/// [module documentation](self).
#[derive(Debug)]
pub(crate) struct Decoder {
    config: DecoderConfig,
    path: Path,
    /// Shared with a draft head.
    tokens: Arc<TokenMatrices>,
    /// The bias of the output matrix, `[vocab_size]`.
    head_bias: Option<Vec<f32>>,
    /// The per-layer embeddings, if the model has any.
    per_layer: Option<PerLayerEmbedding>,
    layers: Vec<Layer>,
    /// Index of the last layer that keeps something of its positions. See
    /// [`DecoderConfig::last_keeping_layer`].
    last_keeping: usize,
    /// The hidden states of rows of the last step, for a draft head; `None` if the model is used
    /// without one.
    row_states: Option<RowStates>,
    /// What replaces the embedding of a token as the input, if this is the draft head of another
    /// decoder.
    head_input: Option<HeadInput>,
    /// The norm before the output matrix.
    final_norm: NormVectors,
    /// One table per entry of `config.ropes`, in the same order.
    ropes: Vec<RopeTable>,
    plan: BatchRows,
    activations: Activations,
    adapters: AdapterRows,
    /// The embeddings and bins of coordinates and sizes, if the model has them.
    regions: Option<Regions>,
    profile: Profile,
}

impl Decoder {
    /// Packs all weights. Afterwards, the weights' files are needed only for tables that stay in
    /// them.
    ///
    /// # Errors
    /// [`ModelError`] with the name of a tensor that is missing or has the wrong shape or type.
    pub(crate) fn load(config: DecoderConfig, mut loader: Loader<'_>) -> Result<Self, ModelError> {
        let weights = config.weights();
        let head = weights.head.as_ref();
        let tokens = TokenMatrices::load(&weights.embedding, head, &mut loader)?;
        Self::load_with((config, weights), tokens, loader)
    }

    /// Packs a draft head for this decoder, as a decoder that shares the matrices which the head does
    /// not have. From now on, this decoder records the hidden states that the head reads
    /// ([`Self::row_states`]).
    ///
    /// # Errors
    /// As [`Self::load`].
    pub(crate) fn load_head<'a>(
        &mut self,
        head: DraftHead,
        loader_of: impl FnOnce(Weights) -> Loader<'a>,
    ) -> Result<Self, ModelError> {
        let [has_embedding, has_output] = [head.has_own_embedding(), head.has_own_output()];
        let DraftHead { config, kind, weights, token_ids: _, cluster_tokens } = head;
        let mut loader = loader_of(weights);
        let input = HeadInput::load((&kind, cluster_tokens), &config, &mut loader)?;
        let read = match &kind {
            DraftHeadKind::Mtp => match config.mtp_weights().input {
                MtpInput::TokenFirst => None,
                MtpInput::StateFirst => Some(vec![self.layers.len()]),
            },
            DraftHeadKind::Eagle3(eagle3) => Some(eagle3.layers.clone()),
            DraftHeadKind::Gemma4(_) => None,
        };
        let reads_model = kind.reads_model_kv();
        let weights = kind.decoder_weights(&config);
        let embedding = has_embedding.then(|| loader.table(&weights.embedding)).transpose()?;
        let output = weights.head.as_ref().filter(|_| has_output);
        let head = output.map(|output| loader.matrix(output)).transpose()?;
        let tokens = TokenMatrices::OfHead { model: Arc::clone(&self.tokens), embedding, head };
        let head = Self::load_with((config, weights), tokens, loader)?;
        self.record_states(read, !reads_model);
        Ok(Self { head_input: Some(input), ..head })
    }

    /// Packs all weights but the embedding and the output matrix.
    fn load_with(
        (config, weights): (DecoderConfig, DecoderWeights),
        tokens: TokenMatrices,
        mut loader: Loader<'_>,
    ) -> Result<Self, ModelError> {
        let DecoderWeights { embedding: _, per_layer, layers, final_norm, head: _, head_bias } =
            weights;
        let per_layer = per_layer.map(|spec| PerLayerEmbedding::load(&spec, &mut loader));
        let per_layer = per_layer.transpose()?;
        let head_bias = loader.optional_vector(head_bias.as_ref())?;
        let layers = layers
            .iter()
            .zip(config.kept_indices())
            .map(|(layer, kept)| Layer::load(&config, layer, &kept, &mut loader))
            .collect::<Result<_, _>>()?;
        let final_norm = NormVectors::load(&final_norm, &mut loader)?;
        let ropes = config
            .ropes
            .iter()
            .enumerate()
            .filter_map(|(index, rope)| {
                Some(RopeTable::new(rope, config.rope_dim(index)?, config.max_positions))
            })
            .collect();
        Ok(Self {
            last_keeping: config.last_keeping_layer(),
            config,
            path: loader.path,
            tokens: Arc::new(tokens),
            head_bias,
            per_layer,
            row_states: None,
            head_input: None,
            layers,
            final_norm,
            ropes,
            plan: BatchRows::default(),
            activations: Activations::default(),
            adapters: AdapterRows::default(),
            regions: None,
            profile: Profile::new(),
        })
    }

    /// Drops the references to the adapters of the last step, so that their memory can be freed.
    pub(crate) fn release_adapters(&mut self) {
        self.adapters.clear();
    }

    /// The model's configuration.
    pub(crate) fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The time that all steps so far have spent in each stage.
    pub(crate) fn stage_times(&self) -> StageTimes {
        self.profile.times()
    }

    /// Number of logits of a row: the tokens of the vocabulary, or those that a draft head can guess.
    pub(crate) fn logit_count(&self) -> usize {
        self.tokens.head().out_features()
    }

    /// Size in bytes of all packed matrices, without those of another decoder.
    pub(crate) fn weight_bytes(&self) -> usize {
        let layers = self.layers.iter().map(Layer::bytes).sum::<usize>();
        let input = self.head_input.as_ref().map_or(0, HeadInput::bytes);
        let regions = self.regions.as_ref().map_or(0, Regions::bytes);
        let per_layer = self.per_layer.as_ref().map_or(0, PerLayerEmbedding::bytes);
        self.tokens.bytes() + input + per_layer + layers + regions
    }

    /// Computes a batch that the batch checker has accepted: writes keys and values, states and
    /// checkpoints, and returns the requested logits and hidden states.
    pub(crate) fn forward(
        &mut self,
        batch: &StepBatch,
        mut step: StepState<'_>,
        workers: &Workers,
    ) -> StepOutput {
        self.profile.begin();
        self.forget_states();
        step.states.begin(batch, step.kv, workers);
        let output = self.compute(batch, &mut step, workers);
        step.states.finish(batch, step.kv);
        output
    }

    /// Computes [`Decoder::forward`]. The states of all slices have been set to the start of their
    /// slices, and the caller completes the checkpoints.
    fn compute(
        &mut self,
        batch: &StepBatch,
        step: &mut StepState<'_>,
        workers: &Workers,
    ) -> StepOutput {
        let block_size = step.kv.shape().block_size;
        let windows = step.kv.window_tables(batch);
        self.plan.fill(batch, &windows, block_size);
        self.adapters.fill(batch);
        let mut rows = self.plan.len();
        self.activations.reserve(&self.config, rows);
        let mut context = self.plan.positions.iter().max().map_or(0, |&last| last as usize + 1);
        if self.assistant_mut().is_some() {
            // The token comes after the positions that its row attends to.
            self.plan.rotate_as_next();
            context += 1;
        }
        for rope in &mut self.ropes {
            rope.grow(context);
            rope.place(&self.plan.coordinates);
        }
        let mut sequences = Sequences::of(batch, &windows, &self.plan);
        self.activations.mixers.fill_taps(&self.config, &sequences.blocks, block_size);

        self.embed(batch, workers);
        self.embed_regions(batch, workers);
        self.join_states(rows, workers);
        if let Some(per_layer) = &self.per_layer {
            let model = (&self.config, self.path);
            per_layer.fill(&batch.tokens, model, &mut self.activations, workers);
        }
        self.norm_for(0, rows, workers);
        self.profile.mark(Stage::Batch);
        for index in 0..self.layers.len() {
            self.record_after(index, rows, workers);
            let inputs = match index.cmp(&self.last_keeping) {
                Ordering::Less => Inputs::All,
                Ordering::Equal => Inputs::Kept,
                Ordering::Greater => Inputs::Own,
            };
            self.project(index, inputs, (batch, &mut *step), workers);
            if index == self.last_keeping {
                // This layer has kept its data of all positions, and later layers keep none. From
                // here on, only rows with an output are needed.
                self.keep_output_rows(workers);
                rows = self.plan.len();
                self.profile.mark(Stage::Batch);
                if rows == 0 {
                    return StepOutput::default();
                }
                sequences = Sequences::of(batch, &windows, &self.plan);
                let mixers = &mut self.activations.mixers;
                mixers.fill_taps(&self.config, &sequences.blocks, block_size);
                self.project(index, Inputs::Own, (batch, &mut *step), workers);
            }
            if self.layers[index].parallel {
                self.route(index, rows, workers);
            }
            self.mix(index, rows, step.kv, &sequences, workers);
            self.feed_forward(index, rows, workers);
            if self.plan.has_all() && self.head_input.is_none() {
                self.add_deepstack(index, batch);
            }
            self.finish_layer(index, rows, workers);
            self.norm_for(index + 1, rows, workers);
            self.profile.mark(Stage::Residual);
        }
        self.record_after(self.layers.len(), rows, workers);
        if self.last_keeping == self.layers.len() {
            self.keep_output_rows(workers);
            rows = self.plan.len();
            if rows == 0 {
                return StepOutput::default();
            }
        }
        let hidden = self.take_hidden(workers);
        let rows = rows - hidden.len() / self.config.hidden_size;
        if rows == 0 {
            return StepOutput { hidden, ..StepOutput::default() };
        }
        let logits = self.add_regions(self.logits(rows, workers), workers);
        self.profile.mark(Stage::Logits);
        StepOutput { logits, hidden, ..StepOutput::default() }
    }

    /// The logits of the first `rows` rows, which are normalized and packed for the output matrix.
    fn logits(&self, rows: usize, workers: &Workers) -> Vec<f32> {
        let path = self.path;
        let head = self.tokens.head();
        let assistant = self.head_input.as_ref().and_then(HeadInput::assistant);
        if let Some(clusters) = assistant.and_then(Assistant::clusters) {
            return clusters.logits(&self.output_rows(rows, workers), head, path, workers);
        }
        let mut logits = vec![0.0; rows * self.logit_count()];
        let site = (self.layers.len(), Site::Inputs);
        let updates = self.adapters.updates(site.0, site.1);
        let finish = updates.then([0], |sums: RowSums<'_>| {
            if let Some(bias) = &self.head_bias {
                kernels::add(path, sums.first, &bias[sums.feature..][..sums.first.len()]);
            }
        });
        let is_plain = self.head_bias.is_none() && !self.adapters.has(site.0, site.1);
        let epilogue = (!is_plain).then_some(&finish as Epilogue<'_>);
        let sink = Sink::Rows(&mut logits);
        let product = Product { group: 0, matrices: &[head], step: 1, epilogue, sink };
        let threads = workers.for_products(&[head], rows);
        kernels::multiply(path, threads, &self.activations.normed, &mut [product]);
        passes::finish_logits(&self.config, path, &mut logits, workers);
        logits
    }

    /// Computes the projections of the normalized input of layer `index` that its mixers need. The
    /// results that later positions need are written to the KV store or the states.
    fn project(
        &mut self,
        index: usize,
        inputs: Inputs,
        (batch, step): (&StepBatch, &mut StepState<'_>),
        workers: &Workers,
    ) {
        let Self { config, path, layers, ropes, plan, adapters, profile, .. } = self;
        let Activations { normed, mixed, mixers: buffers, .. } = &mut self.activations;
        let first = self.head_input.as_ref().map_or(0, HeadInput::first_position);
        let (path, layer) = (*path, &layers[index]);
        let mut pass = Pass {
            index,
            config,
            path,
            plan,
            ropes,
            normed,
            mixed,
            adapters,
            profile,
            workers,
            first,
        };
        for mixer in &layer.mixers {
            mixer.project(inputs, Kept { batch, step: &mut *step }, buffers, &mut pass);
        }
    }

    /// Mixes positions for `rows` rows in layer `index`, and adds the projections of the results to
    /// the residual stream.
    fn mix(
        &mut self,
        index: usize,
        rows: usize,
        kv: &KvStore,
        sequences: &Sequences<'_>,
        workers: &Workers,
    ) {
        let Self { config, path, layers, ropes, plan, adapters, profile, .. } = self;
        let Activations { x, normed, mixed, projected, mixers: buffers, .. } =
            &mut self.activations;
        let first = self.head_input.as_ref().map_or(0, HeadInput::first_position);
        let (path, layer) = (*path, &layers[index]);
        let x = &mut x[..rows * config.hidden_size];
        for mixer in &layer.mixers {
            let mut pass = Pass {
                index,
                config,
                path,
                plan,
                ropes,
                normed,
                mixed: &mut *mixed,
                adapters: &mut *adapters,
                profile: &mut *profile,
                workers,
                first,
            };
            mixer.mix(rows, (kv, sequences), buffers, &mut pass);
            let residual = passes::Residual {
                path,
                linear: mixer.output(),
                own_norm: layer.attention_output_norm.as_ref(),
                updates: Some(adapters.updates(index, mixer.sites()[1])),
                scale: passes::output_scale(config, mixer.output_factor()),
            };
            let epilogue_time = residual.add(mixed, x, projected, workers);
            profile.mark_with(Stage::Output, epilogue_time, Stage::Residual);
        }
    }

    /// Adds the result of the per-layer embeddings of layer `index` to the residual stream of
    /// `rows` rows, and multiplies the stream by the factor of the layer. Does nothing if the model
    /// has neither.
    fn finish_layer(&mut self, index: usize, rows: usize, workers: &Workers) {
        let (path, layer) = (self.path, &self.layers[index]);
        if let Some(own) = &layer.per_layer {
            let all = self.per_layer.as_ref().map_or(0, PerLayerEmbedding::width);
            let model = (&self.config, path);
            own.add((index, all), rows, model, &mut self.activations, workers);
            self.profile.mark(Stage::PerLayer);
        }
        if let Some(factor) = layer.scale {
            let width = self.config.hidden_size;
            let x = &mut self.activations.x[..rows * width];
            let chunk = workers.chunk_rows(rows, width) * width;
            workers.run(x.chunks_mut(chunk), |x| kernels::scale(path, x, factor));
        }
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
        let mut kept = Vec::new();
        for (row, &is_hidden) in is_hidden.iter().enumerate() {
            if is_hidden {
                states.extend_from_slice(&x[row * width..][..width]);
            } else {
                x.copy_within(row * width..(row + 1) * width, kept.len() * width);
                kept.push(row);
            }
        }
        let mut hidden = vec![0.0; states.len()];
        let norm = Norm::of(self.config.hidden_size, Some(&self.final_norm), self.path);
        norm.rows(&states, &mut hidden, workers);
        if !kept.is_empty() {
            self.adapters.keep(&kept);
            self.norm_for(self.layers.len(), kept.len(), workers);
        }
        hidden
    }

    /// Normalizes the residual stream for the mixers of layer `index`, if it has any, or for the
    /// output matrix if `index` is the number of layers.
    fn norm_for(&mut self, index: usize, rows: usize, workers: &Workers) {
        let Activations { x, normed, .. } = &mut self.activations;
        let vectors = match self.layers.get(index) {
            Some(layer) if layer.mixers.is_empty() => return,
            Some(layer) => {
                normed.reset(rows, &layer.inputs());
                layer.attention_input_norm.as_ref()
            }
            None => {
                normed.reset(rows, &[self.tokens.head()]);
                Some(&self.final_norm)
            }
        };
        let width = self.config.hidden_size;
        if let Some(pairs) = self.head_input.as_ref().and_then(HeadInput::pairs)
            && index < self.layers.len()
        {
            // No adapter changes a head.
            return normed.pack(workers.for_pass(rows, 2 * width), &pairs[..rows * 2 * width]);
        }
        let x = &x[..rows * width];
        let norm = Norm::of(self.config.hidden_size, vectors, self.path);
        norm.pack(x, normed, workers);
        for site in self.layers.get(index).map_or(vec![Site::Inputs], Layer::input_sites) {
            self.adapters.lower((index, site), self.path, workers, |row, out| {
                norm.apply(&x[row * width..][..width], out);
            });
        }
    }

    /// Keeps only the rows of the residual stream that get logits or whose hidden states are
    /// returned. If other rows were dropped, the remaining rows are normalized and packed again: for
    /// the projections that [`Inputs::Own`] needs in the last layer that keeps positions, or, after
    /// all layers, for the output matrix.
    fn keep_output_rows(&mut self, workers: &Workers) {
        let before = self.plan.len();
        self.plan.keep_outputs();
        let kept = self.plan.len();
        if kept == before {
            return;
        }
        let width = self.config.hidden_size;
        let all = self.per_layer.as_ref().map_or(0, PerLayerEmbedding::width);
        let Activations { x, per_layer, .. } = &mut self.activations;
        for (to, &from) in self.plan.output_rows.iter().enumerate() {
            x.copy_within(from * width..(from + 1) * width, to * width);
            per_layer.copy_within(from * all..(from + 1) * all, to * all);
        }
        // A draft head computes logits for all rows of a step or for none.
        debug_assert!(self.head_input.is_none() || kept == 0);
        self.adapters.keep(&self.plan.output_rows);
        self.norm_for(self.last_keeping, kept, workers);
    }
}

#[cfg(test)]
mod tests;
