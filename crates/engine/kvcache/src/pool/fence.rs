//! The step fence tracks which steps of the executor have begun and which have ended. A block that
//! is returned while a step is running may still be read or written by that step.

use crate::sync::{Arc, Mutex, lock};

/// Tracks the executor's running steps, so that the pool does not reuse a block that a running step
/// may still access. A step is one forward pass of a batch, for example. Cheap to clone; all clones
/// belong to the same pool.
#[derive(Clone, Debug)]
pub struct StepFence {
    steps: Arc<Mutex<Steps>>,
}

/// Steps are numbered from 1.
#[derive(Debug, Default)]
struct Steps {
    /// Number of the last step that has begun.
    begun: u64,
    /// Steps that have begun and not ended, in ascending order; usually one or two.
    running: Vec<u64>,
}

impl StepFence {
    pub(crate) fn new() -> StepFence {
        StepFence { steps: Arc::new(Mutex::new(Steps::default())) }
    }

    /// Begins a step. Until the ticket is dropped, no block that is returned to the pool from now
    /// on is handed out again. Call this before the step's block tables are read.
    pub fn begin(&self) -> StepTicket {
        let mut steps = lock(&self.steps);
        steps.begun += 1;
        let step = steps.begun;
        steps.running.push(step);
        StepTicket { step, steps: self.steps.clone() }
    }

    /// Number of steps that have begun and not ended: of tickets that exist. A ticket that was
    /// forgotten ([`std::mem::forget`]) counts forever, and no block that is returned after it is
    /// handed out again.
    pub fn running(&self) -> usize {
        lock(&self.steps).running.len()
    }

    /// The number of the last step that has begun.
    pub(crate) fn begun(&self) -> u64 {
        lock(&self.steps).begun
    }

    /// The number of the last step for which it and all earlier steps have ended.
    pub(crate) fn passed(&self) -> u64 {
        let steps = lock(&self.steps);
        #[cfg(loom)]
        if crate::sync::planted::is(crate::sync::planted::Bug::NoStepFence) {
            return steps.begun;
        }
        steps.running.first().map_or(steps.begun, |&oldest| oldest - 1)
    }
}

/// A running step. Dropping the ticket ends the step, also during a panic. Steps may end in any
/// order and on any thread.
#[derive(Debug)]
pub struct StepTicket {
    step: u64,
    steps: Arc<Mutex<Steps>>,
}

impl Drop for StepTicket {
    fn drop(&mut self) {
        lock(&self.steps).running.retain(|&step| step != self.step);
    }
}
