//! The admission actor: receives requests and step results, and keeps the executor busy.
//!
//! Everything is decided by the [`Scheduler`]. The actor calls the prefix tree and the block
//! allocator, through [`ActorMemory`]; all other messages, in both directions, are casts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use stolon_kvcache::{StepFence, TreeReader};
use stolon_scheduler::{
    ActorStopped, AuditReport, EngineContext, EngineError, KvSource, QueuePermit, SaveRequest,
    Scheduler, Sequence, StepDone, StoredKv,
};

use crate::executor::ExecutorMessage;
use crate::fault::{EnginePart, FaultPlan};
use crate::memory::ActorMemory;
use crate::stored::look_up;

/// The messages of the admission actor.
#[derive(Debug)]
pub(crate) enum AdmissionMessage {
    /// A validated request.
    Submit(Box<Sequence>, QueuePermit),
    /// A validated prompt to compute while there is no request.
    SubmitBackground(Box<Sequence>),
    /// The stream of this request was dropped.
    Cancel(u64),
    /// A sequence can continue: its slow reader has caught up, or a token was sampled late.
    Resume,
    /// The result of a step.
    StepDone(Box<StepDone>),
    /// A deadline may have passed.
    Tick,
    /// Copy cached blocks out of the pool.
    Save(Box<SaveRequest>),
    /// The stored KV that was read for a waiting request, by its id, after a repeated look-up.
    StoredRead(u64, Option<StoredKv>),
    /// Empty the prefix cache.
    Flush(RpcReplyPort<()>),
    /// Verify the block accounting.
    Audit(RpcReplyPort<Result<AuditReport, String>>),
}

pub(crate) struct AdmissionActor;

/// The arguments with which the actor is started.
pub(crate) struct AdmissionArguments {
    pub(crate) context: EngineContext,
    pub(crate) memory: ActorMemory,
    pub(crate) reader: TreeReader,
    pub(crate) fence: StepFence,
    pub(crate) executor: ActorRef<ExecutorMessage>,
    pub(crate) faults: Arc<FaultPlan>,
}

pub(crate) struct AdmissionState {
    scheduler: Scheduler<ActorMemory>,
    executor: ActorRef<ExecutorMessage>,
    faults: Arc<FaultPlan>,
    /// Has stored KV of prompts, if there is a tier.
    source: Option<Arc<dyn KvSource>>,
    /// When the scheduled `Tick` arrives; `None` if none is scheduled.
    tick_at: Option<Instant>,
    /// Maximum duration of a step.
    step_timeout: Option<Duration>,
    /// When the step in flight is treated as hung.
    hung_at: Option<Instant>,
    /// Callers that wait for an audit. The next one answers all of them.
    audits: Vec<RpcReplyPort<Result<AuditReport, String>>>,
    /// While a step is in flight, no audit starts before this time.
    audit_after: Instant,
}

/// Pause after an audit while requests run, as a multiple of the audit's duration, so that callers
/// that audit all the time take at most a tenth of the scheduler's time.
const AUDIT_PAUSE: u32 = 9;

impl Actor for AdmissionActor {
    type Msg = AdmissionMessage;
    type State = AdmissionState;
    type Arguments = AdmissionArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<AdmissionMessage>,
        arguments: AdmissionArguments,
    ) -> Result<AdmissionState, ActorProcessingErr> {
        let AdmissionArguments { context, memory, reader, fence, executor, faults } = arguments;
        let step_timeout = context.config.step_timeout;
        let source = context.config.kv_source.clone();
        executor.cast(ExecutorMessage::Attach(myself.clone()))?;
        let mut scheduler = Scheduler::new(context, memory, reader, fence);
        // Fails only if the actor has stopped.
        scheduler.set_wake(Arc::new(move || drop(myself.cast(AdmissionMessage::Resume))));
        Ok(AdmissionState {
            scheduler,
            executor,
            faults,
            source,
            tick_at: None,
            step_timeout,
            hung_at: None,
            audits: Vec::new(),
            audit_after: Instant::now(),
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<AdmissionMessage>,
        message: AdmissionMessage,
        state: &mut AdmissionState,
    ) -> Result<(), ActorProcessingErr> {
        state.faults.trigger(EnginePart::Admission)?;
        let now = Instant::now();
        let scheduler = &mut state.scheduler;
        match message {
            AdmissionMessage::Submit(sequence, permit) => scheduler.submit(*sequence, permit),
            AdmissionMessage::SubmitBackground(sequence) => scheduler.submit_background(*sequence),
            AdmissionMessage::Cancel(id) => scheduler.cancel(id),
            AdmissionMessage::Resume => scheduler.resume(),
            AdmissionMessage::StepDone(done) => {
                state.hung_at = None;
                scheduler.complete(*done, now).await?;
            }
            AdmissionMessage::Save(request) => scheduler.save(*request).await?,
            AdmissionMessage::StoredRead(id, kv) => scheduler.stored_read(id, kv),
            AdmissionMessage::Tick => state.tick_at = None,
            AdmissionMessage::Flush(reply) => {
                scheduler.flush().await?;
                // Fails only if the caller has stopped.
                let _ = reply.send(());
            }
            AdmissionMessage::Audit(reply) => state.audits.push(reply),
        }
        state.check_backend(now)?;
        if let Some(plan) = state.scheduler.advance(now).await? {
            state.hung_at = state.step_timeout.and_then(|limit| now.checked_add(limit));
            state.executor.cast(ExecutorMessage::Step(Box::new(plan)))?;
        }
        if let Some(source) = &state.source {
            for lookup in state.scheduler.take_lookups() {
                look_up(Arc::clone(source), lookup, myself.clone());
            }
        }
        state.audit().await?;
        state.schedule_tick(&myself, now);
        Ok(())
    }

    async fn post_stop(
        &self,
        _: ActorRef<AdmissionMessage>,
        state: &mut AdmissionState,
    ) -> Result<(), ActorProcessingErr> {
        // The state of a stopped actor stays alive in the event that is sent to its supervisor, but
        // the streams should end now.
        state.scheduler.close();
        Ok(())
    }
}

impl AdmissionState {
    /// Runs an audit if one was requested, and answers all callers that wait for it. It runs after
    /// the next step was sent to the executor, so that the two overlap.
    async fn audit(&mut self) -> Result<(), ActorStopped> {
        let begun = Instant::now();
        if self.audits.is_empty() || (self.scheduler.has_step() && begun < self.audit_after) {
            return Ok(());
        }
        let report = self.scheduler.audit().await?;
        for reply in self.audits.drain(..) {
            // Fails only if the caller has stopped.
            let _ = reply.send(report.clone());
        }
        self.audit_after = Instant::now() + begun.elapsed() * AUDIT_PAUSE;
        Ok(())
    }

    /// Ends the generation if the step in flight has taken too long, without waiting for the
    /// backend.
    fn check_backend(&mut self, now: Instant) -> Result<(), EngineError> {
        let (Some(limit), Some(hung_at)) = (self.step_timeout, self.hung_at) else { return Ok(()) };
        if now < hung_at {
            return Ok(());
        }
        Err(EngineError::BackendHung { limit })
    }

    /// Schedules a tick for the next deadline.
    fn schedule_tick(&mut self, myself: &ActorRef<AdmissionMessage>, now: Instant) {
        let audit_at = (!self.audits.is_empty()).then_some(self.audit_after);
        let deadlines = [self.scheduler.next_deadline(), self.hung_at, audit_at];
        let next = deadlines.into_iter().flatten().min();
        let Some(deadline) = next else { return };
        if self.tick_at.is_some_and(|tick| tick <= deadline) {
            return;
        }
        self.tick_at = Some(deadline);
        let wait = deadline.saturating_duration_since(now) + Duration::from_millis(1);
        myself.send_after(wait, || AdmissionMessage::Tick);
    }
}
