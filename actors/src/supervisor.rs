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

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwapOption;
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, RpcReplyPort, SupervisionEvent};
use stolon_backend::Backend;
use stolon_kvcache::TreeReader;
use stolon_scheduler::{AdmissionContext, EmptyCache, EngineError};
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
    /// Why it failed.
    pub(crate) fault: Arc<OnceLock<EngineError>>,
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

/// The state of the supervisor: the current generation, `None` once shut down.
pub(crate) struct SupervisorState {
    parts: Option<Parts>,
}

/// What must be stopped and returned when a generation ends.
struct Parts {
    cells: Vec<ActorCell>,
    generation: Arc<Generation>,
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
        Ok(SupervisorState { parts: Some(self.start(&myself, backend).await?) })
    }

    async fn handle(
        &self,
        myself: ActorRef<SupervisorMessage>,
        message: SupervisorMessage,
        state: &mut SupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            SupervisorMessage::Shutdown(reply) => {
                self.common.stopped.store(true, Ordering::Release);
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
                self.common.stopped.store(true, Ordering::Release);
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
        let Some(parts) = state.parts.take_if(|parts| is_current(parts)) else { return Ok(()) };
        tracing::error!(%fault, "part of the engine failed; restarting with an empty cache");
        // Only the first reason is kept, because the others follow from it.
        let _ = parts.generation.fault.set(fault.clone());
        if matches!(fault, EngineError::BackendHung { .. }) {
            self.common.down.store(Some(Arc::new(fault)));
        }
        let backend = self.stop(parts).await;
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
        self.common.stopped.store(true, Ordering::Release);
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
        let fault = Arc::new(OnceLock::new());
        let arguments = AdmissionArguments {
            context,
            memory: ActorMemory { tree: tree.clone(), allocator: allocator.clone() },
            reader: reader.clone(),
            fence,
            executor: executor.clone(),
            faults,
            fault: Arc::clone(&fault),
        };
        let (admission, _) = Actor::spawn_linked(None, AdmissionActor, arguments, me).await?;
        let cells =
            vec![admission.get_cell(), executor.get_cell(), allocator.get_cell(), tree.get_cell()];
        let generation = Arc::new(Generation { admission, tree, reader, fault });
        common.generation.store(Some(Arc::clone(&generation)));
        common.down.store(None);
        Ok(Parts { cells, generation, backend: returned })
    }

    /// Stops a generation. The receiver yields its backend when the executor thread has returned
    /// it.
    async fn stop(&self, parts: Parts) -> oneshot::Receiver<Box<dyn Backend>> {
        self.common.generation.store(None);
        let Parts { cells, backend, .. } = parts;
        for cell in &cells {
            cell.stop(None);
        }
        for cell in &cells {
            // Cannot fail without a time limit.
            let _ = cell.wait(None).await;
        }
        backend
    }

    /// Stops a generation and drops its backend. A backend that hangs is dropped if it ever
    /// returns.
    async fn stop_and_drop(&self, parts: Option<Parts>) {
        self.common.generation.store(None);
        let Some(parts) = parts else { return };
        let backend = self.stop(parts).await;
        match self.common.context.config.step_timeout {
            Some(limit) => drop(tokio::time::timeout(limit, backend).await),
            None => drop(backend.await),
        }
    }
}

impl Common {
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
