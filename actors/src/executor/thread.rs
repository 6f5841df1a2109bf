//! The executor thread: executes one step after the other.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use ractor::ActorRef;
use stolon_backend::Backend;
use stolon_scheduler::{StepDone, StepPlan, execute};
use tokio::sync::oneshot;

use crate::admission::AdmissionMessage;
use crate::fault::{EnginePart, FaultPlan};

/// A step, and the actor that receives its result.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) plan: Box<StepPlan>,
    pub(crate) results: ActorRef<AdmissionMessage>,
}

/// Executes jobs until the channel is closed or a job panics. Returns the backend in both cases;
/// `died` is called with the message of a panic.
pub(crate) fn run(
    mut backend: Box<dyn Backend>,
    jobs: &Receiver<Job>,
    faults: &FaultPlan,
    return_backend: oneshot::Sender<Box<dyn Backend>>,
    died: impl FnOnce(String),
) {
    let mut panicked = None;
    while let Ok(Job { plan, results }) = jobs.recv() {
        // A panic may leave the backend's KV and this step's samplers in an inconsistent state.
        // Neither is used again: the engine restarts with an empty cache, and the sequences fail.
        let done =
            catch_unwind(AssertUnwindSafe(|| match faults.strike(EnginePart::ExecutorThread) {
                Ok(()) => execute(backend.as_mut(), *plan),
                Err(error) => StepDone { outcome: Err(error.to_string()), compute: Duration::ZERO },
            }));
        match done {
            // Fails only if the admission actor has stopped; then the result is not needed.
            Ok(done) => drop(results.cast(AdmissionMessage::StepDone(Box::new(done)))),
            Err(panic) => {
                panicked = Some(panic_text(panic.as_ref()));
                break;
            }
        }
    }
    // The backend is returned first, so that it is available to the supervisor when it learns of
    // the panic.
    drop(return_backend.send(backend));
    if let Some(reason) = panicked {
        died(reason);
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
}
