//! The supervisor: starts the four actors, and starts them anew when one of them fails.
//!
//! A **generation** is one set of actors with its tree, its pool and its thread. When any part
//! fails, the whole generation ends:
//!
//! 1. it is taken out of sight, so that no request enters it;
//! 2. its actors are stopped; every stream sees its channel close and ends with an error;
//! 3. the executor's thread finishes its step and hands the backend back; a backend that hangs is
//!    not waited for by anybody, and requests are refused until it comes back;
//! 4. a new generation starts on that backend with an empty tree and an empty pool: what a
//!    failed part may have left in the cache is never read again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwapOption;
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, RpcReplyPort, SupervisionEvent};
use stolon_kvcache::TreeReader;
use stolon_model::Backend;
use tokio::sync::oneshot;

use crate::admission::{AdmissionActor, AdmissionArguments, AdmissionMessage};
use crate::block_allocator::BlockAllocatorActor;
use crate::error::CoreError;
use crate::executor::{ExecutorActor, ExecutorArguments};
use crate::fault::FaultPlan;
use crate::memory::actors::ActorMemory;
use crate::prefix_tree::{PrefixTreeActor, TreeMessage};
use crate::surroundings::{EmptyCache, Surroundings};

/// One set of actors, as callers see it.
#[derive(Debug)]
pub(crate) struct Generation {
    pub(crate) admission: ActorRef<AdmissionMessage>,
    pub(crate) tree: ActorRef<TreeMessage>,
    pub(crate) reader: TreeReader,
    /// Why it ended.
    pub(crate) fault: Arc<OnceLock<CoreError>>,
}

/// What the supervisor and the callers share.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) around: Surroundings,
    pub(crate) faults: Arc<FaultPlan>,
    /// `None` while a new one is being started, and after the end.
    pub(crate) generation: ArcSwapOption<Generation>,
    /// Why there is no generation, while its backend has not come back.
    pub(crate) down: ArcSwapOption<CoreError>,
    pub(crate) stopped: AtomicBool,
}

/// What the supervisor is told.
pub(crate) enum SupervisorMessage {
    /// Stop everything, give the backend up, answer.
    Shutdown(RpcReplyPort<()>),
    /// The backend of a generation that has failed is back, or lost.
    Backend(Option<Box<dyn Backend>>),
}

/// The actor.
pub(crate) struct SupervisorActor {
    pub(crate) common: Arc<Common>,
}

/// The generation at work; `None` once shut down.
pub(crate) struct SupervisorState {
    parts: Option<Parts>,
}

/// What must be stopped and taken back when a generation ends.
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
                self.give_up(state.parts.take()).await;
                // Whoever asked may have gone.
                let _ = reply.send(());
                myself.stop(None);
            }
            SupervisorMessage::Backend(Some(backend)) => {
                self.common.around.gauges.restarts.add(1);
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
        let interrupted = |reason: String| CoreError::Interrupted { reason };
        let (cell, fault) = match event {
            SupervisionEvent::ActorFailed(cell, error) => {
                let known = error.downcast_ref::<CoreError>().cloned();
                (cell, known.unwrap_or_else(|| interrupted(error.to_string())))
            }
            SupervisionEvent::ActorTerminated(cell, _, reason) => {
                (cell, interrupted(reason.unwrap_or_else(|| "it stopped".to_owned())))
            }
            _ => return Ok(()),
        };
        let is_current = |parts: &Parts| parts.cells.iter().any(|c| c.get_id() == cell.get_id());
        let Some(parts) = state.parts.take_if(|parts| is_current(parts)) else { return Ok(()) };
        tracing::error!(%fault, "a part of the engine failed; starting again with an empty cache");
        // Only the first reason is kept: the others follow from it.
        let _ = parts.generation.fault.set(fault.clone());
        if matches!(fault, CoreError::BackendHung { .. }) {
            self.common.down.store(Some(Arc::new(fault)));
        }
        let backend = self.stop(parts).await;
        // It comes when its thread is done with its step, which may be never.
        tokio::spawn(async move {
            // A supervisor that is gone has no use for it.
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
        self.give_up(state.parts.take()).await;
        Ok(())
    }
}

impl SupervisorActor {
    /// Starts a generation and lets requests in.
    async fn start(
        &self,
        myself: &ActorRef<SupervisorMessage>,
        backend: Box<dyn Backend>,
    ) -> Result<Parts, ActorProcessingErr> {
        let common = &self.common;
        let around = common.around.clone();
        let EmptyCache { writer, reader, blocks, fence } = around.empty_cache()?;
        let gauges = Arc::clone(&around.gauges);
        gauges.running.set(0);
        gauges.preempted.set(0);
        gauges.blocks_free.set(around.spec.block_count);
        gauges.blocks_reserved.set(0);
        gauges.blocks_cached.set(0);
        gauges.blocks_evictable.set(0);
        let faults = Arc::clone(&common.faults);
        let me = myself.get_cell();
        let tree = PrefixTreeActor { gauges: Arc::clone(&gauges), faults: Arc::clone(&faults) };
        let (tree, _) = Actor::spawn_linked(None, tree, writer, me.clone()).await?;
        let allocator =
            BlockAllocatorActor { tree: tree.clone(), gauges, faults: Arc::clone(&faults) };
        let (allocator, _) = Actor::spawn_linked(None, allocator, blocks, me.clone()).await?;
        let (hand_back, backend_back) = oneshot::channel();
        let executor = ExecutorActor { faults: Arc::clone(&faults) };
        let arguments = ExecutorArguments { backend, hand_back };
        let (executor, _) = Actor::spawn_linked(None, executor, arguments, me.clone()).await?;
        let fault = Arc::new(OnceLock::new());
        let arguments = AdmissionArguments {
            around: around.clone(),
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
        Ok(Parts { cells, generation, backend: backend_back })
    }

    /// Ends a generation; returns where its backend comes when the thread is done with it.
    async fn stop(&self, parts: Parts) -> oneshot::Receiver<Box<dyn Backend>> {
        self.common.generation.store(None);
        let Parts { cells, backend, .. } = parts;
        for cell in &cells {
            cell.stop(None);
        }
        for cell in &cells {
            // Without a time limit this cannot fail.
            let _ = cell.wait(None).await;
        }
        backend
    }

    /// Ends a generation and drops its backend; one that hangs drops itself if it comes back.
    async fn give_up(&self, parts: Option<Parts>) {
        self.common.generation.store(None);
        let Some(parts) = parts else { return };
        let backend = self.stop(parts).await;
        match self.common.around.config.step_timeout {
            Some(limit) => drop(tokio::time::timeout(limit, backend).await),
            None => drop(backend.await),
        }
    }
}

impl Common {
    /// The generation at work, or why there is none.
    pub(crate) fn current(&self) -> Result<Arc<Generation>, CoreError> {
        self.generation.load_full().ok_or_else(|| {
            if self.stopped.load(Ordering::Acquire) {
                CoreError::Stopped
            } else if let Some(down) = self.down.load_full() {
                (*down).clone()
            } else {
                CoreError::Interrupted { reason: "it is starting again after a failure".to_owned() }
            }
        })
    }
}
