//! The admission actor: receives requests and step results, and keeps the executor busy.
//!
//! A shell: what is decided is decided in [`scheduler`] and the files of pure functions beside
//! it. It calls the tree and the allocator, through [`ActorMemory`]; everything else, in both
//! directions, is a cast.

pub(crate) mod budget;
pub(crate) mod policy;
pub(crate) mod preempt;
pub(crate) mod queue;
pub(crate) mod schedule;
pub(crate) mod scheduler;
pub(crate) mod sequence;
pub(crate) mod sharing;

#[cfg(test)]
mod tests;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use stolon_kvcache::{StepFence, TreeReader};

use self::scheduler::Scheduler;
use self::sequence::Sequence;
use crate::door::Permit;
use crate::error::CoreError;
use crate::executor::ExecutorMessage;
use crate::executor::plan::StepDone;
use crate::fault::FaultPlan;
use crate::memory::CoreAudit;
use crate::memory::actors::ActorMemory;
use crate::surroundings::Surroundings;

/// Blocks that hold so many positions.
pub(crate) fn blocks_for(block_size: usize, positions: usize) -> usize {
    positions.div_ceil(block_size)
}

/// What the actor is told.
#[derive(Debug)]
pub(crate) enum AdmissionMessage {
    /// A request that came through the door.
    Submit(Box<Sequence>, Permit),
    /// A stream was dropped.
    Cancel(u64),
    /// A slow reader has caught up.
    Resume,
    /// The executor is done with a step.
    StepDone(Box<StepDone>),
    /// A deadline may have passed.
    Tick,
    /// Empty the cache.
    Flush(RpcReplyPort<()>),
    /// Check everything.
    Audit(RpcReplyPort<Result<CoreAudit, String>>),
}

/// The actor; its state is the scheduler.
pub(crate) struct AdmissionActor;

/// What it is started with.
pub(crate) struct AdmissionArguments {
    pub(crate) around: Surroundings,
    pub(crate) memory: ActorMemory,
    pub(crate) reader: TreeReader,
    pub(crate) fence: StepFence,
    pub(crate) executor: ActorRef<ExecutorMessage>,
    pub(crate) faults: Arc<FaultPlan>,
    /// Why the generation ended, for its streams.
    pub(crate) fault: Arc<OnceLock<CoreError>>,
}

/// The scheduler, and where its plans go.
pub(crate) struct AdmissionState {
    scheduler: Scheduler<ActorMemory>,
    executor: ActorRef<ExecutorMessage>,
    faults: Arc<FaultPlan>,
    /// The moment for which a tick is on its way.
    tick_at: Option<Instant>,
    /// Longest time a step may take.
    step_timeout: Option<Duration>,
    /// When the step in flight counts as hung.
    hung_at: Option<Instant>,
    fault: Arc<OnceLock<CoreError>>,
}

impl Actor for AdmissionActor {
    type Msg = AdmissionMessage;
    type State = AdmissionState;
    type Arguments = AdmissionArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<AdmissionMessage>,
        arguments: AdmissionArguments,
    ) -> Result<AdmissionState, ActorProcessingErr> {
        let AdmissionArguments { around, memory, reader, fence, executor, faults, fault } =
            arguments;
        let step_timeout = around.config.step_timeout;
        executor.cast(ExecutorMessage::Attach(myself))?;
        let scheduler = Scheduler::new(around, memory, reader, fence);
        Ok(AdmissionState {
            scheduler,
            executor,
            faults,
            tick_at: None,
            step_timeout,
            hung_at: None,
            fault,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<AdmissionMessage>,
        message: AdmissionMessage,
        state: &mut AdmissionState,
    ) -> Result<(), ActorProcessingErr> {
        state.faults.strike(crate::fault::Part::Admission)?;
        let now = Instant::now();
        let scheduler = &mut state.scheduler;
        match message {
            AdmissionMessage::Submit(sequence, permit) => scheduler.submit(*sequence, permit),
            AdmissionMessage::Cancel(id) => scheduler.cancel(id),
            AdmissionMessage::Resume => scheduler.resume(),
            AdmissionMessage::StepDone(done) => {
                state.hung_at = None;
                scheduler.complete(*done, now).await?;
            }
            AdmissionMessage::Tick => state.tick_at = None,
            AdmissionMessage::Flush(reply) => {
                scheduler.flush().await?;
                // Whoever asked may have gone.
                let _ = reply.send(());
            }
            AdmissionMessage::Audit(reply) => {
                let report = scheduler.audit().await?;
                // Whoever asked may have gone.
                let _ = reply.send(report);
            }
        }
        state.check_backend(now)?;
        if let Some(plan) = state.scheduler.advance(now).await? {
            state.hung_at = state.step_timeout.and_then(|limit| now.checked_add(limit));
            state.executor.cast(ExecutorMessage::Step(Box::new(plan)))?;
        }
        state.schedule_tick(&myself, now);
        Ok(())
    }

    async fn post_stop(
        &self,
        _: ActorRef<AdmissionMessage>,
        state: &mut AdmissionState,
    ) -> Result<(), ActorProcessingErr> {
        // A stopped actor's state lives on in the event that tells its supervisor; the streams
        // are to end now.
        state.scheduler.close();
        Ok(())
    }
}

impl AdmissionState {
    /// Ends the generation when the step in flight has taken too long: its streams then end, and
    /// whatever the backend still does is not waited for.
    fn check_backend(&mut self, now: Instant) -> Result<(), CoreError> {
        let (Some(limit), Some(hung_at)) = (self.step_timeout, self.hung_at) else { return Ok(()) };
        if now < hung_at {
            return Ok(());
        }
        let hung = CoreError::BackendHung { limit };
        // The reason stands before the streams see their channels close.
        let _ = self.fault.set(hung.clone());
        self.scheduler.close();
        Err(hung)
    }

    /// Sees to it that a tick comes when the next deadline passes.
    fn schedule_tick(&mut self, myself: &ActorRef<AdmissionMessage>, now: Instant) {
        let next = [self.scheduler.next_deadline(), self.hung_at].into_iter().flatten().min();
        let Some(deadline) = next else { return };
        if self.tick_at.is_some_and(|tick| tick <= deadline) {
            return;
        }
        self.tick_at = Some(deadline);
        let wait = deadline.saturating_duration_since(now) + Duration::from_millis(1);
        myself.send_after(wait, || AdmissionMessage::Tick);
    }
}
