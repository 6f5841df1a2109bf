//! Settings of LoRA adapters.

use std::path::PathBuf;

use crate::EngineBuilder;

/// Adapters that are loaded at start, and the memory of all.
#[derive(Debug)]
pub(super) struct AdapterSettings {
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
    pub fn adapter_memory(mut self, bytes: u64) -> Self {
        self.adapters.memory = bytes;
        self
    }
}
