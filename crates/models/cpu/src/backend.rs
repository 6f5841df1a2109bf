//! The CPU backend: implements [`Backend`] with the decoder, a paged KV store and worker threads.
//!
//! It is created once from a loaded model and moved to the executor's thread, which calls
//! [`Backend::step`]. Dropping it frees the weights and the KV store and stops the threads. Two
//! backends in one process share nothing.

mod options;

use std::sync::Arc;
use std::time::Duration;

use stolon_backend::kv_probe;
use stolon_backend::{
    AdapterLoader, Backend, BackendError, BackendSpec, BatchChecker, DraftOutput, DraftTask,
    ImageEmbeddings, ImageInput, KvFormat, RegionBins, StateSpec, StepBatch, StepOutput,
    check_drafts, check_read, check_write,
};
use stolon_checkpoint::adapter::LoraLoader;
use stolon_checkpoint::config::{DecoderConfig, DraftHeadKind, VisionConfig};
use stolon_checkpoint::error::ModelError;
use stolon_checkpoint::kv::{KvBudget, KvLayer, KvShape, KvType, check_block_size};
use stolon_checkpoint::memory::packed_bytes;
use stolon_checkpoint::weights::Weights;
use stolon_checkpoint::{Contents, DraftHead as LoadedHead, WeightType};
use stolon_kernels::{KvLayout, Path};
use stolon_kvcache::BlockId;

use crate::decoder::linear::Loader;
use crate::decoder::{Decoder, Regions, StageTimes, StepState};
use crate::draft_head::DraftHead;
use crate::kv_store::KvStore;
use crate::memory;
use crate::state_store::{StateStore, recurrent_bytes};
use crate::vision::Encoder;
use crate::workers::{Workers, at_low_priority};
pub use options::CpuOptions;

/// Computes forward passes on the CPU.
#[derive(Debug)]
pub struct CpuBackend {
    spec: BackendSpec,
    kv_format: Option<KvFormat>,
    checker: BatchChecker,
    decoder: Decoder,
    /// The image encoder; `None` if the model reads text only.
    encoder: Option<Encoder>,
    kv: KvStore,
    /// The draft head, which guesses tokens, if there is one.
    head: Option<DraftHead>,
    states: StateStore,
    /// Shared with the backend of a draft model: only one of the two computes at a time.
    workers: Arc<Workers>,
    path: Path,
    adapters: Arc<LoraLoader>,
}

impl CpuBackend {
    /// Packs the weights and reserves the KV store. The pages of each tensor are released as soon
    /// as it is packed. The weights' files are not needed afterwards.
    ///
    /// # Errors
    /// [`ModelError`] if the configuration is out of range, if a tensor is missing or has the wrong
    /// shape or type, if the block size is not a power of two from 1 to 256, if the number of
    /// threads is 0, if the instruction set is not available, or if there is not enough memory for
    /// the weights and the KV store.
    pub fn new(
        config: DecoderConfig,
        weights: Weights,
        options: CpuOptions,
    ) -> Result<Self, ModelError> {
        Self::with_encoder(config, None, weights, options)
    }

    /// The same as [`new`](Self::new), with the model's image encoder, whose tensors are among
    /// `weights`.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), also for the configuration and the weights of the encoder.
    pub fn with_encoder(
        config: DecoderConfig,
        encoder: Option<VisionConfig>,
        weights: Weights,
        options: CpuOptions,
    ) -> Result<Self, ModelError> {
        Self::with_head(config, encoder, weights, None, options)
    }

    /// The same as [`with_encoder`](Self::with_encoder), with a draft head, if there is one. The head
    /// guesses tokens ([`Backend::draft`]), and its part of the KV blocks is included in the budget.
    ///
    /// # Errors
    /// The errors of [`with_encoder`](Self::with_encoder), also for the head.
    pub fn with_head(
        config: DecoderConfig,
        encoder: Option<VisionConfig>,
        weights: Weights,
        head: Option<LoadedHead>,
        options: CpuOptions,
    ) -> Result<Self, ModelError> {
        let workers = Arc::new(options.workers(options.thread_count()?));
        Self::with_workers((config, encoder, head), weights, options, workers)
    }

    /// The backend of a model that guesses tokens for this one
    /// ([`WithDraft`](stolon_backend::WithDraft)). It computes with the same threads, and its KV store
    /// has blocks of the same size and number, whatever `options` say.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn draft(
        &self,
        config: DecoderConfig,
        weights: Weights,
        options: CpuOptions,
    ) -> Result<Self, ModelError> {
        let options = CpuOptions {
            block_size: self.spec.block_size,
            kv_budget: KvBudget::Blocks(self.spec.block_count),
            other_block_bytes: 0,
            ..options
        };
        Self::with_workers((config, None, None), weights, options, Arc::clone(&self.workers))
    }

    /// Number of bytes of a KV block of this model.
    ///
    /// # Errors
    /// [`ModelError`] if the configuration, the block size or the instruction set is refused.
    pub fn block_bytes(config: &DecoderConfig, options: &CpuOptions) -> Result<usize, ModelError> {
        config.check("the configuration")?;
        check_block_size(options.block_size)?;
        let kv_type = options.kv_type.unwrap_or_else(|| KvType::of_weights(config.dtype));
        let shape = options.shape(config, kv_type, options.path()?);
        shape.check()?;
        Ok(shape.block_bytes())
    }

    /// Loads a backend that computes with `workers`.
    fn with_workers(
        (config, encoder, head): (DecoderConfig, Option<VisionConfig>, Option<LoadedHead>),
        weights: Weights,
        options: CpuOptions,
        workers: Arc<Workers>,
    ) -> Result<Self, ModelError> {
        let load = |workers| Self::load((config, encoder, head), weights, options, workers);
        let mut backend = workers.load(options.yield_while_loading, load)?;
        backend.workers = workers;
        backend.log_ready();
        Ok(backend)
    }

    /// Loads a backend with these threads.
    fn load(
        (config, encoder, head): (DecoderConfig, Option<VisionConfig>, Option<LoadedHead>),
        weights: Weights,
        options: CpuOptions,
        workers: Arc<Workers>,
    ) -> Result<Self, ModelError> {
        config.check("the configuration")?;
        weights.check(&config)?;
        if let Some(encoder) = &encoder {
            check_encoder(encoder, &weights, &config)?;
        }
        check_block_size(options.block_size)?;
        let path = options.path()?;
        let kv_type = options.kv_type.unwrap_or_else(|| KvType::of_weights(config.dtype));
        let shape = options.shape(&config, kv_type, path);
        shape.check()?;
        let state = options.states(&config, &shape)?;
        let rings = options.rings(encoder.as_ref());
        let slot_bytes = recurrent_bytes(&config) + shape.ring_bytes(rings.slice_tokens);
        let state_bytes = (slot_bytes as u64).saturating_mul(rings.slots as u64);
        let head_shape = head.as_ref().map(|LoadedHead { config, kind, .. }| {
            let width = kind.state_width(config);
            options.shape(config, kv_type, path).of_draft_head(width)
        });
        check_head(head.as_ref(), &shape)?;
        let head_block_bytes = head_shape.as_ref().map_or(0, KvShape::block_bytes);
        let block_bytes = options.block_bytes(&shape).saturating_add(head_block_bytes);
        let head_bytes = head.as_ref().map_or(0, |head| {
            packed_bytes(head.tensors().into_iter(), &head.weights, options.weight_type)
        });
        let kv_budget = options.kv_budget;
        let other_bytes = state_bytes.saturating_add(head_bytes);
        let needed = memory::Needed { block_bytes, kv_budget, state_bytes: other_bytes };
        let all =
            config.tensors().into_iter().chain(encoder.iter().flat_map(VisionConfig::tensors));
        let (map_tables, _) =
            memory::place_tables(all, &weights, &options, |packed| memory::check(packed, needed))?;
        let mut kv_format = options.kv_copies.then(|| {
            kv_format(
                (&config, encoder.as_ref(), head.as_ref()),
                &weights,
                options.weight_type,
                &shape,
                path,
                workers.count(),
            )
        });
        let weight_type = options.weight_type;
        let loader = |weights| Loader { weights, weight_type, map_tables, path, workers: &workers };
        let (encoder, bins, mut decoder) = load_parts(config, encoder, loader(weights))?;
        // The default budget is what is free after the weights were packed.
        let block_count = options.budget(other_bytes).block_count(block_bytes)?;
        let head = head.zip(head_shape).map(|(head, shape)| {
            DraftHead::load(head, &mut decoder, (shape, block_count), (path, loader))
        });
        let mut head = head.transpose()?;
        let mut kv = KvStore::new(shape.clone(), block_count)?.with_rings(rings)?;
        let mut states = StateStore::new(decoder.config(), options.state_slots)?;
        let spec = spec_of(decoder.config(), &shape, block_count, state);
        let image_width = encoder.as_ref().map(Encoder::image_width);
        let spec = BackendSpec { regions: bins, image_width, ..spec };
        let spec = with_head_blocks(spec, head_block_bytes);
        if let Some(format) = &mut kv_format {
            let probe = kv_probe::step(&spec);
            let step = StepState { kv: &mut kv, states: &mut states };
            decoder.forward(&probe, step, &workers);
            let blocks = &probe.sequences[0].block_table;
            let mut bytes = vec![0; blocks.len() * shape.block_bytes()];
            kv.read_blocks(blocks, &mut bytes, &workers);
            if let Some(head) = &mut head {
                head.extend(&probe, decoder.row_states(), &workers);
                let first = bytes.len();
                bytes.resize(first + blocks.len() * head_block_bytes, 0);
                head.kv().read_blocks(blocks, &mut bytes[first..], &workers);
            }
            bytes.extend_from_slice(if state.is_some() { states.slot_bytes(0) } else { &[] });
            bytes.extend(kv.window_bytes_at(0, probe.tokens.len()));
            kv_probe::add_to(format, &bytes);
        }
        let checker = BatchChecker::new(block_count).with_adapters();
        let adapters = Arc::new(LoraLoader::new(decoder.config(), path));
        Ok(Self {
            spec,
            kv_format,
            checker,
            decoder,
            encoder,
            kv,
            head,
            states,
            workers,
            path,
            adapters,
        })
    }

    fn log_ready(&self) {
        tracing::info!(
            path = self.path.name(),
            threads = self.thread_count(),
            weight_bytes = self.weight_bytes(),
            kv_blocks = self.spec.block_count,
            kv_bytes = self.spec.block_count * self.spec.block_bytes,
            kv_type = self.kv_type().name(),
            state_slots = self.spec.state.map_or(0, |state| state.slots),
            state_bytes = self.states.bytes() + self.kv.ring_bytes(),
            "the CPU backend is ready"
        );
        if matches!(stolon_kernels::OPT_LEVEL, "0" | "1") {
            tracing::warn!(
                opt_level = stolon_kernels::OPT_LEVEL,
                "the CPU kernels were compiled without optimization and are dozens of times slower: \
                 set `opt-level = 3` in `[profile.dev.package.stolon-kernels]` and \
                 `[profile.dev.package.stolon-cpu]` of your Cargo.toml"
            );
        }
    }

    /// The time that all steps so far have spent in each stage of the forward pass.
    #[must_use]
    pub fn stage_times(&self) -> StageTimes {
        self.decoder.stage_times()
    }

    /// The decoder's configuration.
    #[must_use]
    pub fn config(&self) -> &DecoderConfig {
        self.decoder.config()
    }

    /// Element type of the KV store.
    #[must_use]
    pub fn kv_type(&self) -> KvType {
        self.kv.shape().kv_type
    }

    /// The instruction set of the kernels.
    #[must_use]
    pub fn path(&self) -> Path {
        self.path
    }

    /// Number of threads that compute, including the executor's thread.
    #[must_use]
    pub fn thread_count(&self) -> usize {
        self.workers.count()
    }

    /// Size of the packed weights in bytes.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        let head = self.head.as_ref().map_or(0, DraftHead::weight_bytes);
        self.decoder.weight_bytes() + head + self.encoder.as_ref().map_or(0, Encoder::weight_bytes)
    }
}

impl Backend for CpuBackend {
    fn spec(&self) -> &BackendSpec {
        &self.spec
    }

    fn adapters(&self) -> Option<Arc<dyn AdapterLoader>> {
        Some(Arc::clone(&self.adapters) as _)
    }

    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError> {
        self.checker.check(batch, &self.spec)?;
        self.kv.check_slices(batch)?;
        self.states.check_slices(batch)?;
        self.adapters.check_slices(batch)?;
        if batch.sequences.is_empty() {
            return Ok(StepOutput::default());
        }
        let step = StepState { kv: &mut self.kv, states: &mut self.states };
        let output = self.decoder.forward(batch, step, &self.workers);
        self.decoder.release_adapters();
        if let Some(head) = &mut self.head {
            head.extend(batch, self.decoder.row_states(), &self.workers);
        }
        Ok(output)
    }

    fn draft(
        &mut self,
        tasks: &[DraftTask],
        budget: usize,
        choose: &mut dyn FnMut(usize, &mut [f32]) -> Option<u32>,
    ) -> Result<DraftOutput, BackendError> {
        let Some(head) = &mut self.head else {
            return Err(BackendError::Unsupported("draft models"));
        };
        check_drafts(tasks, &self.spec)?;
        Ok(head.guess(tasks, budget, choose, (&mut self.kv, &self.workers)))
    }

    fn encode(
        &mut self,
        image: &Arc<ImageInput>,
        time: Duration,
    ) -> Result<Option<ImageEmbeddings>, BackendError> {
        let Some(encoder) = &mut self.encoder else {
            return Err(BackendError::Unsupported("images"));
        };
        let embeddings = encoder.encode(image, time, &self.workers)?;
        let Some((embeddings, token)) = embeddings.as_ref().zip(encoder.first_token()) else {
            return Ok(embeddings);
        };
        let first = self.decoder.embedding(token);
        Ok(Some(ImageEmbeddings { values: [&first, &embeddings.values[..]].concat().into() }))
    }

    fn sampling_threads(&self) -> usize {
        self.thread_count()
    }

    fn kv_format(&self) -> Option<KvFormat> {
        self.kv_format.clone()
    }

    fn read_blocks(&mut self, blocks: &[BlockId], to: &mut [u8]) -> Result<(), BackendError> {
        check_read(&self.spec, blocks, to.len())?;
        let Some(head) = &self.head else {
            self.kv.read_blocks(blocks, to, &self.workers);
            return Ok(());
        };
        let own_bytes = self.kv.shape().block_bytes();
        for (block, to) in blocks.chunks(1).zip(to.chunks_exact_mut(self.spec.block_bytes)) {
            let (own, rest) = to.split_at_mut(own_bytes);
            self.kv.read_blocks(block, own, &self.workers);
            head.kv().read_blocks(block, rest, &self.workers);
        }
        Ok(())
    }

    fn write_blocks(&mut self, blocks: &[BlockId], from: &[&[u8]]) -> Result<(), BackendError> {
        check_write(&self.spec, blocks, from)?;
        let Some(head) = &mut self.head else {
            self.kv.write_blocks(blocks, from, &self.workers);
            return Ok(());
        };
        let own_bytes = self.kv.shape().block_bytes();
        let (own, rest): (Vec<_>, Vec<_>) =
            from.iter().map(|bytes| bytes.split_at(own_bytes)).unzip();
        self.kv.write_blocks(blocks, &own, &self.workers);
        head.kv_mut().write_blocks(blocks, &rest, &self.workers);
        Ok(())
    }
}

/// Loads the encoder and the bins of coordinates and sizes, if the model has them, and the decoder.
fn load_parts(
    config: DecoderConfig,
    encoder: Option<VisionConfig>,
    mut loader: Loader<'_>,
) -> Result<(Option<Encoder>, Option<RegionBins>, Decoder), ModelError> {
    let kv_type = KvType::of_weights(config.dtype);
    let (encoder, regions) = match encoder {
        Some(config) => {
            let regions = Regions::load(&config, &mut loader)?;
            (Some(Encoder::load(config, kv_type, &mut loader)?), regions)
        }
        None => (None, None),
    };
    let bins = regions.as_ref().map(Regions::bins);
    let decoder = Decoder::load(config, loader)?;
    Ok((encoder, bins, decoder.with_regions(regions)))
}

/// Checks that a head which reads the keys and values of a model with this shape finds all positions.
fn check_head(head: Option<&LoadedHead>, shape: &KvShape) -> Result<(), ModelError> {
    if head.is_some_and(|head| head.kind.reads_model_kv()) && shape.window > 0 {
        let expected = "`blocks` with an assistant of Gemma 4, which reads the keys and values";
        return Err(ModelError::option("window KV", expected, "`states`"));
    }
    Ok(())
}

/// Checks that the encoder can be loaded, and that its embeddings have the decoder's hidden size.
fn check_encoder(
    encoder: &VisionConfig,
    weights: &Weights,
    decoder: &DecoderConfig,
) -> Result<(), ModelError> {
    const NAME: &str = "the configuration of the encoder";
    encoder.check(NAME)?;
    if encoder.output_size != decoder.hidden_size {
        let expected = format!("{} (hidden_size)", decoder.hidden_size);
        return Err(ModelError::key(NAME, "output_size", expected, encoder.output_size));
    }
    if let Some(token) = encoder.first_token.filter(|id| *id as usize >= decoder.vocab_size) {
        let expected = format!("an id below vocab_size, {}", decoder.vocab_size);
        return Err(ModelError::key(NAME, "first_token", expected, token));
    }
    if let Some(input) = decoder.per_layer_input {
        let expected = "a decoder without per-layer embeddings";
        return Err(ModelError::unsupported(
            NAME,
            "hidden_size_per_layer_input",
            expected,
            input.width,
        ));
    }
    let layers = decoder.last_keeping_layer() + 1;
    if encoder.deepstack_layers() >= layers {
        let expected = format!("fewer than the {layers} layers of the decoder");
        let got = encoder.deepstack_layers();
        return Err(ModelError::key(NAME, "deepstack_visual_indexes", expected, got));
    }
    weights.check_encoder(encoder)
}

/// The specification of a backend without an image encoder.
fn spec_of(
    config: &DecoderConfig,
    shape: &KvShape,
    block_count: usize,
    state: Option<StateSpec>,
) -> BackendSpec {
    BackendSpec {
        vocab_size: config.vocab_size,
        max_positions: config.max_positions,
        block_size: shape.block_size,
        block_count,
        block_bytes: shape.block_bytes(),
        hidden_size: Some(config.hidden_size),
        // This backend does not draw tokens, because the rows of logits are in the engine's memory
        // already.
        draws: false,
        proposals: true,
        state: state.map(|state| checkpointed(state, shape)),
        ..BackendSpec::default()
    }
}

/// The specification with `head_block_bytes` more bytes per block, if there is a draft head. A
/// checkpoint takes as many blocks as it does without.
fn with_head_blocks(spec: BackendSpec, head_block_bytes: usize) -> BackendSpec {
    if head_block_bytes == 0 {
        return spec;
    }
    let block_bytes = spec.block_bytes + head_block_bytes;
    let bytes = spec.checkpoint_blocks() * block_bytes;
    let state = spec.state.map(|state| StateSpec { bytes, ..state });
    BackendSpec { block_bytes, state, draft_model: true, ..spec }
}

/// Minimum number of positions whose blocks are stored together in other tiers.
const STORED_POSITIONS: usize = 64;

/// Rounds the size of a state up to the size of a checkpoint. A checkpoint consists of whole
/// blocks, and their number is a multiple of the blocks that other tiers store together.
fn checkpointed(state: StateSpec, shape: &KvShape) -> StateSpec {
    let together = shape.block_bytes() * (STORED_POSITIONS / shape.block_size).max(1);
    StateSpec { bytes: state.bytes.next_multiple_of(together), ..state }
}

/// Revision of the computation of keys and values. It must be raised with every change of the
/// decoder, the image encoder or the kernels that changes bits of keys or values and that the short
/// prompt of `kv_probe` may not show. KV that an earlier version has stored is then not used.
const KV_REVISION: u32 = 4;

/// The values that determine the bytes of blocks: the whole configuration, all bytes of the
/// weights' files, the types and layouts of weights and KV in memory, and the instruction set,
/// because others round sums in another order.
fn kv_format(
    (config, encoder, head): (&DecoderConfig, Option<&VisionConfig>, Option<&LoadedHead>),
    weights: &Weights,
    weight_type: WeightType,
    shape: &KvShape,
    path: Path,
    threads: usize,
) -> KvFormat {
    let in_rows = |layer: &KvLayer| layer.key_layout == KvLayout::Rows;
    let are_in_rows = shape.attention_layers.iter().all(in_rows);
    let layout = if are_in_rows { "keys in rows" } else { "keys transposed" };
    let mut description = format!(
        "{:?}, {} layers, weights {weight_type}, KV {} in blocks of {}, {layout}, {} on {} ({}-endian), \
         revision {KV_REVISION}",
        config.architecture,
        config.layers.len(),
        shape.kv_type.name(),
        shape.block_size,
        path.name(),
        std::env::consts::ARCH,
        if cfg!(target_endian = "little") { "little" } else { "big" },
    );
    let mut fingerprint = blake3::Hasher::new_derive_key("stolon 2026 format of KV blocks");
    let encoder = encoder.map(|encoder| format!("{encoder:?}"));
    let parts = [description.clone(), format!("{shape:?}"), format!("{config:?}")];
    for part in parts.iter().chain(&encoder) {
        fingerprint.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    let contents = weights.contents(threads);
    let mut of_head = None;
    if let Some(LoadedHead { config, kind, weights, token_ids: _, cluster_tokens: _ }) = head {
        description += &format!(", with its {} head", kind.name());
        // A model's own head is in the files of the model.
        if *kind != DraftHeadKind::Mtp {
            of_head = Some((format!("{config:?}, {kind:?}"), weights.contents(threads)));
        }
    }
    KvFormat::new(description, move || {
        // Requests may be computed meanwhile.
        let hash = |contents: &Contents| {
            at_low_priority(|| contents.hash(threads)).map_err(|error| error.to_string())
        };
        fingerprint.update(&hash(&contents)?);
        if let Some((config, contents)) = of_head {
            fingerprint.update(config.as_bytes()).update(&hash(&contents)?);
        }
        Ok(*fingerprint.finalize().as_bytes())
    })
}
