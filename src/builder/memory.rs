//! The memory that an engine will take, before it is started.

use stolon_checkpoint::WindowKv;
use stolon_checkpoint::inspect::{InspectOptions, inspect};

use super::EngineBuilder;
use super::load::BLOCK_SIZE;
use crate::Error;

impl EngineBuilder {
    /// The memory in bytes that the weights, those of a draft model or a head for
    /// multi-token prediction, and the KV cache will take.
    /// Reads the headers of the model's files, for a model on the hub perhaps over the network, and
    /// blocks meanwhile.
    ///
    /// Image encoders, adapters and what is computed in a step are not included.
    ///
    /// # Errors
    /// [`Error::Load`] if the model cannot be described, which is so for the built-in and random
    /// models, and [`EngineError::InvalidParameter`](crate::EngineError::InvalidParameter) without a
    /// model, and for a decoder without [`kv_memory`](Self::kv_memory) and
    /// [`num_blocks`](Self::num_blocks), whose KV cache takes what is free when it is started.
    pub fn memory_needed(&self) -> Result<u64, Error> {
        let Some(model) = self.model.clone() else {
            return Err(Error::invalid("model", "a model in files", "none"));
        };
        let mut load = self.load_options.clone();
        load.max_positions = self.config.max_positions;
        let (kv_type, window_kv) = (self.kv_type, self.window_kv.unwrap_or_default());
        let weight_type = self.weights.unwrap_or_default();
        let mut options = InspectOptions { load, weight_type, kv_type, window_kv };
        let mut inspection = inspect(&model.source()?, &options)?;
        if let Some(memory) = inspection.memory.as_mut().filter(|_| self.map_embeddings) {
            memory.weights -= memory.tables;
        }
        let Some(mut memory) = inspection.memory.filter(|memory| memory.kv_per_token > 0) else {
            // A text encoder, which has no KV cache.
            let stored = || inspection.tensors.iter().map(|tensor| tensor.bytes).sum();
            return Ok(inspection.memory.map_or_else(stored, |memory| memory.weights));
        };
        if let Some(head) = inspection.mtp.filter(|_| self.has_mtp()) {
            memory.weights += head.weights;
            memory.kv_per_token += head.kv_per_token;
        }
        if let Some(draft) = self.draft_model.clone() {
            (options.load.max_positions, options.load.mmproj) = (None, None);
            options.load.mtp = false;
            options.window_kv = WindowKv::Blocks;
            let added = inspect(&draft.source()?, &options)?.memory;
            memory.weights += added.as_ref().map_or(0, |added| added.weights);
            memory.kv_per_token += added.map_or(0, |added| added.kv_per_token);
        }
        let kv = match (self.num_blocks, self.kv_memory) {
            (Some(count), _) => {
                let positions = count.saturating_mul(self.block_size.unwrap_or(BLOCK_SIZE));
                memory.kv_per_token.saturating_mul(positions as u64)
            }
            (None, Some(bytes)) => bytes,
            (None, None) => {
                let expected = "a size, because the memory of this model has to be known before it \
                                is loaded";
                return Err(Error::invalid("kv_memory", expected, "none"));
            }
        };
        Ok(memory.weights.saturating_add(kv))
    }
}
