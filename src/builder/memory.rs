//! The memory that an engine will take, before it is started.

use stolon_checkpoint::WindowKv;
use stolon_checkpoint::inspect::{InspectOptions, inspect};

use super::load::BLOCK_SIZE;
use super::{EngineBuilder, ModelArg};
use crate::Error;

/// Number of positions for which a KV cache has to have room to be of use, unless the context of the
/// model is shorter.
const USEFUL_POSITIONS: u64 = 4096;

/// The memory that an engine will take, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryParts {
    /// The weights, with those of a draft model or of a head.
    pub(crate) weights: u64,
    pub(crate) kv: KvPart,
}

/// The size of a KV cache in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KvPart {
    /// As it was set; 0 for a text encoder, which has no KV cache.
    Known(u64),
    /// Not set. With less than `useful` bytes, requests of ordinary length are refused.
    Open { useful: u64 },
}

impl EngineBuilder {
    /// The memory in bytes that the KV cache and the weights will take, with those of a draft model or
    /// of a head. Reads the headers of the model's files, for a model on
    /// the hub perhaps over the network, and blocks meanwhile.
    ///
    /// Image encoders, adapters and what is computed in a step are not included.
    ///
    /// # Errors
    /// [`Error::Load`] if the model cannot be described, which is so for the built-in and random
    /// models, and [`EngineError::InvalidParameter`](crate::EngineError::InvalidParameter) without a
    /// model, and for a decoder without [`kv_memory`](Self::kv_memory) and
    /// [`num_blocks`](Self::num_blocks), whose KV cache takes what is free when it is started.
    pub fn memory_needed(&self) -> Result<u64, Error> {
        let MemoryParts { weights, kv } = self.memory_parts()?;
        match kv {
            KvPart::Known(bytes) => Ok(weights.saturating_add(bytes)),
            KvPart::Open { .. } => {
                let expected = "a size, because the memory of this model has to be known before it \
                                is loaded";
                Err(Error::invalid("kv_memory", expected, "none"))
            }
        }
    }

    /// The parts of [`memory_needed`](Self::memory_needed), also without a size of the KV cache.
    ///
    /// # Errors
    /// Those of `memory_needed`, but for the last.
    pub(crate) fn memory_parts(&self) -> Result<MemoryParts, Error> {
        let Some(model) = self.model.clone() else {
            return Err(Error::invalid("model", "a model in files", "none"));
        };
        let mut load = self.load_options.clone();
        load.max_positions = self.config.max_positions;
        let (kv_type, window_kv) = (self.kv_type, self.window_kv.unwrap_or_default());
        let weight_type = self.weights.unwrap_or_default();
        let mut options = InspectOptions { load, weight_type, kv_type, window_kv };
        let described = |model: ModelArg, options: &InspectOptions| {
            let mut inspection = inspect(&model.source()?, options)?;
            if let Some(memory) = inspection.memory.as_mut().filter(|_| self.map_embeddings) {
                memory.weights -= memory.tables;
            }
            Ok::<_, Error>(inspection)
        };
        let inspection = described(model, &options)?;
        let Some(mut memory) = inspection.memory.filter(|memory| memory.kv_per_token > 0) else {
            // A text encoder, which has no KV cache.
            let stored = || inspection.tensors.iter().map(|tensor| tensor.bytes).sum();
            let weights = inspection.memory.map_or_else(stored, |memory| memory.weights);
            return Ok(MemoryParts { weights, kv: KvPart::Known(0) });
        };
        if let Some(head) = inspection.mtp.filter(|_| self.has_mtp()) {
            memory.weights += head.weights;
            memory.kv_per_token += head.kv_per_token;
        }
        if let Some(draft) = self.draft_model.clone() {
            (options.load.max_positions, options.load.mmproj) = (None, None);
            options.load.mtp = false;
            options.window_kv = WindowKv::Blocks;
            let added = described(draft, &options)?;
            let of_model = added.memory.map(|model| (model.weights, model.kv_per_token));
            let of_head = added.draft_head.map(|head| (head.weights, head.kv_per_token));
            let (weights, kv_per_token) = of_model.or(of_head).unwrap_or_default();
            memory.weights += weights;
            memory.kv_per_token += kv_per_token;
        }
        let of_positions = |count: u64| memory.kv_per_token.saturating_mul(count);
        let kv = match (self.num_blocks, self.kv_memory) {
            (Some(count), _) => {
                let positions = count.saturating_mul(self.block_size.unwrap_or(BLOCK_SIZE));
                KvPart::Known(of_positions(positions as u64))
            }
            (None, Some(bytes)) => KvPart::Known(bytes),
            (None, None) => {
                KvPart::Open { useful: of_positions(USEFUL_POSITIONS).min(memory.kv_of_context) }
            }
        };
        Ok(MemoryParts { weights: memory.weights, kv })
    }
}
