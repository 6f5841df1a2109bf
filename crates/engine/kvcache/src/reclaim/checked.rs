//! Guards and grace periods for the loom models. A grace period ends at the earliest moment that
//! the contract allows, as soon as the last guard that it waits for is dropped, and the deferred
//! function is called by the thread that dropped it.

use crate::sync::{Arc, Mutex, lock};

type Deferred = Box<dyn FnOnce() + Send>;

/// The guards of one tree. Clones share one state.
#[derive(Clone, Debug)]
pub(crate) struct Epochs {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    next_guard: usize,
    /// Ids of the guards that exist.
    guards: Vec<usize>,
    /// Deferred functions, each with the guards it waits for.
    waiting: Vec<(Vec<usize>, Deferred)>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (guards, waiting) = (self.guards.len(), self.waiting.len());
        f.debug_struct("State").field("guards", &guards).field("waiting", &waiting).finish()
    }
}

impl Epochs {
    pub(crate) fn new() -> Epochs {
        Epochs { state: Arc::new(Mutex::new(State::default())) }
    }

    pub(crate) fn pin(&self) -> Guard {
        let mut state = lock(&self.state);
        let id = state.next_guard;
        state.next_guard += 1;
        state.guards.push(id);
        Guard { id, state: self.state.clone() }
    }

    pub(crate) fn defer(&self, guard: &Guard, function: impl FnOnce() + Send + 'static) {
        let mut state = lock(&self.state);
        // The writer does not read through its own guard, so the function does not have to wait for
        // it.
        let guards: Vec<usize> = state.guards.iter().copied().filter(|&g| g != guard.id).collect();
        if guards.is_empty() {
            drop(state);
            function();
        } else {
            state.waiting.push((guards, Box::new(function)));
        }
    }

    /// Does nothing: a grace period ends with its last guard.
    pub(crate) fn advance(&self, _guard: &Guard) {}
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
        let mut due: Vec<Deferred> = Vec::new();
        for (mut guards, function) in std::mem::take(&mut state.waiting) {
            guards.retain(|&guard| guard != id);
            if guards.is_empty() {
                due.push(function);
            } else {
                state.waiting.push((guards, function));
            }
        }
        // Called without the lock, which would order the following accesses after everything before
        // it.
        drop(state);
        due.into_iter().for_each(|function| function());
    }
}
