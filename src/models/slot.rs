//! The state of one model of a set.

use std::any::Any;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::carried::Carried;
use super::{ModelRecipe, ModelStatus};
use crate::{Engine, ModelInfo, ModelSetError};

/// The state of a model of a [`ModelSet`](crate::ModelSet).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelState {
    /// It is not in memory. The next request loads it.
    Sleeping,
    /// It is being loaded.
    Loading,
    /// It answers requests.
    Loaded,
    /// It writes its KV to its disk tier and stops, or will do so when its last request has ended.
    Unloading,
}

/// The state of a model, with what it owns in it.
#[derive(Debug)]
pub(super) enum Phase {
    Sleeping,
    Loading { since: Instant },
    Loaded(Loaded),
    Unloading,
}

/// A loaded model.
#[derive(Clone, Debug)]
pub(super) struct Loaded {
    pub(super) engine: Engine,
    /// What a program keeps with the engine: [`ModelLease::attached`](crate::ModelLease::attached).
    pub(super) attached: Arc<OnceLock<Arc<dyn Any + Send + Sync>>>,
    /// Whether it is unloaded as soon as it has no leases, and gives no more of them.
    pub(super) is_leaving: bool,
}

/// A model and its leases.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) phase: Phase,
    /// Number of leases, also of requests that wait for the load.
    pub(super) leases: usize,
    /// Number of loads so far, which is the number of the last one.
    pub(super) loads: u64,
    /// The number of the last load if it has failed, and why.
    pub(super) failure: Option<(u64, ModelSetError)>,
    /// When the last lease began or ended.
    pub(super) last_use: Instant,
    /// Time without a lease after which the model is unloaded; `None` for no limit.
    pub(super) idle_limit: Option<Duration>,
    /// The memory in bytes that counts toward the budget. 0 while the model sleeps, or waits for
    /// room.
    pub(super) bytes: u64,
    /// Whether the set was shut down.
    pub(super) is_closed: bool,
    pub(super) carried: Carried,
    /// The description of the last engine.
    pub(super) info: Option<Arc<ModelInfo>>,
}

impl Default for Slot {
    fn default() -> Slot {
        Slot {
            phase: Phase::Sleeping,
            leases: 0,
            loads: 0,
            failure: None,
            last_use: Instant::now(),
            idle_limit: None,
            bytes: 0,
            is_closed: false,
            carried: Carried::default(),
            info: None,
        }
    }
}

impl Slot {
    /// When the model is unloaded for being idle; `None` if it is not.
    pub(super) fn unloads_at(&self) -> Option<Instant> {
        match self.phase {
            Phase::Loaded(_) if self.leases == 0 => self.last_use.checked_add(self.idle_limit?),
            _ => None,
        }
    }

    pub(super) fn status(&self, recipe: &ModelRecipe, now: Instant) -> ModelStatus {
        let (state, loading_for, adapters) = match &self.phase {
            Phase::Sleeping => (ModelState::Sleeping, None, self.carried.adapter_names()),
            Phase::Unloading => (ModelState::Unloading, None, self.carried.adapter_names()),
            Phase::Loading { since } => {
                let loading_for = now.saturating_duration_since(*since);
                (ModelState::Loading, Some(loading_for), self.carried.adapter_names())
            }
            Phase::Loaded(Loaded { engine, is_leaving, .. }) => {
                let adapters = engine.adapters().into_iter().map(|adapter| adapter.name);
                let state = if *is_leaving { ModelState::Unloading } else { ModelState::Loaded };
                (state, None, adapters.collect())
            }
        };
        ModelStatus {
            name: recipe.name.clone(),
            state,
            is_pinned: recipe.is_pinned,
            loading_for,
            leases: self.leases,
            unloads_in: self.unloads_at().map(|at| at.saturating_duration_since(now)),
            memory: self.bytes,
            error: self.failure.as_ref().map(|(_, error)| error.clone()),
            info: self.info.clone(),
            adapters,
        }
    }
}
