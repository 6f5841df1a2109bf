//! The executor: an actor in front of the one thread that owns the backend.
//!
//! 1. The actor starts the thread and hands it the backend.
//! 2. Plans come from the admission actor, pass through, and are computed in order; the thread
//!    sends each result straight to the admission actor.
//! 3. When the actor goes away its end of the plans' channel goes with it: the thread finishes
//!    the step it is at and hands the backend back.
//! 4. A backend that panics ends the thread; the actor fails with the panic's words, and the
//!    supervisor starts anew with the backend handed back.

pub(crate) mod plan;
pub(crate) mod thread;

use std::sync::Arc;
use std::sync::mpsc;

use ractor::{Actor, ActorProcessingErr, ActorRef};
use stolon_model::Backend;
use tokio::sync::oneshot;

use self::plan::StepPlan;
use self::thread::Job;
use crate::admission::AdmissionMessage;
use crate::fault::{FaultPlan, Part};

/// What the actor is told.
#[derive(Debug)]
pub(crate) enum ExecutorMessage {
    /// Where results go; once, before the first plan.
    Attach(ActorRef<AdmissionMessage>),
    /// A step to compute.
    Step(Box<StepPlan>),
    /// The thread has ended with a panic.
    Died(String),
}

/// A failure of the executor's thread.
#[derive(Debug, thiserror::Error)]
#[error("the executor's thread failed: {0}")]
pub(crate) struct ThreadFailed(String);

/// The actor.
pub(crate) struct ExecutorActor {
    pub(crate) faults: Arc<FaultPlan>,
}

/// What it is started with.
pub(crate) struct ExecutorArguments {
    pub(crate) backend: Box<dyn Backend>,
    /// Where the backend goes when the thread ends.
    pub(crate) hand_back: oneshot::Sender<Box<dyn Backend>>,
}

/// The way to the thread.
pub(crate) struct ExecutorState {
    /// `None` once the actor has stopped: the thread ends with its last job.
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
            thread::run(arguments.backend, &queue, &faults, arguments.hand_back, |died| {
                // If the actor is gone already, so is everybody who would want to know.
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
        self.faults.strike(Part::Executor)?;
        match message {
            ExecutorMessage::Attach(results) => state.results = Some(results),
            ExecutorMessage::Step(plan) => {
                let results = state.results.clone().ok_or("a plan came before Attach")?;
                let jobs = state.jobs.as_ref().ok_or("a plan came after the end")?;
                // A thread that is gone has told why before it went; that message is on its way.
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
        // A stopped actor's state lives on in the event that tells its supervisor, so what has
        // to end now is ended here.
        state.jobs = None;
        Ok(())
    }
}
