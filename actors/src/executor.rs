//! The executor: an actor in front of the one thread that owns the backend.
//!
//! 1. The actor starts the thread and moves the backend to it.
//! 2. It forwards step plans from the admission actor to the thread, which executes them in order
//!    and sends each result directly to the admission actor.
//! 3. When the actor stops, its end of the channel is dropped. The thread finishes the current step
//!    and returns the backend.
//! 4. If the backend panics, the thread ends. The actor fails with the panic's message, and the
//!    supervisor restarts the engine with the returned backend.

mod thread;

use std::sync::Arc;
use std::sync::mpsc;

use ractor::{Actor, ActorProcessingErr, ActorRef};
use stolon_backend::Backend;
use stolon_scheduler::StepPlan;
use tokio::sync::oneshot;

use self::thread::Job;
use crate::admission::AdmissionMessage;
use crate::fault::{EnginePart, FaultPlan};

/// The messages of the executor's actor.
#[derive(Debug)]
pub(crate) enum ExecutorMessage {
    /// Where to send results. Sent once, before the first plan.
    Attach(ActorRef<AdmissionMessage>),
    /// A step to execute.
    Step(Box<StepPlan>),
    /// The thread has ended with a panic.
    Died(String),
}

/// The executor thread panicked.
#[derive(Debug, thiserror::Error)]
#[error("the executor's thread failed: {0}")]
pub(crate) struct ThreadFailed(String);

/// The actor.
pub(crate) struct ExecutorActor {
    pub(crate) faults: Arc<FaultPlan>,
}

/// What the actor is started with.
pub(crate) struct ExecutorArguments {
    pub(crate) backend: Box<dyn Backend>,
    /// Returns the backend when the thread ends.
    pub(crate) return_backend: oneshot::Sender<Box<dyn Backend>>,
}

/// The state of the actor.
pub(crate) struct ExecutorState {
    /// `None` once the actor has stopped. The thread then ends after its last job.
    jobs: Option<mpsc::Sender<Job>>,
    results: Option<ActorRef<AdmissionMessage>>,
}

impl Actor for ExecutorActor {
    type Msg = ExecutorMessage;
    type State = ExecutorState;
    type Arguments = ExecutorArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<ExecutorMessage>,
        arguments: ExecutorArguments,
    ) -> Result<ExecutorState, ActorProcessingErr> {
        let (jobs, queue) = mpsc::channel();
        let faults = Arc::clone(&self.faults);
        std::thread::Builder::new().name("stolon-executor".to_owned()).spawn(move || {
            thread::run(arguments.backend, &queue, &faults, arguments.return_backend, |died| {
                // Fails only if the actor has stopped; then nobody needs to know.
                let _ = myself.cast(ExecutorMessage::Died(died));
            });
        })?;
        Ok(ExecutorState { jobs: Some(jobs), results: None })
    }

    async fn handle(
        &self,
        _: ActorRef<ExecutorMessage>,
        message: ExecutorMessage,
        state: &mut ExecutorState,
    ) -> Result<(), ActorProcessingErr> {
        self.faults.strike(EnginePart::Executor)?;
        match message {
            ExecutorMessage::Attach(results) => state.results = Some(results),
            ExecutorMessage::Step(plan) => {
                let results = state.results.clone().ok_or("a plan came before Attach")?;
                let jobs = state.jobs.as_ref().ok_or("a plan came after the end")?;
                // Fails only if the thread has ended; its `Died` message is on the way.
                let _ = jobs.send(Job { plan, results });
            }
            ExecutorMessage::Died(reason) => return Err(Box::new(ThreadFailed(reason))),
        }
        Ok(())
    }

    async fn post_stop(
        &self,
        _: ActorRef<ExecutorMessage>,
        state: &mut ExecutorState,
    ) -> Result<(), ActorProcessingErr> {
        // The state of a stopped actor stays alive in the event that is sent to its supervisor, but
        // the thread should end now.
        state.jobs = None;
        Ok(())
    }
}
