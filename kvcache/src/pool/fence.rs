//! The step fence: which steps of the executor have begun and which have ended. A block that came
//! back while a step was running may still be read or written by that step.

use crate::sync::{Arc, Mutex, lock};

/// Numbers the executor's steps. Cloned freely; all clones speak of the same steps.
#[derive(Clone, Debug)]
pub struct StepFence {
    steps: Arc<Mutex<Steps>>,
}

/// The numbers of steps start at 1.
#[derive(Debug, Default)]
struct Steps {
    begun: u64,
    /// Steps begun and not ended, in ascending order; one or two in practice.
    running: Vec<u64>,
}

impl StepFence {
    pub(crate) fn new() -> StepFence {
        StepFence { steps: Arc::new(Mutex::new(Steps::default())) }
    }

    /// Begins a step: from now on until the ticket is dropped, no block that comes back to the
    /// pool is handed out again. Call it before the step's blocks are looked up.
    pub fn begin(&self) -> StepTicket {
        let mut steps = lock(&self.steps);
        steps.begun += 1;
        let step = steps.begun;
        steps.running.push(step);
        StepTicket { step, steps: self.steps.clone() }
    }

    /// The last step begun.
    pub(crate) fn begun(&self) -> u64 {
        lock(&self.steps).begun
    }

    /// The last step such that it and all before it have ended.
    pub(crate) fn passed(&self) -> u64 {
        let steps = lock(&self.steps);
        #[cfg(loom)]
        if crate::sync::planted::is(crate::sync::planted::Bug::NoStepFence) {
            return steps.begun;
        }
        steps.running.first().map_or(steps.begun, |&oldest| oldest - 1)
    }
}

/// A running step. Move-only; dropping it, also while panicking, ends the step.
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
