//! The reclaimer of the loom models. It marks an item as freed at the earliest moment that the
//! contract of a reclaimer allows: as soon as every guard that existed when the item was retired
//! has been dropped. The memory itself is kept until the model ends, so that an access to a freed
//! item is reported by loom instead of being undefined behaviour.

use super::Retired;
use crate::sync::{Arc, Mutex, lock, planted};

/// A reclaimer that checks. Clones share one state.
#[derive(Clone, Debug)]
pub(crate) struct Reclaimer {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    next_guard: usize,
    /// Ids of the guards that exist.
    guards: Vec<usize>,
    /// Retired items that are not freed yet, each with the guards it waits for.
    waiting: Vec<(Vec<usize>, Box<dyn Retired>)>,
    /// Items that are marked as freed. Dropped when the model ends.
    freed: Vec<Box<dyn Retired>>,
    /// The largest length that `waiting` has had.
    waiting_max: usize,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (guards, waiting) = (self.guards.len(), self.waiting.len());
        f.debug_struct("State").field("guards", &guards).field("waiting", &waiting).finish()
    }
}

impl State {
    fn free(&mut self, item: Box<dyn Retired>) {
        item.mark_freed();
        self.freed.push(item);
    }
}

impl Reclaimer {
    pub(crate) fn new() -> Reclaimer {
        Reclaimer { state: Arc::new(Mutex::new(State::default())) }
    }

    pub(crate) fn pin(&self) -> Guard {
        let mut state = lock(&self.state);
        let id = state.next_guard;
        state.next_guard += 1;
        state.guards.push(id);
        Guard { id, state: self.state.clone() }
    }

    pub(super) fn retire_box(&self, guard: &Guard, item: Box<dyn Retired>) {
        let mut state = lock(&self.state);
        // The writer does not read through its own guard, so the item need not wait for it.
        let guards: Vec<usize> = state.guards.iter().copied().filter(|&g| g != guard.id).collect();
        if guards.is_empty() || planted::is(planted::Bug::EagerFree) {
            state.free(item);
        } else {
            state.waiting.push((guards, item));
            state.waiting_max = state.waiting_max.max(state.waiting.len());
        }
    }

    /// The number of retired items that wait for a guard now, and the largest number that ever
    /// waited at once.
    pub(crate) fn waiting(&self) -> (usize, usize) {
        let state = lock(&self.state);
        (state.waiting.len(), state.waiting_max)
    }
}

/// Keeps everything that is reachable while it lives from being freed.
#[derive(Debug)]
pub(crate) struct Guard {
    id: usize,
    state: Arc<Mutex<State>>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        let id = self.id;
        state.guards.retain(|&guard| guard != id);
        for (mut guards, item) in std::mem::take(&mut state.waiting) {
            guards.retain(|&guard| guard != id);
            if guards.is_empty() {
                state.free(item);
            } else {
                state.waiting.push((guards, item));
            }
        }
    }
}
