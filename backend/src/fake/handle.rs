//! A test's hand on a fake backend: counts, recorded batches, faults, and a hold on steps.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::StepBatch;

/// What goes wrong in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FakeFault {
    /// The step returns an error; what it was to write is spoiled.
    Fail,
    /// The step panics; what it was to write is spoiled.
    Panic,
    /// The step takes this much longer.
    Stall(Duration),
}

/// Watches a backend and injects faults. Clones act on the same backend.
#[derive(Clone, Debug)]
pub struct FakeHandle {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Signalled at every change of `state`.
    changed: Condvar,
    record: bool,
}

#[derive(Debug, Default)]
struct State {
    /// Steps begun so far.
    begun: u64,
    /// Tokens of those steps.
    tokens: u64,
    /// Holds in force; a step waits at its start while there are any.
    holds: usize,
    /// By number of the step, counted from 1.
    faults: BTreeMap<u64, FakeFault>,
    batches: Vec<StepBatch>,
}

/// While it lives no step gets past its start. Dropping it lets them go on.
#[derive(Debug)]
pub struct StepHold {
    shared: Arc<Shared>,
}

impl FakeHandle {
    pub(super) fn new(record: bool) -> Self {
        let shared = Shared { state: Mutex::default(), changed: Condvar::new(), record };
        Self { shared: Arc::new(shared) }
    }

    /// Steps begun so far, whatever became of them; malformed batches do not count.
    #[must_use]
    pub fn step_count(&self) -> u64 {
        self.shared.lock().begun
    }

    /// Tokens computed so far, in all steps begun.
    #[must_use]
    pub fn token_count(&self) -> u64 {
        self.shared.lock().tokens
    }

    /// Lets the step with this number (counted from 1 over the backend's life) go wrong.
    pub fn inject(&self, step: u64, fault: FakeFault) {
        self.shared.lock().faults.insert(step, fault);
    }

    /// Lets the next step that begins go wrong.
    pub fn inject_next(&self, fault: FakeFault) {
        let mut state = self.shared.lock();
        let next = state.begun + 1;
        state.faults.insert(next, fault);
    }

    /// Stops steps at their start until the hold is dropped; the one in flight ends normally.
    #[must_use]
    pub fn hold(&self) -> StepHold {
        self.shared.lock().holds += 1;
        StepHold { shared: Arc::clone(&self.shared) }
    }

    /// Blocks the calling thread until `count` steps have begun, or the time is over; says which.
    #[must_use]
    pub fn wait_for_steps(&self, count: u64, time: Duration) -> bool {
        let state = self.shared.lock();
        let (state, _) = self
            .shared
            .changed
            .wait_timeout_while(state, time, |state| state.begun < count)
            .unwrap_or_else(PoisonError::into_inner);
        state.begun >= count
    }

    /// Takes the batches recorded since the last call, where recording was asked for.
    #[must_use]
    pub fn take_batches(&self) -> Vec<StepBatch> {
        std::mem::take(&mut self.shared.lock().batches)
    }

    /// Called at a step's start: counts it, waits while held, returns its fault.
    pub(super) fn enter(&self, batch: &StepBatch) -> Option<FakeFault> {
        let mut state = self.shared.lock();
        state.begun += 1;
        state.tokens += batch.tokens.len() as u64;
        if self.shared.record {
            state.batches.push(batch.clone());
        }
        let number = state.begun;
        self.shared.changed.notify_all();
        let mut state = self
            .shared
            .changed
            .wait_while(state, |state| state.holds > 0)
            .unwrap_or_else(PoisonError::into_inner);
        state.faults.remove(&number)
    }
}

impl Shared {
    /// A panic elsewhere leaves the counters usable, so poison is of no interest.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for StepHold {
    fn drop(&mut self) {
        self.shared.lock().holds -= 1;
        self.shared.changed.notify_all();
    }
}
