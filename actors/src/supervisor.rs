//! The supervisor: starts the four actors and restarts all of them when one fails.
//!
//! A **generation** is one set of actors with its prefix tree and its block pool. The executor
//! thread and its backend outlive it. When any part fails, the whole generation ends:
//!
//! 1. it is unpublished, so that no request enters it;
//! 2. its actors are stopped; every stream sees its channel close and ends with an error;
//! 3. the executor thread finishes its step. Nothing waits for a backend that hangs; requests are
//!    refused until it returns;
//! 4. a new generation starts on the same thread and backend with an empty tree and an empty pool.
//!    What a failed part may have left in the cache is never read again.
//!
//! After failures in a row without a completed step, step 4 waits longer each time, and in the end
//! the engine gives up and stops ([`Restarts`]).

mod restarts;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use arc_swap::ArcSwapOption;
use futures::FutureExt;
use futures::future::Shared;
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, RpcReplyPort, SupervisionEvent};
use stolon_backend::{AdapterLoader, KvFormat};
use stolon_kvcache::TreeReader;
use stolon_scheduler::{EmptyCache, EngineContext, EngineError, EngineHealth};
use tokio::sync::oneshot;

use crate::admission::{AdmissionActor, AdmissionArguments, AdmissionMessage};
use crate::block_allocator::{AllocatorMessage, BlockAllocatorActor};
use crate::executor::{ExecutorActor, ExecutorThread};
use crate::fault::FaultPlan;
use crate::memory::ActorMemory;
use crate::prefix_tree::{PrefixTreeActor, TreeMessage};
use restarts::Restarts;

/// One set of actors, as callers see it.
#[derive(Debug)]
pub(crate) struct Generation {
    pub(crate) admission: ActorRef<AdmissionMessage>,
    pub(crate) tree: ActorRef<TreeMessage>,
    pub(crate) allocator: ActorRef<AllocatorMessage>,
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

/// The state that the supervisor and the callers share.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) context: EngineContext,
    /// The format in which the backend copies blocks; `None` if it cannot.
    pub(crate) kv_format: Option<KvFormat>,
    /// Reads adapters; `None` if the backend does not support them.
    pub(crate) adapters: Option<Arc<dyn AdapterLoader>>,
    pub(crate) faults: Arc<FaultPlan>,
    /// `None` during a restart and after shutdown.
    pub(crate) generation: ArcSwapOption<Generation>,
    /// Why there is no generation, while its backend hangs and after the engine has given up.
    pub(crate) down: ArcSwapOption<EngineError>,
    pub(crate) stopped: AtomicBool,
}

/// The messages of the supervisor.
pub(crate) enum SupervisorMessage {
    /// Stop everything, drop the backend, answer whether it was dropped.
    Shutdown(RpcReplyPort<bool>),
    /// The executor thread has finished the last step of a failed generation, and the pause before
    /// a restart has passed; false if the thread has ended.
    ExecutorFree(bool),
}

pub(crate) struct SupervisorActor {
    pub(crate) common: Arc<Common>,
}

pub(crate) struct SupervisorState {
    /// The current generation; `None` during a restart and once shut down.
    parts: Option<Parts>,
    /// `None` once shut down.
    executor: Option<ExecutorThread>,
    restarts: Restarts,
    common: Arc<Common>,
}

/// The state is dropped whenever the supervisor ends, also if its runtime is dropped under it.
impl Drop for SupervisorState {
    fn drop(&mut self) {
        self.common.stop();
    }
}

/// The parts of a generation that must be stopped, and its ends of channels, which are used when it
/// ends.
struct Parts {
    cells: Vec<ActorCell>,
    /// Tells the streams of the generation why it ended.
    end: oneshot::Sender<EngineError>,
    /// Yields when the executor thread has finished its last step.
    executor_free: oneshot::Receiver<()>,
}

impl Parts {
    fn contains(&self, cell: &ActorCell) -> bool {
        self.cells.iter().any(|part| part.get_id() == cell.get_id())
    }
}

impl Actor for SupervisorActor {
    type Msg = SupervisorMessage;
    type State = SupervisorState;
    type Arguments = ExecutorThread;

    async fn pre_start(
        &self,
        myself: ActorRef<SupervisorMessage>,
        executor: ExecutorThread,
    ) -> Result<SupervisorState, ActorProcessingErr> {
        let parts = Some(self.start(&myself, &executor).await?);
        let (executor, restarts) = (Some(executor), Restarts::default());
        Ok(SupervisorState { parts, executor, restarts, common: Arc::clone(&self.common) })
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
                let dropped = self.stop_and_drop(state).await;
                // Fails only if the caller has stopped.
                let _ = reply.send(dropped);
                myself.stop(None);
            }
            SupervisorMessage::ExecutorFree(alive) => match &state.executor {
                Some(executor) if alive => {
                    self.common.context.gauges.count_restart();
                    state.parts = Some(self.start(&myself, executor).await?);
                }
                _ => {
                    self.common.stop();
                    tracing::error!("the executor thread has ended; the engine has stopped");
                }
            },
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<SupervisorMessage>,
        event: SupervisionEvent,
        state: &mut SupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        let (cell, fault) = match event {
            SupervisionEvent::ActorFailed(cell, error) => {
                let known = error.downcast_ref::<EngineError>().cloned();
                (cell, known.unwrap_or_else(|| interrupted(&error)))
            }
            // No part stops by itself, so its task was canceled: the runtime is ending.
            SupervisionEvent::ActorTerminated(cell, _, _) => {
                if state.parts.take_if(|parts| parts.contains(&cell)).is_some() {
                    self.common.stop();
                }
                return Ok(());
            }
            _ => return Ok(()),
        };
        // Only the first failure of a generation counts, because the others follow from it.
        let Some(parts) = state.parts.take_if(|parts| parts.contains(&cell)) else { return Ok(()) };
        let pause = match state.restarts.after_failure(self.common.context.gauges.steps()) {
            Ok(pause) => pause,
            Err(failures) => {
                self.give_up(state, parts, failures, &fault).await;
                myself.stop(None);
                return Ok(());
            }
        };
        tracing::error!(%fault, ?pause, "part of the engine failed; restarting with an empty cache");
        if matches!(fault, EngineError::BackendHung { .. }) {
            self.common.down.store(Some(Arc::new(fault.clone())));
        }
        let executor_free = self.stop(parts, Some(fault)).await;
        // The current step may never end.
        tokio::spawn(async move {
            let alive = executor_free.await.is_ok();
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
            // Fails only if the supervisor has stopped.
            let _ = myself.cast(SupervisorMessage::ExecutorFree(alive));
        });
        Ok(())
    }

    async fn post_stop(
        &self,
        _: ActorRef<SupervisorMessage>,
        state: &mut SupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        self.common.stop();
        self.stop_and_drop(state).await;
        Ok(())
    }
}

impl SupervisorActor {
    /// Starts a generation and publishes it to callers.
    async fn start(
        &self,
        myself: &ActorRef<SupervisorMessage>,
        executor_thread: &ExecutorThread,
    ) -> Result<Parts, ActorProcessingErr> {
        let common = &self.common;
        let context = common.context.clone();
        let EmptyCache { writer, reader, allocator, fence } = context.empty_cache()?;
        let gauges = Arc::clone(&context.gauges);
        gauges.reset(context.spec.block_count);
        // The leases of sessions belong to the tree of the last generation.
        context.sessions.release_all();
        let faults = Arc::clone(&common.faults);
        let me = myself.get_cell();
        let tree = PrefixTreeActor {
            gauges: Arc::clone(&gauges),
            pin_budget: Arc::clone(&context.pin_budget),
            sink_of_pins: context.config.sink_of_pins().cloned(),
            faults: Arc::clone(&faults),
        };
        let (tree, _) = Actor::spawn_linked(None, tree, writer, me.clone()).await?;
        let actor = BlockAllocatorActor { tree: tree.clone(), gauges, faults: Arc::clone(&faults) };
        let (allocator, _) = Actor::spawn_linked(None, actor, allocator, me.clone()).await?;
        let (jobs, queue) = mpsc::channel();
        let executor = ExecutorActor { faults: Arc::clone(&faults) };
        let (executor, _) = Actor::spawn_linked(None, executor, jobs, me.clone()).await?;
        let executor_free = executor_thread.serve(queue, executor.clone());
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
        let generation = Generation { admission, tree, allocator, reader, end: ended.shared() };
        common.generation.store(Some(Arc::new(generation)));
        common.down.store(None);
        Ok(Parts { cells, end, executor_free })
    }

    /// Stops a generation because of `fault`, or because the engine stops. The receiver yields when
    /// the executor thread has finished its last step.
    async fn stop(&self, parts: Parts, fault: Option<EngineError>) -> oneshot::Receiver<()> {
        self.common.generation.store(None);
        let Parts { cells, end, executor_free } = parts;
        match fault {
            // Fails only if nothing refers to the generation any longer.
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
        executor_free
    }

    /// Stops the engine for good after `failures` failures in a row. `last` is the last of them.
    async fn give_up(
        &self,
        state: &mut SupervisorState,
        parts: Parts,
        failures: u32,
        last: &EngineError,
    ) {
        let error = EngineError::GaveUp { failures, last: last.to_string() };
        tracing::error!(%error, "the engine has stopped");
        self.common.down.store(Some(Arc::new(error.clone())));
        self.common.stop();
        self.stop(parts, Some(error)).await;
        self.stop_and_drop(state).await;
    }

    /// Stops the generation and waits until the executor thread has dropped the backend. Returns
    /// whether it has. A backend that hangs is dropped if it ever returns.
    async fn stop_and_drop(&self, state: &mut SupervisorState) -> bool {
        if let Some(parts) = state.parts.take() {
            self.stop(parts, None).await;
        }
        let Some(executor) = state.executor.take() else { return true };
        let dropped = executor.end();
        let Some(limit) = self.common.context.config.step_timeout else {
            drop(dropped.await);
            return true;
        };
        let is_dropped = tokio::time::timeout(limit, dropped).await.is_ok();
        if !is_dropped {
            let spec = &self.common.context.spec;
            tracing::warn!(
                ?limit,
                kv_bytes = spec.block_count as u64 * spec.block_bytes as u64,
                "the backend hangs: its thread, the model's weights and the KV pool are not released \
                 until it returns"
            );
        }
        is_dropped
    }
}

fn interrupted(error: &ActorProcessingErr) -> EngineError {
    EngineError::Interrupted { reason: error.to_string() }
}

impl Common {
    /// Marks the engine as stopped for good.
    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.generation.store(None);
        self.reset_gauges();
    }

    /// No block is reserved, cached or held by a session while there is no generation.
    fn reset_gauges(&self) {
        self.context.sessions.release_all();
        self.context.gauges.reset(self.context.spec.block_count);
    }

    /// The state of the engine, as health checks report it.
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
            let down = self.down.load_full();
            match (self.stopped.load(Ordering::Acquire), down.as_deref()) {
                (false, Some(down)) | (true, Some(down @ EngineError::GaveUp { .. })) => {
                    down.clone()
                }
                (true, _) => EngineError::Stopped,
                (false, None) => {
                    let reason = "it is restarting after a failure".to_owned();
                    EngineError::Interrupted { reason }
                }
            }
        })
    }
}
