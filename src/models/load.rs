//! Loads and unloads a model, each in a task of its own.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;

use super::Shared;
use super::carried::Carried;
use super::slot::{Loaded, Phase, Slot};
use crate::builder::{KvPart, MemoryParts};
use crate::{Engine, EngineBuilder, EngineError, Error, ModelSetError};

/// Time that requests without a lease have to complete when their model is unloaded.
const DRAIN_LIMIT: Duration = Duration::from_secs(60);

impl Shared {
    /// Starts to load a model that sleeps.
    pub(super) fn begin_load(self: &Arc<Self>, index: usize, slot: &mut Slot) {
        slot.phase = Phase::Loading { since: Instant::now() };
        slot.loads += 1;
        slot.failure = None;
        let (shared, carried) = (Arc::clone(self), slot.carried.clone());
        self.runtime.spawn(async move {
            let loaded = AssertUnwindSafe(shared.load(index, carried)).catch_unwind().await;
            let loaded = loaded.unwrap_or_else(|_| {
                let reason = "the load has panicked".to_owned();
                let error = Box::new(EngineError::StartFailed { reason }.into());
                Err(ModelSetError::Load { name: shared.recipes[index].name.clone(), error })
            });
            let mut slots = shared.slots();
            let slot = &mut slots[index];
            match loaded {
                Ok(engine) => {
                    slot.info = Some(Arc::new(engine.model_info().clone()));
                    slot.carried = Carried::default();
                    slot.last_use = Instant::now();
                    let attached = Arc::default();
                    slot.phase = Phase::Loaded(Loaded { engine, attached, is_leaving: false });
                }
                Err(error) => {
                    tracing::warn!(%error, "a model was not loaded");
                    (slot.phase, slot.bytes) = (Phase::Sleeping, 0);
                    slot.failure = Some((slot.loads, error));
                }
            }
            drop(slots);
            shared.changes.send_replace(());
        });
    }

    /// Makes room for a model and starts its engine with what an earlier one has left behind.
    async fn load(
        self: &Arc<Self>,
        index: usize,
        carried: Carried,
    ) -> Result<Engine, ModelSetError> {
        let recipe = &self.recipes[index];
        let failed = |error| {
            let (name, error) = (recipe.name.clone(), Box::new(error));
            ModelSetError::Load { name, error }
        };
        let builder = (*recipe.builder)().map_err(failed)?;
        let mut builder = match self.budget {
            None => builder,
            Some(budget) => {
                let shared = Arc::clone(self);
                let measure = move || shared.measure(index, builder, budget);
                let measured = self.runtime.spawn_blocking(measure).await;
                let measured = measured.map_err(|_| ModelSetError::Stopped)?;
                let (builder, needed) = measured.map_err(failed)?;
                self.make_room(index, needed, budget).await?;
                builder
            }
        };
        tracing::info!(model = recipe.name, "loading a model");
        let is_loaded = |slot: &Slot| matches!(slot.phase, Phase::Loaded(_));
        builder.yield_while_loading = self.slots().iter().any(is_loaded);
        let engine = carried.continued(builder).build().await.map_err(failed)?;
        carried.restore(&engine).await;
        Ok(engine)
    }

    /// The memory in bytes that a model counts for in the budget. If its builder has no size of the KV
    /// cache, it gets one. Reads files, and blocks meanwhile.
    fn measure(
        &self,
        index: usize,
        builder: EngineBuilder,
        budget: u64,
    ) -> Result<(EngineBuilder, u64), Error> {
        if let Some(declared) = self.recipes[index].memory {
            return Ok((builder, declared));
        }
        let MemoryParts { weights, kv } = builder.memory_parts()?;
        let (builder, kv) = match kv {
            KvPart::Known(bytes) => (builder, bytes),
            KvPart::Open { .. } => {
                let bytes = self.kv_share(budget);
                (builder.kv_memory(bytes), bytes)
            }
        };
        Ok((builder, weights.saturating_add(kv)))
    }

    /// Unloads a loaded model as soon as it has no leases, of which it gives no more.
    pub(super) fn leave(self: &Arc<Self>, index: usize, slot: &mut Slot) {
        if let Phase::Loaded(loaded) = &mut slot.phase {
            loaded.is_leaving = true;
        }
        self.leave_if_due(index, slot);
    }

    /// Unloads a model that is leaving and has no leases.
    pub(super) fn leave_if_due(self: &Arc<Self>, index: usize, slot: &mut Slot) {
        if let Phase::Loaded(Loaded { is_leaving: true, .. }) = slot.phase
            && slot.leases == 0
        {
            self.unload(index, slot, DRAIN_LIMIT);
        }
    }

    /// Unloads a model if it is loaded. Its requests have `limit` to complete.
    pub(super) fn unload(self: &Arc<Self>, index: usize, slot: &mut Slot, limit: Duration) {
        if !matches!(slot.phase, Phase::Loaded(_)) {
            return;
        }
        let Phase::Loaded(Loaded { engine, .. }) =
            std::mem::replace(&mut slot.phase, Phase::Unloading)
        else {
            return;
        };
        slot.carried = Carried::of(&engine);
        let shared = Arc::clone(self);
        self.runtime.spawn(async move {
            tracing::info!(model = shared.recipes[index].name, "unloading a model");
            engine.drain(limit).await;
            let carried = Carried::of(&engine);
            drop(engine);
            let mut slots = shared.slots();
            let slot = &mut slots[index];
            (slot.phase, slot.bytes, slot.carried) = (Phase::Sleeping, 0, carried);
            drop(slots);
            shared.changes.send_replace(());
        });
        self.changes.send_replace(());
    }
}
