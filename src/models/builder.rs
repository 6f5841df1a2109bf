//! Describes the models of a set and starts it.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;

use super::slot::Slot;
use super::{ModelSet, Shared, idle};
use crate::{EngineBuilder, EngineError, Error};

/// Maximum length of the name of a model, in bytes.
const NAME_BYTES_MAX: usize = 256;

/// A model of a [`ModelSet`]: its name, and how its engine is made each time that it is loaded.
#[derive(Clone)]
pub struct ModelRecipe {
    pub(super) name: String,
    pub(super) builder: Arc<dyn Fn() -> Result<EngineBuilder, Error> + Send + Sync>,
    pub(super) is_pinned: bool,
    pub(super) at_start: bool,
    /// `None` for the memory of the weights and the KV cache, in bytes.
    pub(super) memory: Option<u64>,
}

impl fmt::Debug for ModelRecipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelRecipe")
            .field("name", &self.name)
            .field("is_pinned", &self.is_pinned)
            .field("at_start", &self.at_start)
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}

impl ModelRecipe {
    /// A model of this name, of 1 to 256 bytes, whose engine is made by `builder`. It is loaded when
    /// it is first needed.
    ///
    /// With a disk tier (`kv_cache_dir`), each model needs a directory of its own.
    pub fn new(
        name: impl Into<String>,
        builder: impl Fn() -> Result<EngineBuilder, Error> + Send + Sync + 'static,
    ) -> ModelRecipe {
        let (name, builder) = (name.into(), Arc::new(builder));
        ModelRecipe { name, builder, is_pinned: false, at_start: false, memory: None }
    }

    /// Whether the model stays loaded: neither its idle time nor another model that needs memory
    /// unloads it. Default: false.
    pub fn pinned(mut self, pinned: bool) -> Self {
        self.is_pinned = pinned;
        self
    }

    /// Whether the model is loaded by [`ModelSet::load_at_start`]. Default: false.
    pub fn at_start(mut self, at_start: bool) -> Self {
        self.at_start = at_start;
        self
    }

    /// The memory in bytes that the model counts for in [`ModelSetBuilder::memory`]. Default: that of
    /// its weights and of its KV cache, which is known for a model in files.
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = Some(bytes);
        self
    }
}

/// Settings of a [`ModelSet`]. Made with [`ModelSet::builder`].
#[derive(Clone, Debug, Default)]
pub struct ModelSetBuilder {
    recipes: Vec<ModelRecipe>,
    memory: Option<u64>,
    idle_timeout: Option<Duration>,
}

impl ModelSetBuilder {
    /// Adds a model. The first one is the default of programs that serve the set.
    pub fn model(mut self, recipe: ModelRecipe) -> Self {
        self.recipes.push(recipe);
        self
    }

    /// Maximum memory in bytes of all models together. Default: no limit.
    ///
    /// Models without [`EngineBuilder::kv_memory`] and [`EngineBuilder::num_blocks`] get KV caches of
    /// the same size: what the weights leave of the budget, divided by the number of these models, at
    /// most 8 GiB each. If that is too little for 4,096 tokens or the context of a model, fewer of
    /// them are loaded at the same time, and have more.
    ///
    /// A model that is to be loaded waits until others have left. The idle one that was used least
    /// recently leaves first. If none is idle, the one that was used least recently takes no new
    /// requests until those that it has are complete.
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = Some(bytes);
        self
    }

    /// Time without a request after which a model is unloaded, from the end of its last request on.
    /// Default: none is unloaded for being idle.
    pub fn idle_timeout(mut self, timeout: Duration) -> Self {
        self.idle_timeout = Some(timeout);
        self
    }

    /// Starts the set on the tokio runtime on which this is called, without loading a model.
    ///
    /// # Errors
    /// [`EngineError::InvalidParameter`] without a model, or if a name is empty, too long or given
    /// twice; [`EngineError::StartFailed`] without a runtime.
    pub fn build(self) -> Result<ModelSet, Error> {
        let mut names = HashSet::new();
        for ModelRecipe { name, .. } in &self.recipes {
            if !(1..=NAME_BYTES_MAX).contains(&name.len()) {
                let expected = format!("a name of 1 to {NAME_BYTES_MAX} bytes");
                return Err(Error::invalid("model", expected, format!("{} bytes", name.len())));
            }
            if !names.insert(name.clone()) {
                let got = format!("`{name}` twice");
                return Err(Error::invalid("model", "a different name for each model", got));
            }
        }
        if self.recipes.is_empty() {
            return Err(Error::invalid("model", "at least one model", "none"));
        }
        let runtime = Handle::try_current()
            .map_err(|error| EngineError::StartFailed { reason: error.to_string() })?;
        let slots = self.recipes.iter().map(|_| Slot::default()).collect();
        let shared = Arc::new(Shared {
            recipes: self.recipes,
            budget: self.memory,
            kv_share: OnceLock::new(),
            idle_timeout: self.idle_timeout,
            runtime,
            slots: Mutex::new(slots),
            changes: watch::Sender::new(()),
            making_room: tokio::sync::Mutex::default(),
        });
        shared.runtime.spawn(idle::unload_idle(Arc::downgrade(&shared)));
        Ok(ModelSet { shared })
    }
}
