//! [`FakeHandle`]: how a test observes and controls a fake backend from another thread. It reads
//! counters and recorded batches, injects faults, and blocks steps.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::{BackendError, StepBatch};

/// A fault to inject into a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FakeFault {
    /// The step returns an error, and the positions that it should have written are cleared.
    Fail,
    /// The step panics, and the positions that it should have written are cleared.
    Panic,
    /// The step takes longer by this duration.
    Stall(Duration),
}

/// Observes a fake backend and injects faults. Clones act on the same backend.
#[derive(Clone, Debug)]
pub struct FakeHandle {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Notified when `begun` or `holds` changes.
    changed: Condvar,
    record: bool,
}

#[derive(Debug, Default)]
struct State {
    /// Steps begun so far.
    begun: u64,
    /// Total number of tokens in those steps.
    tokens: u64,
    /// Number of live [`StepHold`]s. A step blocks at its start while there are any.
    holds: usize,
    /// Faults by the number of the step, which is counted from 1.
    faults: BTreeMap<u64, FakeFault>,
    batches: Vec<StepBatch>,
    /// Copies of blocks, in both directions.
    copies: Calls,
    /// Calls of the encoder of images.
    encodings: Calls,
}

/// Calls of one kind.
#[derive(Debug, Default)]
struct Calls {
    /// Number of calls so far.
    count: u64,
    /// Calls that are still to fail.
    failing: usize,
}

impl Calls {
    /// Counts a call. The error names it as `what` if it is to fail.
    fn enter(&mut self, what: &str) -> Result<(), BackendError> {
        self.count += 1;
        if self.failing == 0 {
            return Ok(());
        }
        self.failing -= 1;
        Err(BackendError::Failed(format!("an error of {what} was injected")))
    }
}

/// Blocks every step at its start until it is dropped.
#[derive(Debug)]
pub struct StepHold {
    shared: Arc<Shared>,
}

impl FakeHandle {
    pub(super) fn new(record: bool) -> Self {
        let shared = Shared { state: Mutex::default(), changed: Condvar::new(), record };
        Self { shared: Arc::new(shared) }
    }

    /// Number of steps begun so far, including those that failed afterward. Malformed batches are
    /// not counted.
    #[must_use]
    pub fn step_count(&self) -> u64 {
        self.shared.lock().begun
    }

    /// Total number of tokens in all steps begun so far.
    #[must_use]
    pub fn token_count(&self) -> u64 {
        self.shared.lock().tokens
    }

    /// Injects a fault into the step with this number, counted from 1 since the backend's creation.
    pub fn inject(&self, step: u64, fault: FakeFault) {
        self.shared.lock().faults.insert(step, fault);
    }

    /// Injects a fault into the next step that begins.
    pub fn inject_next(&self, fault: FakeFault) {
        let mut state = self.shared.lock();
        let next = state.begun + 1;
        state.faults.insert(next, fault);
    }

    /// Blocks steps at their start until the returned hold is dropped. A step that is running
    /// already finishes normally.
    #[must_use]
    pub fn hold(&self) -> StepHold {
        self.shared.lock().holds += 1;
        StepHold { shared: Arc::clone(&self.shared) }
    }

    /// Blocks the calling thread until `count` steps have begun or `timeout` has elapsed. Returns
    /// whether `count` steps have begun.
    #[must_use]
    pub fn wait_for_steps(&self, count: u64, timeout: Duration) -> bool {
        let state = self.shared.lock();
        let (state, _) = self
            .shared
            .changed
            .wait_timeout_while(state, timeout, |state| state.begun < count)
            .unwrap_or_else(PoisonError::into_inner);
        state.begun >= count
    }

    /// Returns the batches recorded since the last call. Always empty unless
    /// [`FakeOptions::record`](super::FakeOptions::record) is set.
    #[must_use]
    pub fn take_batches(&self) -> Vec<StepBatch> {
        std::mem::take(&mut self.shared.lock().batches)
    }

    /// Makes the next `count` calls that copy blocks fail.
    pub fn fail_copies(&self, count: usize) {
        self.shared.lock().copies.failing = count;
    }

    /// Called by the backend at the start of a copy of blocks.
    pub(super) fn enter_copy(&self) -> Result<(), BackendError> {
        self.shared.lock().copies.enter("a copy")
    }

    /// Number of calls of the encoder of images so far, including those that failed.
    #[must_use]
    pub fn encoding_count(&self) -> u64 {
        self.shared.lock().encodings.count
    }

    /// Makes the next `count` calls of the encoder of images fail.
    pub fn fail_encodings(&self, count: usize) {
        self.shared.lock().encodings.failing = count;
    }

    /// Called by the backend at the start of a call of the encoder.
    pub(super) fn enter_encoding(&self) -> Result<(), BackendError> {
        self.shared.lock().encodings.enter("the encoder")
    }

    /// Called by the backend at the start of a step: counts the step, waits while a hold exists,
    /// and returns the fault to inject.
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
    /// Ignores poisoning, because a panic while the lock is held leaves the counters consistent.
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
