//! The CPU backend: implements [`Backend`] with the decoder, a paged KV store and worker threads.
//!
//! It is created once from a loaded model and moved to the executor's thread, which calls
//! [`Backend::step`]. Dropping it frees the weights and the KV store and stops the threads. Two
//! backends in one process share nothing.

use std::collections::HashMap;

use stolon_backend::{
    Backend, BackendError, BackendSpec, BatchChecker, KvFormat, StepBatch, StepOutput, check_read,
    check_write,
};
use stolon_kernels::{KvLayout, Matrix, Path, Threads};
use stolon_kvcache::BlockId;

use crate::config::{DecoderConfig, TensorSpec};
use crate::decoder::{Decoder, StageTimes, Workers};
use crate::error::ModelError;
use crate::kv_probe;
use crate::kv_store::{
    KvBudget, KvShape, KvStore, KvStoreError, KvType, check_block_size, free_memory,
};
use crate::weights::{TensorType, Weights};

/// The element type in which a model's matrices, including the embedding, are kept in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightType {
    /// As stored in the file.
    #[default]
    Stored,
    /// F32, F16 and BF16 matrices are rounded to Q8_0 while they are loaded. This needs about half
    /// the memory of BF16 and is about twice as fast where the computation is memory-bound.
    /// Matrices that are quantized already, or whose row length is not a multiple of 32, are kept
    /// as stored.
    Q8_0,
}

impl WeightType {
    /// The type in which a matrix is kept that is stored as `stored` and has `columns` columns.
    pub(crate) fn of(self, stored: TensorType, columns: usize) -> TensorType {
        let fits = stored.block_len() == 1 && columns.is_multiple_of(TensorType::Q8_0.block_len());
        if self == Self::Q8_0 && fits { TensorType::Q8_0 } else { stored.kept_as() }
    }
}

impl std::str::FromStr for WeightType {
    type Err = ModelError;

    fn from_str(name: &str) -> Result<Self, ModelError> {
        match name {
            "stored" => Ok(Self::Stored),
            "q8_0" => Ok(Self::Q8_0),
            _ => Err(ModelError::InvalidOption {
                name: "weights".to_owned(),
                expected: "`stored` or `q8_0`".to_owned(),
                got: format!("`{name}`"),
            }),
        }
    }
}

impl std::fmt::Display for WeightType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Stored => "stored",
            Self::Q8_0 => "q8_0",
        })
    }
}

/// Options of a [`CpuBackend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// Positions per KV block: a power of two from 1 to 256.
    pub block_size: usize,
    /// Size of the KV store.
    pub kv_budget: KvBudget,
    /// Element type of the KV store. `None` selects f32 for f32 weights and bf16 for all others.
    pub kv_type: Option<KvType>,
    /// Number of threads that compute, including the executor's thread; at least 1. `None` selects
    /// the number of cores that the process may use.
    pub threads: Option<usize>,
    /// Instruction set of the kernels. `None` selects the best one of this machine.
    pub path: Option<Path>,
    /// Element type in which matrices are kept.
    pub weight_type: WeightType,
    /// Whether KV blocks can be copied out of and into the KV store. [`Backend::kv_format`] needs a
    /// hash of the weights then: their files are read once more when they are loaded.
    pub kv_copies: bool,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self {
            block_size: 16,
            kv_budget: KvBudget::Auto,
            kv_type: None,
            threads: None,
            path: None,
            weight_type: WeightType::Stored,
            kv_copies: false,
        }
    }
}

/// Computes forward passes on the CPU. See the [module documentation](self).
#[derive(Debug)]
pub struct CpuBackend {
    spec: BackendSpec,
    kv_format: Option<KvFormat>,
    checker: BatchChecker,
    decoder: Decoder,
    kv: KvStore,
    workers: Workers,
    path: Path,
}

impl CpuBackend {
    /// Packs the weights and reserves the KV store. The pages of each tensor are released as soon
    /// as it is packed. The file of the weights is not needed afterwards.
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
        config.check("the configuration")?;
        weights.check(&config)?;
        check_block_size(options.block_size)?;
        let thread_count = options.threads.unwrap_or_else(Threads::default_count);
        if thread_count == 0 {
            return Err(ModelError::InvalidOption {
                name: "threads".to_owned(),
                expected: "at least 1".to_owned(),
                got: "0".to_owned(),
            });
        }
        let path = match options.path {
            Some(path) => path,
            None => Path::detect().map_err(|source| ModelError::InvalidOption {
                name: "CPU path".to_owned(),
                expected: "an instruction set that this machine supports".to_owned(),
                got: source.to_string(),
            })?,
        };
        let kv_type = options.kv_type.unwrap_or_else(|| default_kv_type(config.dtype));
        let (block_size, bf16) = (options.block_size, kv_type == KvType::Bf16);
        let shape = KvShape {
            layer_count: config.layers.len(),
            block_size,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            kv_type,
            key_layout: KvLayout::of_keys(path, bf16, block_size, config.head_dim),
        };
        check_memory(&config, &weights, &options, &shape)?;
        let mut kv_format = options
            .kv_copies
            .then(|| kv_format(&config, &weights, options.weight_type, &shape, path, thread_count));
        let workers = Workers::new(thread_count);
        let mut decoder = Decoder::load(config, weights, options.weight_type, path, &workers)?;
        let block_count = options.kv_budget.block_count(shape.block_bytes())?;
        let mut kv = KvStore::new(shape, block_count)?;
        let spec = BackendSpec {
            vocab_size: decoder.config().vocab_size,
            max_positions: decoder.config().max_positions,
            block_size: shape.block_size,
            block_count,
            block_bytes: shape.block_bytes(),
            hidden_size: Some(decoder.config().hidden_size),
            // The rows are in the engine's memory already.
            draws: false,
        };
        if let Some(format) = &mut kv_format {
            let probe = kv_probe::step(&spec);
            decoder.forward(&probe, &mut kv, &workers);
            let blocks = &probe.sequences[0].block_table;
            let mut bytes = vec![0; blocks.len() * spec.block_bytes];
            kv.read_blocks(blocks, &mut bytes, &workers);
            kv_probe::add_to(format, &bytes);
        }
        tracing::info!(
            path = path.name(),
            threads = thread_count,
            weight_bytes = decoder.weight_bytes(),
            kv_blocks = block_count,
            kv_bytes = block_count * shape.block_bytes(),
            kv_type = shape.kv_type.name(),
            "the CPU backend is ready"
        );
        if matches!(stolon_kernels::OPT_LEVEL, "0" | "1") {
            tracing::warn!(
                opt_level = stolon_kernels::OPT_LEVEL,
                "the CPU kernels were compiled without optimisation and are dozens of times slower: \
                 set `opt-level = 3` in `[profile.dev.package.stolon-kernels]` and \
                 `[profile.dev.package.stolon-model]` of your Cargo.toml"
            );
        }
        let checker = BatchChecker::new(block_count);
        Ok(Self { spec, kv_format, checker, decoder, kv, workers, path })
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

    /// The instruction set in use.
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
        self.decoder.weight_bytes()
    }
}

impl Backend for CpuBackend {
    fn spec(&self) -> &BackendSpec {
        &self.spec
    }

    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError> {
        self.checker.check(batch, &self.spec)?;
        if batch.sequences.is_empty() {
            return Ok(StepOutput::default());
        }
        Ok(self.decoder.forward(batch, &mut self.kv, &self.workers))
    }

    fn sampling_threads(&self) -> usize {
        self.thread_count()
    }

    fn kv_format(&self) -> Option<KvFormat> {
        self.kv_format.clone()
    }

    fn read_blocks(&mut self, blocks: &[BlockId], to: &mut [u8]) -> Result<(), BackendError> {
        check_read(&self.spec, blocks, to.len())?;
        self.kv.read_blocks(blocks, to, &self.workers);
        Ok(())
    }

    fn write_blocks(&mut self, blocks: &[BlockId], from: &[&[u8]]) -> Result<(), BackendError> {
        check_write(&self.spec, blocks, from)?;
        self.kv.write_blocks(blocks, from, &self.workers);
        Ok(())
    }
}

/// Number of the way in which keys and values are computed. It must be raised with every change of
/// the decoder or the kernels that changes bits of keys or values and that the short prompt of
/// `kv_probe` may not show, so that KV which an earlier version has stored is not used.
const KV_REVISION: u32 = 1;

/// What the bytes of blocks depend on: everything of the configuration, all bytes of the weights'
/// files, how weights and KV are kept in memory, and the instruction set, because sums are rounded
/// in another order on others.
fn kv_format(
    config: &DecoderConfig,
    weights: &Weights,
    weight_type: WeightType,
    shape: &KvShape,
    path: Path,
    threads: usize,
) -> KvFormat {
    let layout = match shape.key_layout {
        KvLayout::Rows => "keys in rows",
        KvLayout::Transposed { .. } => "keys transposed",
    };
    let description = format!(
        "{:?}, {} layers, weights {weight_type}, KV {} in blocks of {}, {layout}, {} on {} ({}-endian), \
         revision {KV_REVISION}",
        config.architecture,
        shape.layer_count,
        shape.kv_type.name(),
        shape.block_size,
        path.name(),
        std::env::consts::ARCH,
        if cfg!(target_endian = "little") { "little" } else { "big" },
    );
    let mut fingerprint = blake3::Hasher::new_derive_key("stolon 2026 format of KV blocks");
    for part in [description.as_str(), &format!("{shape:?}"), &format!("{config:?}")] {
        fingerprint.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    fingerprint.update(&weights.hash(threads));
    KvFormat { fingerprint: *fingerprint.finalize().as_bytes(), description }
}

/// Checks that there is memory for the packed weights and for an explicit KV budget, before
/// anything is packed, which takes long. The default KV budget depends on the memory that is free
/// afterwards.
fn check_memory(
    config: &DecoderConfig,
    weights: &Weights,
    options: &CpuOptions,
    shape: &KvShape,
) -> Result<(), ModelError> {
    log_conversions(config, weights);
    // Weights in buffers are released while they are packed.
    let packed = packed_bytes(config, weights, options.weight_type);
    let needed = packed.saturating_sub(weights.buffered_bytes());
    check_free("the packed weights", needed)?;
    if options.kv_budget == KvBudget::Auto {
        return Ok(());
    }
    let (block_count, block_bytes) =
        (options.kv_budget.block_count(shape.block_bytes())?, shape.block_bytes());
    let expected = (block_count as u64).saturating_mul(block_bytes as u64);
    let free = free_memory();
    let left = free.saturating_sub(needed);
    if free > 0 && expected > left {
        let error = KvStoreError::OutOfMemory { expected, block_count, block_bytes, free: left };
        return Err(error.into());
    }
    Ok(())
}

/// Logs which types of weights are converted to others that take more memory.
fn log_conversions(config: &DecoderConfig, weights: &Weights) {
    let mut elements = HashMap::<TensorType, usize>::new();
    for spec in config.tensors() {
        let Some(dtype) = weights.dtype(&spec.name) else { continue };
        if dtype.kept_as() != dtype {
            let count = spec.shape.iter().fold(1, |product: usize, n| product.saturating_mul(*n));
            let sum = elements.entry(dtype).or_default();
            *sum = sum.saturating_add(count);
        }
    }
    for (dtype, count) in elements {
        tracing::info!(
            from = dtype.name(),
            to = dtype.kept_as().name(),
            stored_bytes = dtype.bytes_of(count),
            packed_bytes = dtype.kept_as().bytes_of(count),
            "weights are converted while they are loaded: no value changes, but they take more memory"
        );
    }
}

/// The size in bytes of all tensors of `config` after packing.
pub(crate) fn packed_bytes(
    config: &DecoderConfig,
    weights: &Weights,
    weight_type: WeightType,
) -> u64 {
    let bytes = |spec: TensorSpec| match *spec.shape.as_slice() {
        [rows, columns] => {
            let stored = weights.dtype(&spec.name).unwrap_or(TensorType::F32);
            let elements = rows.next_multiple_of(Matrix::ROWS_STEP).saturating_mul(columns);
            weight_type.of(stored, columns).bytes_of(elements).map_or(u64::MAX, |n| n as u64)
        }
        // Norms and biases are kept in f32.
        _ => 4 * spec.shape.iter().product::<usize>() as u64,
    };
    config.tensors().into_iter().map(bytes).fold(0, u64::saturating_add)
}

/// Checks that `expected` bytes of memory are free. `what` needs them.
///
/// # Errors
/// [`ModelError::OutOfMemory`].
pub(crate) fn check_free(what: &str, expected: u64) -> Result<(), ModelError> {
    match free_memory() {
        // Some systems do not tell.
        0 => Ok(()),
        free if expected <= free => Ok(()),
        free => Err(ModelError::OutOfMemory { what: what.to_owned(), expected, free }),
    }
}

/// The default element type of the KV store. It is not more exact than the weights.
pub(crate) fn default_kv_type(weights: TensorType) -> KvType {
    match weights {
        TensorType::F32 => KvType::F32,
        _ => KvType::Bf16,
    }
}
