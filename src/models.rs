//! Several models in one program: [`ModelSet`].
//!
//! A model of a set goes through these phases (`slot.rs`):
//!
//! 1. **Sleeping**: it takes no memory but what it has left behind (`carried.rs`).
//! 2. **Loading**: the first request for it has started a load. All requests that come meanwhile
//!    wait for the same one.
//! 3. **Loaded**: requests hold leases. A model that has to leave while it has leases gives no more
//!    of them: it is *leaving*.
//! 4. **Unloading**, once the last lease is dropped: the engine writes its KV to its disk tier and
//!    stops. Requests wait until it is over, and then load the model again.
//!
//! A model that is loaded while others are loaded leaves the processors to their steps: the threads
//! that load it have a low priority, except for the one that prepares its vocabulary.
//!
//! All phases are changed under one mutex, which is never held across an await. Whoever waits for a
//! change subscribes to `changes` before it looks.

mod builder;
mod carried;
mod error;
mod idle;
mod lease;
mod load;
mod room;
mod share;
mod slot;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::{EngineHealth, ModelInfo};

pub use builder::{ModelRecipe, ModelSetBuilder};
pub use error::ModelSetError;
pub use lease::ModelLease;
pub use slot::ModelState;

use lease::Held;
use slot::{Loaded, Phase, Slot};

/// Models by name, each with an engine of its own that is loaded when it is needed and can be
/// unloaded when it is idle. Clones share them.
///
/// A model that is unloaded leaves its KV in its disk tier, if it has one (`kv_cache_dir`), and its
/// sessions, adapters and history in memory. So it starts warm when it is loaded again, and its
/// answers are the same. Pins end when a model is unloaded; what they held is then kept like
/// everything else.
///
/// ```no_run
/// use std::time::Duration;
/// use stolon::{Engine, ModelRecipe, ModelSet, Request};
///
/// # async fn models() -> Result<(), Box<dyn std::error::Error>> {
/// let chat = || Ok(Engine::builder().model("Qwen/Qwen3-4B"));
/// let embed = || Ok(Engine::builder().model("sentence-transformers/all-MiniLM-L6-v2"));
/// let models = ModelSet::builder()
///     .model(ModelRecipe::new("chat", chat))
///     .model(ModelRecipe::new("embed", embed).pinned(true))
///     .memory(8 << 30)
///     .idle_timeout(Duration::from_secs(300))
///     .build()?;
/// let chat = models.get("chat").await?; // loads the model if it is not loaded
/// println!("{}", chat.complete(Request::text("A stolon is").max_tokens(32)).await?.text);
/// drop(chat); // from here on, the model may be unloaded
/// models.shutdown().await;
/// # Ok(())
/// # }
/// ```
///
/// The tasks of a set run on the tokio runtime on which it was built, and so do its engines, unless
/// their builders name another one. Dropping the last clone and the last lease stops the engines
/// without waiting.
#[derive(Clone, Debug)]
pub struct ModelSet {
    shared: Arc<Shared>,
}

/// What the clones and the leases of a set share.
#[derive(Debug)]
struct Shared {
    /// The models, in the order in which they were given.
    recipes: Vec<ModelRecipe>,
    /// Maximum memory in bytes of all models; `None` for no limit.
    budget: Option<u64>,
    /// The size in bytes of the KV cache of each model that does not set it, once all models have been
    /// described.
    kv_share: OnceLock<u64>,
    idle_timeout: Option<Duration>,
    runtime: Handle,
    /// The state of each model, in the order of `recipes`.
    slots: Mutex<Vec<Slot>>,
    /// Told of every change of a slot.
    changes: watch::Sender<()>,
    /// Held by the one load that makes room for its model.
    making_room: tokio::sync::Mutex<()>,
}

/// A model of a set, as of one moment.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ModelStatus {
    /// Its name.
    pub name: String,
    /// Whether it is loaded.
    pub state: ModelState,
    /// Whether it stays loaded.
    pub is_pinned: bool,
    /// Time since its load began; `None` unless it is loading.
    pub loading_for: Option<Duration>,
    /// Number of leases: of requests that use it or wait for it.
    pub leases: usize,
    /// Time after which it is unloaded if no request comes; `None` if it is not unloaded for being
    /// idle, or is not idle.
    pub unloads_in: Option<Duration>,
    /// The memory in bytes that it counts for while it is not sleeping; 0 without a budget.
    pub memory: u64,
    /// Why its last load has failed; `None` if none has, or if a later one has begun.
    pub error: Option<ModelSetError>,
    /// The description of its engine; `None` if it was not loaded yet.
    pub info: Option<Arc<ModelInfo>>,
    /// The names of its adapters, as far as it was loaded.
    pub adapters: Vec<String>,
}

impl ModelSet {
    /// Starts describing a set.
    pub fn builder() -> ModelSetBuilder {
        ModelSetBuilder::default()
    }

    /// The engine of a model, which is loaded if it is not, and is not unloaded before the lease is
    /// dropped. Keep the lease until the last stream has ended.
    ///
    /// If this future is dropped, a load that has begun continues.
    ///
    /// # Errors
    /// [`ModelSetError`]. A load that has failed is tried again by the next call.
    pub async fn get(&self, name: &str) -> Result<ModelLease, ModelSetError> {
        let index = self.shared.index(name)?;
        let mut changes = self.shared.changes.subscribe();
        let (held, number) = loop {
            if let Some(entered) = self.shared.enter(index)? {
                break entered;
            }
            // The sender is in `shared`.
            let _ = changes.changed().await;
        };
        loop {
            if let Some(engine) = self.shared.loaded(index, number)? {
                return Ok(ModelLease::new(engine, held));
            }
            let _ = changes.changed().await;
        }
    }

    /// As [`get`](Self::get), for a look at a model that is loaded: does not load it, and does not
    /// count as a use from which its idle time counts. `None` if the model is not loaded, or is to
    /// leave.
    ///
    /// # Errors
    /// [`ModelSetError::Unknown`].
    pub fn peek(&self, name: &str) -> Result<Option<ModelLease>, ModelSetError> {
        let index = self.shared.index(name)?;
        Ok(self.shared.peek(index))
    }

    /// Unloads a model, also a pinned one, as soon as it has no leases. Returns when its memory has
    /// been released. Does nothing if it is not loaded.
    ///
    /// # Errors
    /// [`ModelSetError::Unknown`].
    pub async fn unload(&self, name: &str) -> Result<(), ModelSetError> {
        let index = self.shared.index(name)?;
        let mut changes = self.shared.changes.subscribe();
        // The number of the load that ends here. If there is a later one, it has ended.
        let mut ends = None;
        loop {
            {
                let mut slots = self.shared.slots();
                let slot = &mut slots[index];
                let has_ended = ends.is_some_and(|number| slot.loads > number);
                if has_ended || matches!(slot.phase, Phase::Sleeping) {
                    return Ok(());
                }
                if let Phase::Loaded(_) = slot.phase {
                    ends = Some(slot.loads);
                    self.shared.leave(index, slot);
                }
            }
            let _ = changes.changed().await;
        }
    }

    /// Loads the models that have [`ModelRecipe::at_start`], one after another.
    ///
    /// # Errors
    /// That of the first model that cannot be loaded.
    pub async fn load_at_start(&self) -> Result<(), ModelSetError> {
        for recipe in self.shared.recipes.iter().filter(|recipe| recipe.at_start) {
            self.get(&recipe.name).await?;
        }
        Ok(())
    }

    /// Stops all engines, also those with requests, which end with
    /// [`EngineError::Stopped`](crate::EngineError::Stopped). KV is written to the disk tiers. No
    /// model is loaded afterward.
    pub async fn shutdown(&self) {
        let mut changes = self.shared.changes.subscribe();
        loop {
            {
                let mut slots = self.shared.slots();
                for (index, slot) in slots.iter_mut().enumerate() {
                    slot.is_closed = true;
                    self.shared.unload(index, slot, Duration::ZERO);
                }
                if slots.iter().all(|slot| matches!(slot.phase, Phase::Sleeping)) {
                    return;
                }
            }
            let _ = changes.changed().await;
        }
    }

    /// The names of the models, in the order in which they were given.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.shared.recipes.iter().map(|recipe| recipe.name.as_str())
    }

    /// All models, in the order in which they were given.
    pub fn list(&self) -> Vec<ModelStatus> {
        let (slots, now) = (self.shared.slots(), Instant::now());
        let models = self.shared.recipes.iter().zip(slots.iter());
        models.map(|(recipe, slot)| slot.status(recipe, now)).collect()
    }
}

impl Shared {
    fn slots(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn index(&self, name: &str) -> Result<usize, ModelSetError> {
        let found = self.recipes.iter().position(|recipe| recipe.name == name);
        found.ok_or_else(|| ModelSetError::Unknown {
            name: name.to_owned(),
            known: self.recipes.iter().map(|recipe| recipe.name.clone()).collect(),
        })
    }

    /// Begins a use of a model, and its load if it sleeps. Returns the lease, which counts from now
    /// on, and the number of the load that it waits for. `None` if the model has to be unloaded
    /// first.
    fn enter(self: &Arc<Self>, index: usize) -> Result<Option<(Held, u64)>, ModelSetError> {
        let mut slots = self.slots();
        let slot = &mut slots[index];
        if slot.is_closed {
            return Err(ModelSetError::Stopped);
        }
        match &slot.phase {
            Phase::Loaded(loaded) if loaded.is_leaving => return Ok(None),
            // Its backend has failed again and again. A new engine may do better.
            Phase::Loaded(loaded) if loaded.engine.health() == EngineHealth::Stopped => {
                self.leave(index, slot);
                return Ok(None);
            }
            Phase::Unloading => return Ok(None),
            Phase::Loaded(_) | Phase::Loading { .. } => {}
            Phase::Sleeping => self.begin_load(index, slot),
        }
        slot.idle_limit = self.idle_timeout.filter(|_| !self.recipes[index].is_pinned);
        Ok(Some((self.hold(index, slot, true), slot.loads)))
    }

    /// The engine of the load with this number; `None` while it is not loaded.
    fn loaded(&self, index: usize, number: u64) -> Result<Option<Loaded>, ModelSetError> {
        let slots = self.slots();
        let slot = &slots[index];
        if let Some((failed, error)) = &slot.failure
            && *failed >= number
        {
            return Err(error.clone());
        }
        match &slot.phase {
            Phase::Loaded(loaded) => Ok(Some(loaded.clone())),
            // Only a shutdown ends an engine that has leases.
            _ if slot.is_closed => Err(ModelSetError::Stopped),
            _ => Ok(None),
        }
    }

    fn peek(self: &Arc<Self>, index: usize) -> Option<ModelLease> {
        let mut slots = self.slots();
        let slot = &mut slots[index];
        let Phase::Loaded(loaded) = &slot.phase else { return None };
        let loaded = loaded.clone();
        let can_stay = !loaded.is_leaving && !slot.is_closed;
        can_stay.then(|| ModelLease::new(loaded, self.hold(index, slot, false)))
    }

    /// Takes a lease. With `is_use`, the idle time of the model counts from its end.
    fn hold(self: &Arc<Self>, index: usize, slot: &mut Slot, is_use: bool) -> Held {
        slot.leases += 1;
        if is_use {
            slot.last_use = Instant::now();
        }
        Held { shared: Arc::clone(self), index, is_use }
    }
}
