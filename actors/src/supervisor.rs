//! The supervisor: starts the four actors and restarts all of them when one fails.
//!
//! A **generation** is one set of actors with its prefix tree, its block pool and its executor
//! thread. When any part fails, the whole generation ends:
//!
//! 1. it is unpublished, so that no request enters it;
//! 2. its actors are stopped; every stream sees its channel close and ends with an error;
//! 3. the executor thread finishes its step and returns the backend. Nothing waits for a backend
//!    that hangs; requests are refused until it returns;
//! 4. a new generation starts on that backend with an empty tree and an empty pool. What a failed
//!    part may have left in the cache is never read again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwapOption;
use futures::FutureExt;
use futures::future::Shared;
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, RpcReplyPort, SupervisionEvent};
use stolon_backend::Backend;
use stolon_kvcache::TreeReader;
use stolon_scheduler::{AdmissionContext, EmptyCache, EngineError, EngineHealth};
use tokio::sync::oneshot;

use crate::admission::{AdmissionActor, AdmissionArguments, AdmissionMessage};
use crate::block_allocator::BlockAllocatorActor;
use crate::executor::{ExecutorActor, ExecutorArguments};
use crate::fault::FaultPlan;
use crate::memory::ActorMemory;
use crate::prefix_tree::{PrefixTreeActor, TreeMessage};

/// One set of actors, as callers see it.
#[derive(Debug)]
pub(crate) struct Generation {
    pub(crate) admission: ActorRef<AdmissionMessage>,
    pub(crate) tree: ActorRef<TreeMessage>,
    pub(crate) reader: TreeReader,
    /// Yields the reason for its end when the supervisor knows it.
    pub(crate) end: GenerationEnd,
}

/// Why a generation ended: the fault that the supervisor has learned of. An error of the channel
/// means that the supervisor has stopped: the engine was shut down, or its runtime was.
pub(crate) type GenerationEnd = Shared<oneshot::Receiver<EngineError>>;

/// The error of a request whose generation has ended.
pub(crate) fn end_error(end: Result<EngineError, oneshot::error::RecvError>) -> EngineError {
    end.unwrap_or(EngineError::Stopped)
}

/// What the supervisor and the callers share.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) context: AdmissionContext,
    pub(crate) faults: Arc<FaultPlan>,
    /// `None` during a restart and after shutdown.
    pub(crate) generation: ArcSwapOption<Generation>,
    /// Why there is no generation, while its backend hangs.
    pub(crate) down: ArcSwapOption<EngineError>,
    pub(crate) stopped: AtomicBool,
}

/// The messages of the supervisor.
pub(crate) enum SupervisorMessage {
    /// Stop everything, drop the backend, answer.
    Shutdown(RpcReplyPort<()>),
    /// The backend of a failed generation was returned, or is lost.
    Backend(Option<Box<dyn Backend>>),
}

/// The actor.
pub(crate) struct SupervisorActor {
    pub(crate) common: Arc<Common>,
}

/// The state of the supervisor.
pub(crate) struct SupervisorState {
    /// The current generation; `None` during a restart and once shut down.
    parts: Option<Parts>,
    common: Arc<Common>,
}

/// The state is dropped whenever the supervisor ends, also if its runtime is dropped under it.
impl Drop for SupervisorState {
    fn drop(&mut self) {
        self.common.stop();
    }
}

/// What must be stopped and returned when a generation ends.
struct Parts {
    cells: Vec<ActorCell>,
    /// Tells the streams of the generation why it ended.
    end: oneshot::Sender<EngineError>,
    backend: oneshot::Receiver<Box<dyn Backend>>,
}

impl Actor for SupervisorActor {
    type Msg = SupervisorMessage;
    type State = SupervisorState;
    type Arguments = Box<dyn Backend>;

    async fn pre_start(
        &self,
        myself: ActorRef<SupervisorMessage>,
        backend: Box<dyn Backend>,
    ) -> Result<SupervisorState, ActorProcessingErr> {
        let parts = Some(self.start(&myself, backend).await?);
        Ok(SupervisorState { parts, common: Arc::clone(&self.common) })
    }

    async fn handle(
        &self,
        myself: ActorRef<SupervisorMessage>,
        message: SupervisorMessage,
        state: &mut SupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            SupervisorMessage::Shutdown(reply) => {
                self.common.stop();
                self.stop_and_drop(state.parts.take()).await;
                // Fails only if the caller has stopped.
                let _ = reply.send(());
                myself.stop(None);
            }
            SupervisorMessage::Backend(Some(backend)) => {
                self.common.context.gauges.count_restart();
                state.parts = Some(self.start(&myself, backend).await?);
            }
            SupervisorMessage::Backend(None) => {
                self.common.stop();
                tracing::error!("the backend was lost; the engine has stopped");
            }
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<SupervisorMessage>,
        event: SupervisionEvent,
        state: &mut SupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        let interrupted = |reason: String| EngineError::Interrupted { reason };
        let (cell, fault) = match event {
            SupervisionEvent::ActorFailed(cell, error) => {
                let known = error.downcast_ref::<EngineError>().cloned();
                (cell, known.unwrap_or_else(|| interrupted(error.to_string())))
            }
            SupervisionEvent::ActorTerminated(cell, _, reason) => {
                (cell, interrupted(reason.unwrap_or_else(|| "it stopped".to_owned())))
            }
            _ => return Ok(()),
        };
        let is_current = |parts: &Parts| parts.cells.iter().any(|c| c.get_id() == cell.get_id());
        // Only the first failure of a generation counts, because the others follow from it.
        let Some(parts) = state.parts.take_if(|parts| is_current(parts)) else { return Ok(()) };
        tracing::error!(%fault, "part of the engine failed; restarting with an empty cache");
        if matches!(fault, EngineError::BackendHung { .. }) {
            self.common.down.store(Some(Arc::new(fault.clone())));
        }
        let backend = self.stop(parts, Some(fault)).await;
        // The thread returns the backend after its current step, which may never end.
        tokio::spawn(async move {
            // Fails only if the supervisor has stopped; the backend is then dropped.
            let _ = myself.cast(SupervisorMessage::Backend(backend.await.ok()));
        });
        Ok(())
    }

    async fn post_stop(
        &self,
        _: ActorRef<SupervisorMessage>,
        state: &mut SupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        self.common.stop();
        self.stop_and_drop(state.parts.take()).await;
        Ok(())
    }
}

impl SupervisorActor {
    /// Starts a generation and publishes it to callers.
    async fn start(
        &self,
        myself: &ActorRef<SupervisorMessage>,
        backend: Box<dyn Backend>,
    ) -> Result<Parts, ActorProcessingErr> {
        let common = &self.common;
        let context = common.context.clone();
        let EmptyCache { writer, reader, allocator, fence } = context.empty_cache()?;
        let gauges = Arc::clone(&context.gauges);
        gauges.reset(context.spec.block_count);
        let faults = Arc::clone(&common.faults);
        let me = myself.get_cell();
        let tree = PrefixTreeActor { gauges: Arc::clone(&gauges), faults: Arc::clone(&faults) };
        let (tree, _) = Actor::spawn_linked(None, tree, writer, me.clone()).await?;
        let actor = BlockAllocatorActor { tree: tree.clone(), gauges, faults: Arc::clone(&faults) };
        let (allocator, _) = Actor::spawn_linked(None, actor, allocator, me.clone()).await?;
        let (return_backend, returned) = oneshot::channel();
        let executor = ExecutorActor { faults: Arc::clone(&faults) };
        let arguments = ExecutorArguments { backend, return_backend };
        let (executor, _) = Actor::spawn_linked(None, executor, arguments, me.clone()).await?;
        let arguments = AdmissionArguments {
            context,
            memory: ActorMemory { tree: tree.clone(), allocator: allocator.clone() },
            reader: reader.clone(),
            fence,
            executor: executor.clone(),
            faults,
        };
        let (admission, _) = Actor::spawn_linked(None, AdmissionActor, arguments, me).await?;
        let cells =
            vec![admission.get_cell(), executor.get_cell(), allocator.get_cell(), tree.get_cell()];
        let (end, ended) = oneshot::channel();
        let generation = Generation { admission, tree, reader, end: ended.shared() };
        common.generation.store(Some(Arc::new(generation)));
        common.down.store(None);
        Ok(Parts { cells, end, backend: returned })
    }

    /// Stops a generation because of `fault`, or because the engine stops. The receiver yields its
    /// backend when the executor thread has returned it.
    async fn stop(
        &self,
        parts: Parts,
        fault: Option<EngineError>,
    ) -> oneshot::Receiver<Box<dyn Backend>> {
        self.common.generation.store(None);
        let Parts { cells, end, backend } = parts;
        match fault {
            // Fails only if nothing refers to the generation any more.
            Some(fault) => drop(end.send(fault)),
            None => drop(end),
        }
        for cell in &cells {
            cell.stop(None);
        }
        for cell in &cells {
            // Cannot fail without a time limit.
            let _ = cell.wait(None).await;
        }
        self.common.reset_gauges();
        backend
    }

    /// Stops a generation and drops its backend. A backend that hangs is dropped if it ever
    /// returns.
    async fn stop_and_drop(&self, parts: Option<Parts>) {
        self.common.generation.store(None);
        let Some(parts) = parts else { return };
        let backend = self.stop(parts, None).await;
        match self.common.context.config.step_timeout {
            Some(limit) => drop(tokio::time::timeout(limit, backend).await),
            None => drop(backend.await),
        }
    }
}

impl Common {
    /// Marks the engine as stopped for good.
    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.generation.store(None);
        self.reset_gauges();
    }

    /// No block is reserved or cached while there is no generation.
    fn reset_gauges(&self) {
        self.context.gauges.reset(self.context.spec.block_count);
    }

    /// What the engine is doing.
    pub(crate) fn health(&self) -> EngineHealth {
        if self.stopped.load(Ordering::Acquire) {
            EngineHealth::Stopped
        } else if self.down.load().is_some() {
            EngineHealth::Hung
        } else if self.context.gauges.is_closed() {
            EngineHealth::Draining
        } else if self.generation.load().is_none() {
            EngineHealth::Restarting
        } else {
            EngineHealth::Running
        }
    }

    /// The current generation, or why there is none.
    pub(crate) fn current(&self) -> Result<Arc<Generation>, EngineError> {
        self.generation.load_full().ok_or_else(|| {
            if self.stopped.load(Ordering::Acquire) {
                EngineError::Stopped
            } else if let Some(down) = self.down.load_full() {
                (*down).clone()
            } else {
                EngineError::Interrupted { reason: "it is restarting after a failure".to_owned() }
            }
        })
    }
}
