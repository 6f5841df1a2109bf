//! The executor: an actor in front of the one thread that owns the backend.
//!
//! 1. The supervisor starts the thread once, and an actor for each generation.
//! 2. The actor forwards step plans from the admission actor to the thread, which executes them in
//!    order and sends each result directly to the admission actor.
//! 3. When the actor stops, its end of the channel is dropped. The thread finishes the current step
//!    and waits for the next generation.
//! 4. If the backend panics, the actor fails with the panic's message, and the supervisor restarts
//!    the engine. The thread and the backend stay.

mod thread;

use std::sync::Arc;
use std::sync::mpsc;

use ractor::{Actor, ActorProcessingErr, ActorRef};
use stolon_scheduler::StepPlan;

pub(crate) use self::thread::{BackendTraits, ExecutorThread, Job};
use crate::admission::AdmissionMessage;
use crate::fault::{EnginePart, FaultPlan};

/// The messages of the executor's actor.
#[derive(Debug)]
pub(crate) enum ExecutorMessage {
    /// Where to send results. Sent once, before the first plan.
    Attach(ActorRef<AdmissionMessage>),
    /// A step to execute.
    Step(Box<StepPlan>),
    /// A step has panicked.
    Panicked(String),
}

/// A step panicked on the executor thread.
#[derive(Debug, thiserror::Error)]
#[error("the backend panicked: {0}")]
pub(crate) struct StepPanicked(String);

pub(crate) struct ExecutorActor {
    pub(crate) faults: Arc<FaultPlan>,
}

pub(crate) struct ExecutorState {
    /// To the thread. `None` once the actor has stopped.
    jobs: Option<mpsc::Sender<Job>>,
    results: Option<ActorRef<AdmissionMessage>>,
}

impl Actor for ExecutorActor {
    type Msg = ExecutorMessage;
    type State = ExecutorState;
    type Arguments = mpsc::Sender<Job>;

    async fn pre_start(
        &self,
        _: ActorRef<ExecutorMessage>,
        jobs: mpsc::Sender<Job>,
    ) -> Result<ExecutorState, ActorProcessingErr> {
        Ok(ExecutorState { jobs: Some(jobs), results: None })
    }

    async fn handle(
        &self,
        _: ActorRef<ExecutorMessage>,
        message: ExecutorMessage,
        state: &mut ExecutorState,
    ) -> Result<(), ActorProcessingErr> {
        self.faults.trigger(EnginePart::Executor)?;
        match message {
            ExecutorMessage::Attach(results) => state.results = Some(results),
            ExecutorMessage::Step(plan) => {
                let results = state.results.clone().ok_or("a plan came before Attach")?;
                let jobs = state.jobs.as_ref().ok_or("a plan came after the end")?;
                // Fails only after a panic; its message is on the way.
                let _ = jobs.send(Job { plan, results });
            }
            ExecutorMessage::Panicked(reason) => return Err(Box::new(StepPanicked(reason))),
        }
        Ok(())
    }

    async fn post_stop(
        &self,
        _: ActorRef<ExecutorMessage>,
        state: &mut ExecutorState,
    ) -> Result<(), ActorProcessingErr> {
        // The state of a stopped actor stays alive in the event that is sent to its supervisor, but
        // the thread should become free now.
        state.jobs = None;
        Ok(())
    }
}
