//! The supervisor: starts the four actors, and starts them anew when one of them fails.
//!
//! A **generation** is one set of actors with its tree, its pool and its thread. When any part
//! fails, the whole generation ends:
//!
//! 1. it is taken out of sight, so that no request enters it;
//! 2. its actors are stopped; every stream sees its channel close and ends with an error;
//! 3. the executor's thread finishes its step and hands the backend back;
//! 4. a new generation starts on that backend with an empty tree and an empty pool: what a
//!    failed part may have left in the cache is never read again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwapOption;
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, RpcReplyPort, SupervisionEvent};
use stolon_kvcache::{BlockPool, TreeBuilder, TreeReader};
use stolon_model::Backend;
use tokio::sync::oneshot;

use crate::admission::scheduler::Surroundings;
use crate::admission::{AdmissionActor, AdmissionArguments, AdmissionMessage};
use crate::block_allocator::BlockAllocatorActor;
use crate::error::CoreError;
use crate::executor::{ExecutorActor, ExecutorArguments};
use crate::fault::FaultPlan;
use crate::kept_rows::KeptRows;
use crate::memory::actors::ActorMemory;
use crate::prefix_tree::{PrefixTreeActor, TreeMessage};

/// One set of actors, as callers see it.
#[derive(Debug)]
pub(crate) struct Generation {
    pub(crate) admission: ActorRef<AdmissionMessage>,
    pub(crate) tree: ActorRef<TreeMessage>,
    pub(crate) reader: TreeReader,
    /// Why it ended.
    pub(crate) fault: OnceLock<String>,
}

/// What the supervisor and the callers share.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) around: Surroundings,
    pub(crate) faults: Arc<FaultPlan>,
    /// `None` while a new one is being started, and after the end.
    pub(crate) generation: ArcSwapOption<Generation>,
    pub(crate) stopped: AtomicBool,
}

/// What the supervisor is told.
#[derive(Debug)]
pub(crate) enum SupervisorMessage {
    /// Stop everything, give the backend up, answer.
    Shutdown(RpcReplyPort<()>),
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
        let SupervisorMessage::Shutdown(reply) = message;
        self.common.stopped.store(true, Ordering::Release);
        drop(self.stop(state.parts.take()).await);
        // Whoever asked may have gone.
        let _ = reply.send(());
        myself.stop(None);
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<SupervisorMessage>,
        event: SupervisionEvent,
        state: &mut SupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        let (cell, reason) = match event {
            SupervisionEvent::ActorFailed(cell, error) => (cell, error.to_string()),
            SupervisionEvent::ActorTerminated(cell, _, reason) => {
                (cell, reason.unwrap_or_else(|| "it stopped".to_owned()))
            }
            _ => return Ok(()),
        };
        let is_current = |parts: &Parts| parts.cells.iter().any(|c| c.get_id() == cell.get_id());
        if !state.parts.as_ref().is_some_and(is_current) {
            return Ok(());
        }
        tracing::error!(%reason, "a part of the engine failed; starting again with an empty cache");
        let parts = state.parts.take();
        if let Some(parts) = &parts {
            // Only the first reason is kept: the others follow from it.
            let _ = parts.generation.fault.set(reason);
        }
        let Some(backend) = self.stop(parts).await else {
            self.common.stopped.store(true, Ordering::Release);
            tracing::error!("the backend was lost; the engine has stopped");
            return Ok(());
        };
        self.common.around.gauges.restarts.add(1);
        state.parts = Some(self.start(&myself, backend).await?);
        Ok(())
    }

    async fn post_stop(
        &self,
        _: ActorRef<SupervisorMessage>,
        state: &mut SupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        self.common.stopped.store(true, Ordering::Release);
        drop(self.stop(state.parts.take()).await);
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
        let spec = &around.spec;
        let (writer, reader) = TreeBuilder::new(spec.block_size)
            .policy(around.config.eviction_policy)
            .pin_budget(around.config.pin_budget)
            .build()?;
        let (pool, fence) = BlockPool::new(spec.block_count);
        let rows = KeptRows::new(around.config.kept_logit_bytes);
        let gauges = Arc::clone(&around.gauges);
        gauges.running.set(0);
        gauges.preempted.set(0);
        gauges.blocks_free.set(spec.block_count);
        gauges.blocks_reserved.set(0);
        gauges.blocks_cached.set(0);
        gauges.blocks_evictable.set(0);
        let faults = Arc::clone(&common.faults);
        let me = myself.get_cell();
        let tree = PrefixTreeActor { gauges: Arc::clone(&gauges), faults: Arc::clone(&faults) };
        let (tree, _) = Actor::spawn_linked(None, tree, writer, me.clone()).await?;
        let allocator =
            BlockAllocatorActor { tree: tree.clone(), gauges, faults: Arc::clone(&faults) };
        let (allocator, _) = Actor::spawn_linked(None, allocator, (pool, rows), me.clone()).await?;
        let (hand_back, backend_back) = oneshot::channel();
        let executor = ExecutorActor { faults: Arc::clone(&faults) };
        let arguments = ExecutorArguments { backend, hand_back };
        let (executor, _) = Actor::spawn_linked(None, executor, arguments, me.clone()).await?;
        let arguments = AdmissionArguments {
            around: around.clone(),
            memory: ActorMemory { tree: tree.clone(), allocator: allocator.clone() },
            reader: reader.clone(),
            fence,
            executor: executor.clone(),
            faults,
        };
        let (admission, _) = Actor::spawn_linked(None, AdmissionActor, arguments, me).await?;
        let cells =
            vec![admission.get_cell(), executor.get_cell(), allocator.get_cell(), tree.get_cell()];
        let generation = Arc::new(Generation { admission, tree, reader, fault: OnceLock::new() });
        common.generation.store(Some(Arc::clone(&generation)));
        Ok(Parts { cells, generation, backend: backend_back })
    }

    /// Ends a generation; returns its backend, once the thread is done with it.
    async fn stop(&self, parts: Option<Parts>) -> Option<Box<dyn Backend>> {
        self.common.generation.store(None);
        let Parts { cells, generation, backend } = parts?;
        for cell in &cells {
            cell.stop(None);
        }
        for cell in &cells {
            // Without a time limit this cannot fail.
            let _ = cell.wait(None).await;
        }
        drop(generation);
        backend.await.ok()
    }
}

impl Common {
    /// The generation at work, or why there is none.
    pub(crate) fn current(&self) -> Result<Arc<Generation>, CoreError> {
        self.generation.load_full().ok_or_else(|| {
            if self.stopped.load(Ordering::Acquire) {
                CoreError::Stopped
            } else {
                CoreError::Interrupted { reason: "it is starting again after a failure".to_owned() }
            }
        })
    }
}
