//! Settings of LoRA adapters.

use std::path::PathBuf;

use crate::EngineBuilder;

/// Adapters that are loaded at start, and the memory of all.
#[derive(Clone, Debug)]
pub(crate) struct AdapterSettings {
    /// Names and paths.
    pub(super) adapters: Vec<(String, PathBuf)>,
    /// Maximum size in bytes of the weights in memory.
    pub(super) memory: u64,
}

impl Default for AdapterSettings {
    fn default() -> AdapterSettings {
        AdapterSettings { adapters: Vec::new(), memory: 1 << 30 }
    }
}

impl AdapterSettings {
    /// Size in bytes of the memory of a GPU that is kept free for adapters: the whole maximum if
    /// adapters are loaded at start.
    #[cfg(feature = "candle")]
    pub(crate) fn reserved(&self) -> u64 {
        if self.adapters.is_empty() { 0 } else { self.memory }
    }
}

impl EngineBuilder {
    /// Loads a LoRA adapter when the engine starts, as
    /// [`Engine::load_adapter`](crate::Engine::load_adapter) does. May be called several times.
    /// [`build`](Self::build) fails if one of them cannot be loaded.
    pub fn adapter(mut self, name: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        self.adapters.adapters.push((name.into(), path.into()));
        self
    }

    /// Maximum size in bytes of the weights of all adapters in memory. Default: 1 GiB.
    ///
    /// If one more is needed, those that no request uses leave the memory, the least recently used
    /// one first. They stay loaded by name, and the next request reads their files again. If the
    /// files have changed meanwhile, it fails with
    /// [`AdapterError::Changed`](crate::AdapterError::Changed). While the adapters in use leave no
    /// room, requests for others fail with
    /// [`AdapterError::OutOfMemory`](crate::AdapterError::OutOfMemory), which is retryable.
    ///
    /// On a GPU, the weights are in the memory of the GPU. The KV cache leaves this size free if an
    /// adapter is loaded at start; otherwise adapters use the memory that
    /// `gpu_memory_utilization` leaves.
    pub fn adapter_memory(mut self, bytes: u64) -> Self {
        self.adapters.memory = bytes;
        self
    }
}
