//! The right to use a model, which keeps it from being unloaded.

use std::any::Any;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Shared;
use super::slot::Loaded;
use crate::Engine;

/// The engine of a model that stays loaded while this exists; made by
/// [`ModelSet::get`](crate::ModelSet::get).
///
/// A clone of the engine does not keep the model loaded. Requests of such a clone that are in flight
/// when the model is unloaded have a minute to complete.
#[derive(Debug)]
pub struct ModelLease {
    loaded: Loaded,
    held: Held,
}

/// A lease that counts.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) shared: Arc<Shared>,
    pub(super) index: usize,
    /// Whether the idle time of the model counts from the end of the lease.
    pub(super) is_use: bool,
}

impl Deref for ModelLease {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.loaded.engine
    }
}

impl ModelLease {
    pub(super) fn new(loaded: Loaded, held: Held) -> ModelLease {
        ModelLease { loaded, held }
    }

    /// The name of the model.
    pub fn name(&self) -> &str {
        &self.held.shared.recipes[self.held.index].name
    }

    /// Sets the time without a request after which the model is unloaded, until the next
    /// [`ModelSet::get`](crate::ModelSet::get) for it; `None` for no limit. Has no effect on a
    /// pinned model.
    pub fn keep_alive(&self, idle: Option<Duration>) {
        let Held { shared, index, .. } = &self.held;
        shared.slots()[*index].idle_limit = idle.filter(|_| !shared.recipes[*index].is_pinned);
        shared.changes.send_replace(());
    }

    /// A value that lives as long as the model is loaded, such as what a server has made for it:
    /// made by the first call, and dropped when the model is unloaded. `None` if an earlier call has
    /// made a value of another type.
    pub fn attached<T: Any + Send + Sync>(
        &self,
        make: impl FnOnce(&Engine) -> T,
    ) -> Option<Arc<T>> {
        let value = self.loaded.attached.get_or_init(|| Arc::new(make(self)));
        Arc::clone(value).downcast().ok()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut slots = self.shared.slots();
        let slot = &mut slots[self.index];
        slot.leases -= 1;
        if self.is_use {
            slot.last_use = Instant::now();
        }
        self.shared.leave_if_due(self.index, slot);
        drop(slots);
        self.shared.changes.send_replace(());
    }
}
