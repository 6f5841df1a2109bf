//! [`CandleBackend`]: implements [`Backend`] with the decoder and the KV store on a device.

use std::sync::Arc;

use candle_core::Device;
use stolon_backend::kv_probe;
use stolon_backend::{
    AdapterLoader, Backend, BackendError, BackendSpec, BatchChecker, KvFormat, StepBatch,
    StepOutput, check_read, check_write,
};
use stolon_checkpoint::adapter::LoraLoader;
use stolon_checkpoint::{DecoderConfig, Weights};
use stolon_kvcache::BlockId;

use crate::adapter_weights::OnDevice;
use crate::attention::Attentions;
use crate::decoder::Decoder;
use crate::graphs::Graphs;
use crate::kv_store::{KvStore, StoreShape};
use crate::linear::RowTile;
use crate::loader::Loader;
use crate::options::{CandleOptions, ComputeType, OpenError, message};
use crate::state_store::{StateShape, StateStore, Stores};
use crate::{DeviceChoice, draw, dry_run, graphs, memory};

/// Revision of the computation of keys and values. It must be raised with every change of their
/// bits that the short prompt of `kv_probe` may not show. KV that an earlier version has stored is
/// then not used.
const KV_REVISION: u32 = 1;

/// Computes forward passes with candle. See the [crate documentation](crate).
#[derive(Debug)]
pub struct CandleBackend {
    spec: BackendSpec,
    kv_format: Option<KvFormat>,
    checker: BatchChecker,
    adapters: Arc<LoraLoader<OnDevice>>,
    decoder: Decoder,
    stores: Stores,
    attentions: Attentions,
    /// The name of the attention in reports.
    attention: String,
    /// `None` if no steps are captured.
    graphs: Option<Graphs>,
    step_memory: StepMemory,
}

/// The memory in bytes that the largest step needs in addition to the weights and the KV store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepMemory {
    /// An upper estimate from the model's sizes.
    pub estimated_bytes: u64,
    /// The measured size, on CUDA; `None` on other devices. It is measured when the backend is
    /// opened.
    pub measured_bytes: Option<u64>,
}

impl StepMemory {
    /// The memory that is kept free for a step: the measured size, or the estimate if there is
    /// none.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.measured_bytes.unwrap_or(self.estimated_bytes)
    }
}

impl StepMemory {
    /// Determines the memory of the largest step of `options`, for products with the row tile
    /// `tile`, with or without CUDA graphs.
    fn of(
        decoder: &mut Decoder,
        shape: &StoreShape,
        attentions: &Attentions,
        options: &CandleOptions,
        (tile, cuda_graphs): (RowTile, bool),
    ) -> Result<Self, OpenError> {
        let device = decoder.device().clone();
        let workspace = attentions.workspace_bytes;
        // Neither the estimate nor the dry run includes the workspace of attention and the graphs,
        // because the contexts of the dry run are short and it captures nothing.
        let others = workspace
            + match cuda_graphs {
                true => graphs::memory_bytes(decoder.config(), options, tile) + workspace,
                false => 0,
            };
        let estimated_bytes = memory::step_bytes(decoder.config(), options, tile) + others;
        let free = memory::of(&device);
        let measured_bytes = dry_run::step_bytes(decoder, shape, attentions, options)
            .map_err(|error| memory::explain(error, free, options, estimated_bytes))?
            .map(|bytes| bytes + others);
        Ok(Self { estimated_bytes, measured_bytes })
    }
}

impl CandleBackend {
    /// Opens the device, copies the weights to it and reserves the KV store. The file of the
    /// weights is not needed afterwards. Call it on the thread that will use the backend.
    ///
    /// # Errors
    /// [`OpenError::Model`] if the configuration or an option is out of range, if a tensor is
    /// missing or has the wrong shape or type, or if there is not enough memory for the weights and
    /// the KV store; [`OpenError::Device`] if the device cannot be used; [`OpenError::Candle`] if
    /// it fails.
    pub fn open(
        config: DecoderConfig,
        weights: Weights,
        options: CandleOptions,
    ) -> Result<Self, OpenError> {
        config.check("the configuration")?;
        weights.check(&config)?;
        options.check()?;
        let device = options.device.open()?;
        let compute = options
            .compute_type
            .unwrap_or_else(|| ComputeType::default_for(options.device, config.dtype));
        let kv_type = options.kv_type.unwrap_or(compute.kv_type());
        let dtype = compute.dtype();
        memory::check_weights(memory::of(&device), &config, &weights, dtype.size_in_bytes())?;
        let mut shape = StoreShape::new(&config, options.block_size, kv_type);
        let attentions = Attentions::select(&config, &device, &shape, options.batch_invariant);
        let attention = attentions.name();
        let mut kv_format = options.kv_copies.then(|| {
            let parts = [dtype.as_str(), attention.as_str(), &hardware(&device)];
            kv_format(&config, &weights, &shape, &parts)
        });
        let tile = RowTile(options.batch_invariant.then(|| row_tile(options.device)));
        let tried = Vec::new();
        let loader = Loader { weights, device: device.clone(), dtype, tile, tried };
        let mut decoder = Decoder::load(config, loader)?;
        device.synchronize()?;
        let cuda_graphs =
            options.cuda_graphs && graphs::are_possible(decoder.config(), &attentions);
        let step_memory =
            StepMemory::of(&mut decoder, &shape, &attentions, &options, (tile, cuda_graphs))?;
        let graphs = match cuda_graphs {
            true => Some(Graphs::new(&decoder, &options)?),
            false => None,
        };
        device.synchronize()?;
        let state_shape = StateShape::of(decoder.config());
        let state = state_shape.spec(&shape, options.state_slots);
        let state_bytes = (state_shape.bytes() as u64).saturating_mul(options.state_slots as u64);
        memory::check_states(memory::of(&device), state_bytes)?;
        // The KV store gets memory that the states leave.
        let states = StateStore::new(state_shape, options.state_slots, &device)?;
        let (free, config) = (memory::of(&device), decoder.config());
        let step_bytes = step_memory.bytes();
        let reserved = step_bytes.saturating_add(memory::adapter_bytes(config, &options, tile));
        shape.block_count = memory::block_count(free, &device, &shape, &options, reserved)?;
        let mut stores = Stores { kv: KvStore::new(shape.clone(), &device)?, states };
        let spec = BackendSpec {
            vocab_size: config.vocab_size,
            max_positions: config.max_positions,
            block_size: shape.block_size(),
            block_count: shape.block_count,
            block_bytes: shape.block_bytes(),
            hidden_size: Some(config.hidden_size),
            draws: draw::is_supported(&device, config.vocab_size),
            state,
            ..BackendSpec::default()
        };
        if let Some(format) = &mut kv_format {
            let probe = kv_probe::step(&spec);
            decoder.forward(&probe, &mut stores, &attentions)?;
            let blocks = &probe.sequences[0].block_table;
            let mut bytes = vec![0; blocks.len() * spec.block_bytes];
            stores.kv.read_blocks(blocks, &mut bytes)?;
            bytes.extend(stores.states.first_slot_bytes()?);
            kv_probe::add_to(format, &bytes);
        }
        tracing::info!(
            device = %options.device,
            compute_type = dtype.as_str(),
            kv_type = kv_type.name(),
            attention,
            batch_invariant = options.batch_invariant,
            cuda_graphs,
            kv_blocks = spec.block_count,
            kv_bytes = spec.block_count * spec.block_bytes,
            state_slots = spec.state.map_or(0, |state| state.slots),
            state_bytes,
            step_bytes,
            "the candle backend is ready"
        );
        let checker = BatchChecker::new(spec.block_count).with_adapters();
        let format = OnDevice { device: device.clone(), dtype, tile };
        let adapters = Arc::new(LoraLoader::with_format(decoder.config(), format));
        Ok(Self {
            spec,
            kv_format,
            checker,
            adapters,
            decoder,
            stores,
            attentions,
            attention,
            graphs,
            step_memory,
        })
    }

    /// The decoder's configuration.
    #[must_use]
    pub fn config(&self) -> &DecoderConfig {
        self.decoder.config()
    }

    /// How attention is computed: `flash`, `split-KV` or `gather`, and whether sequences with a
    /// single query in a step are computed by split-KV decoding. If the heads of layers have
    /// different sizes, there may be several ways, separated by `; `. See the README.
    #[must_use]
    pub fn attention(&self) -> &str {
        &self.attention
    }

    /// Number of CUDA graphs: one for each padded size of batches and contexts so far. 0 without
    /// `cuda_graphs`, or if no step could be captured.
    #[must_use]
    pub fn captured_graphs(&self) -> usize {
        self.graphs.as_ref().map_or(0, Graphs::count)
    }

    /// The memory that a step needs.
    #[must_use]
    pub fn step_memory(&self) -> StepMemory {
        self.step_memory
    }
}

impl Backend for CandleBackend {
    fn spec(&self) -> &BackendSpec {
        &self.spec
    }

    fn adapters(&self) -> Option<Arc<dyn AdapterLoader>> {
        Some(Arc::clone(&self.adapters) as _)
    }

    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError> {
        self.checker.check(batch, &self.spec)?;
        self.adapters.check_slices(batch)?;
        if batch.sequences.is_empty() {
            return Ok(StepOutput::default());
        }
        let Self { decoder, stores, attentions, graphs, .. } = self;
        if let Some(graphs) = graphs
            && let Some(output) = graphs.step(batch, decoder, stores, attentions).map_err(failed)?
        {
            return Ok(output);
        }
        let output = decoder.forward(batch, stores, attentions).map_err(failed)?;
        // A step that returns nothing copies nothing from the device, so the device may still be
        // computing.
        decoder.device().synchronize().map_err(failed)?;
        Ok(output)
    }

    fn sampling_threads(&self) -> usize {
        std::thread::available_parallelism().map_or(1, usize::from)
    }

    fn kv_format(&self) -> Option<KvFormat> {
        self.kv_format.clone()
    }

    fn read_blocks(&mut self, blocks: &[BlockId], to: &mut [u8]) -> Result<(), BackendError> {
        check_read(&self.spec, blocks, to.len())?;
        self.stores.kv.read_blocks(blocks, to).map_err(failed)
    }

    fn write_blocks(&mut self, blocks: &[BlockId], from: &[&[u8]]) -> Result<(), BackendError> {
        check_write(&self.spec, blocks, from)?;
        self.stores.kv.write_blocks(blocks, from).map_err(failed)
    }
}

#[allow(clippy::needless_pass_by_value, reason = "it is passed to map_err")]
fn failed(error: candle_core::Error) -> BackendError {
    BackendError::Failed(message(&error))
}

/// Number of rows of every matrix product with batch invariance. On a GPU, a product of this many
/// rows takes about as long as reading the matrix.
fn row_tile(device: DeviceChoice) -> usize {
    if device == DeviceChoice::Cpu { 32 } else { 128 }
}

/// The hardware on which the bits of a sum may depend in addition to the model.
fn hardware(device: &Device) -> String {
    match device {
        #[cfg(feature = "cuda-core")]
        Device::Cuda(device) => {
            let context = device.cuda_stream().context().clone();
            let name = context.name().unwrap_or_else(|error| error.to_string());
            format!("{name}, compute capability {:?}", context.compute_capability().ok())
        }
        Device::Metal(_) => "metal".to_owned(),
        _ => format!("CPU {}", std::env::consts::ARCH),
    }
}

/// The values that determine the bytes of blocks: the whole configuration, all bytes of the
/// weights' files, the types, and `parts`.
fn kv_format(
    config: &DecoderConfig,
    weights: &Weights,
    shape: &StoreShape,
    parts: &[&str],
) -> KvFormat {
    let description = format!(
        "candle, {:?}, {} layers, KV {} in blocks of {}, {}, revision {KV_REVISION}",
        config.architecture,
        config.layers.len(),
        shape.kv_type(),
        shape.block_size(),
        parts.join(", "),
    );
    let mut fingerprint = blake3::Hasher::new_derive_key("stolon 2026 format of KV blocks");
    for part in [description.as_str(), &format!("{shape:?}"), &format!("{config:?}")] {
        fingerprint.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let contents = weights.contents(threads);
    KvFormat::new(description, move || {
        fingerprint.update(&contents.hash(threads).map_err(|error| error.to_string())?);
        Ok(*fingerprint.finalize().as_bytes())
    })
}
