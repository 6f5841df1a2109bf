//! [`CpuOptions`]: how a backend uses the machine.

use stolon_backend::StateSpec;
use stolon_checkpoint::WeightType;
use stolon_checkpoint::config::{DecoderConfig, VisionConfig};
use stolon_checkpoint::error::ModelError;
use stolon_checkpoint::kv::{
    DEFAULT_BLOCK_SIZE, DEFAULT_STEP_TOKENS, KvBudget, KvShape, KvType, WindowKv, default_kv_budget,
};
use stolon_checkpoint::memory::free_memory;
use stolon_kernels::{KvLayout, Path, Threads};

use crate::kv_store::WindowRings;
use crate::state_store::state_spec;
use crate::workers::Workers;

/// Options of a [`CpuBackend`](crate::CpuBackend).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// Positions per KV block: a power of two from 1 to 256.
    pub block_size: usize,
    /// Size of the KV store.
    pub kv_budget: KvBudget,
    /// Number of bytes that are kept elsewhere for each block, and are a part of `kv_budget`: those of
    /// a draft model.
    pub other_block_bytes: usize,
    /// Maximum number of running sequences with a state, at least 1. Sequences have a state if the
    /// model has recurrent layers, or with [`WindowKv::States`]. Each state occupies a slot, which
    /// takes memory when it is first used.
    pub state_slots: usize,
    /// The place where layers with a sliding window keep their keys and values.
    pub window_kv: WindowKv,
    /// Maximum number of tokens of one sequence in a step with [`WindowKv::States`]. An image whose
    /// positions attend to each other may have more. Each slot has memory for so many positions.
    pub step_tokens: usize,
    /// Element type of the KV store. `None` selects f32 for f32 weights and bf16 for all others.
    pub kv_type: Option<KvType>,
    /// Number of threads that compute, including the executor's thread; at least 1. `None` selects
    /// one thread for each performance core that the process may use on one socket.
    pub threads: Option<usize>,
    /// Whether each of these threads is bound to one processor.
    pub bind_threads: bool,
    /// Instruction set of the kernels. `None` selects the best one that this machine supports.
    pub path: Option<Path>,
    /// Element type in which matrices are kept.
    pub weight_type: WeightType,
    /// Whether tables of which only rows are read, such as an embedding that is not also the output
    /// matrix, stay in their memory-mapped file. The file must then not be changed while the backend
    /// exists. They stay there in any case if there is no memory for them. Results do not depend on
    /// it.
    pub map_tables: bool,
    /// Whether KV blocks can be copied out of and into the KV store. The fingerprint of
    /// [`Backend::kv_format`](stolon_backend::Backend::kv_format) then needs a hash of the weights:
    /// their files stay mapped, and are read once more when it is computed.
    pub kv_copies: bool,
    /// Whether the threads that load the model have a [low priority](crate::at_low_priority), so that
    /// they do not delay the steps of other models in the process.
    pub yield_while_loading: bool,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self {
            block_size: DEFAULT_BLOCK_SIZE,
            kv_budget: KvBudget::Auto,
            other_block_bytes: 0,
            state_slots: 64,
            window_kv: WindowKv::default(),
            step_tokens: DEFAULT_STEP_TOKENS,
            kv_type: None,
            threads: None,
            bind_threads: false,
            path: None,
            weight_type: WeightType::Stored,
            map_tables: false,
            kv_copies: false,
            yield_while_loading: false,
        }
    }
}

impl CpuOptions {
    pub(crate) fn thread_count(&self) -> Result<usize, ModelError> {
        match self.threads.unwrap_or_else(Threads::default_count) {
            0 => Err(ModelError::option("threads", "at least 1", "0")),
            count => Ok(count),
        }
    }

    /// The sizes and layout of the KV store.
    pub(super) fn shape(&self, config: &DecoderConfig, kv_type: KvType, path: Path) -> KvShape {
        let (block_size, bf16) = (self.block_size, kv_type == KvType::Bf16);
        let key_layout = |head_dim| KvLayout::of_keys(path, bf16, block_size, head_dim);
        self.window_kv.apply(KvShape::of(config, block_size, kv_type, key_layout), config)
    }

    /// The sizes of the rings of windowed layers.
    pub(super) fn rings(&self, encoder: Option<&VisionConfig>) -> WindowRings {
        // An image whose positions attend to each other is not divided into several slices.
        let edge = encoder.map_or(0, |encoder| encoder.tower.image_size);
        let image = encoder.and_then(|encoder| encoder.rows_of([edge; 2]).ok()).unwrap_or(0);
        WindowRings { slots: self.state_slots, slice_tokens: self.step_tokens.max(image) }
    }

    /// The size of a state and the number of slots; `None` if sequences have no state.
    pub(super) fn states(
        &self,
        config: &DecoderConfig,
        shape: &KvShape,
    ) -> Result<Option<StateSpec>, ModelError> {
        match state_spec(config, shape, self.state_slots) {
            Some(spec) if spec.slots == 0 || u32::try_from(spec.slots).is_err() => {
                Err(ModelError::option("state slots", format!("1 to {}", u32::MAX), spec.slots))
            }
            spec => Ok(spec),
        }
    }

    /// Number of bytes of the budget that a block takes.
    pub(super) fn block_bytes(&self, shape: &KvShape) -> usize {
        shape.block_bytes().saturating_add(self.other_block_bytes)
    }

    /// The memory budget of the KV store. The states need `state_bytes` bytes in addition when all
    /// slots are in use.
    pub(super) fn budget(&self, state_bytes: u64) -> KvBudget {
        match self.kv_budget {
            KvBudget::Auto if state_bytes > 0 => {
                KvBudget::Bytes(default_kv_budget(free_memory().saturating_sub(state_bytes)))
            }
            budget => budget,
        }
    }

    pub(crate) fn workers(&self, count: usize) -> Workers {
        let bound = self.bind_threads.then(|| Workers::bound(count));
        if let Some(None) = bound {
            tracing::warn!("the {count} threads cannot be bound to as many processors");
        }
        bound.flatten().unwrap_or_else(|| Workers::new(count))
    }

    pub(crate) fn path(&self) -> Result<Path, ModelError> {
        let expected = "an instruction set that this machine supports";
        let path = self.path.map_or_else(Path::detect, Ok);
        path.map_err(|source| ModelError::option("CPU path", expected, source))
    }
}
