//! The handle that callers hold. Its methods run in the caller's own task.
//!
//! Their futures are boxed. The code of an `async fn` is compiled in every crate that awaits it,
//! and so is the code of everything that it awaits; a boxed future is compiled once, in this crate.

mod cache;
mod storage;

use std::future::poll_fn;
use std::panic::catch_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use futures::FutureExt;
use futures::future::BoxFuture;
use ractor::{Actor, ActorRef, RpcReplyPort, SpawnErr};
use stolon_backend::{AdapterLoader, Backend, KvFormat};
use stolon_scheduler::{
    ActorStopped, AuditReport, EngineConfig, EngineContext, EngineError, EngineHealth,
    SequenceRequest,
};
use tokio::runtime::Handle;
use tokio::time::timeout;

use crate::admission::AdmissionMessage;
use crate::executor::{BackendTraits, ExecutorThread};
use crate::fault::FaultPlan;
#[cfg(feature = "testing")]
use crate::fault::{EnginePart, Fault};
use crate::memory::{PREFIX_TREE, call};
use crate::prefix_tree::TreeMessage;
use crate::stream::SequenceStream;
use crate::supervisor::{Common, Generation, SupervisorActor, SupervisorMessage, end_error};

/// A running engine that works on token ids. Clones share it. It stops when the last clone and the
/// last stream are dropped.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    shared: Arc<Shared>,
}

/// The state that the handle and the streams share. Dropping it stops the engine.
#[derive(Debug)]
pub(crate) struct Shared {
    common: Arc<Common>,
    supervisor: ActorRef<SupervisorMessage>,
    next_id: AtomicU64,
    /// The runtime that the actors run on.
    runtime: Handle,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.supervisor.stop(None);
    }
}

impl EngineHandle {
    /// Starts an engine on the current tokio runtime. The backend moves to a thread of its own.
    ///
    /// # Errors
    /// As [`EngineHandle::start_with`].
    pub fn start(
        backend: Box<dyn Backend + Send>,
        config: EngineConfig,
    ) -> BoxFuture<'static, Result<EngineHandle, EngineError>> {
        EngineHandle::start_with(move || Ok(backend as Box<dyn Backend>), config, None).boxed()
    }

    /// Starts an engine. `make` makes the backend on the executor thread, which also computes every
    /// step and drops the backend. The actors run on `runtime`, or on the current one.
    ///
    /// # Errors
    /// The error of `make`; [`EngineError::InvalidParameter`] for impossible settings or backend
    /// sizes; [`EngineError::StartFailed`] if `make` panics, without a runtime, or if it has no
    /// time driver.
    pub async fn start_with<E: From<EngineError> + Send + 'static>(
        make: impl FnOnce() -> Result<Box<dyn Backend>, E> + Send + 'static,
        config: EngineConfig,
        runtime: Option<Handle>,
    ) -> Result<EngineHandle, E> {
        let current = || {
            let expected = "expected to be called from a tokio runtime, got none";
            Handle::try_current().map_err(|_| start_failed(expected))
        };
        let runtime = runtime.map_or_else(current, Ok)?;
        require_timers(&runtime)?;
        config.validate()?;
        let faults = Arc::new(FaultPlan::default());
        let (executor, traits) = ExecutorThread::start(make, Arc::clone(&faults)).await?;
        let BackendTraits { spec, kv_format, adapters } = traits;
        let common = Arc::new(Common {
            context: EngineContext::new(config, spec)?,
            kv_format,
            adapters,
            faults,
            generation: ArcSwapOption::empty(),
            down: ArcSwapOption::empty(),
            stopped: false.into(),
        });
        Ok(start_actors(common, executor, runtime).await?)
    }

    /// The runtime that the actors run on.
    pub fn runtime(&self) -> &Handle {
        &self.shared.runtime
    }

    /// The state that outlives restarts of the engine: its settings, limits, sizes, sessions,
    /// policies and counters. All of it can be read without waiting.
    pub fn context(&self) -> &EngineContext {
        &self.shared.common.context
    }

    /// The format in which the backend copies blocks out of and into the KV pool; `None` if it
    /// cannot copy blocks.
    pub fn kv_format(&self) -> Option<&KvFormat> {
        self.common().kv_format.as_ref()
    }

    /// Reads adapters for the backend's model; `None` if it does not support them.
    pub fn adapters(&self) -> Option<&Arc<dyn AdapterLoader>> {
        self.common().adapters.as_ref()
    }

    /// Submits a request and returns its event stream, without waiting.
    ///
    /// # Errors
    /// Every way in which a request can be invalid, [`EngineError::Overloaded`] if the admission
    /// queue is full, [`EngineError::QuotaExceeded`], [`EngineError::Draining`],
    /// [`EngineError::Interrupted`], [`EngineError::BackendHung`] and [`EngineError::Stopped`].
    pub fn submit(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        self.send(request, 0, self.common().current()?)
    }

    /// Submits `count` requests for the same prompt. The prompt is computed once and counts once
    /// toward the limits of the admission queue. If the request has a seed, each of the `count`
    /// requests uses its predecessor's seed plus 1.
    ///
    /// # Errors
    /// [`EngineError::InvalidParameter`] if `count` is 0 or more than the admission queue can hold,
    /// and as [`EngineHandle::submit`]; then none of them is submitted.
    pub fn submit_choices(
        &self,
        request: SequenceRequest,
        count: usize,
    ) -> Result<Vec<SequenceStream>, EngineError> {
        let max = self.context().max_choices();
        if count == 0 || count > max {
            return Err(EngineError::invalid("choices", format!("from 1 to {max}"), count));
        }
        let generation = self.common().current()?;
        let choice = |index| self.send(request.clone(), index, Arc::clone(&generation));
        // If one is refused, the streams made so far are dropped, which cancels their requests.
        (0..count as u64).map(choice).collect()
    }

    /// Validates a request and sends it to the admission actor. All answers to one prompt after the
    /// first `choice`, 0, count as cached, because that one computes it.
    fn send(
        &self,
        request: SequenceRequest,
        choice: u64,
        generation: Arc<Generation>,
    ) -> Result<SequenceStream, EngineError> {
        let context = self.context();
        let shares = context.config.prefix_caching && !request.options.needs_whole_prompt();
        let matched = match shares {
            true if choice > 0 && !request.options.skip_writing_prefix_cache => {
                request.tokens.len()
            }
            true => generation.reader.query_resume(&request.namespace, &request.tokens).resume,
            false => 0,
        };
        // Ids only need to be unique, so relaxed ordering suffices.
        let id = self.shared.next_id.fetch_add(1, Ordering::Relaxed);
        let (sequence, permit, events) =
            context.submit(id, request, choice, matched, Instant::now())?;
        let message = AdmissionMessage::Submit(Box::new(sequence), permit);
        // If the generation has just ended, the sequence is dropped here, which closes the event
        // channel. The stream then yields the reason.
        let _ = generation.admission.cast(message);
        Ok(SequenceStream::new(id, events, &generation, Some(Arc::clone(&self.shared))))
    }

    /// Computes the prompt of a request for the cache, while no request waits or runs, in short
    /// steps. If a request comes, it ends after the step in flight. The stream has no tokens
    /// ([`EngineContext::submit_background`]) and does not keep the engine running. At most 16 such
    /// prompts wait; the one that has waited longest ends for another one.
    ///
    /// # Errors
    /// Every way in which a request can be invalid, also without a prefix cache;
    /// [`EngineError::Draining`], [`EngineError::Interrupted`], [`EngineError::BackendHung`] and
    /// [`EngineError::Stopped`].
    pub fn submit_background(
        &self,
        request: SequenceRequest,
    ) -> Result<SequenceStream, EngineError> {
        let generation = self.common().current()?;
        let id = self.shared.next_id.fetch_add(1, Ordering::Relaxed);
        let (sequence, events) = self.context().submit_background(id, request, Instant::now())?;
        // As for a request: if the generation has just ended, the stream yields the reason.
        let _ = generation.admission.cast(AdmissionMessage::SubmitBackground(Box::new(sequence)));
        Ok(SequenceStream::new(id, events, &generation, None))
    }

    fn common(&self) -> &Common {
        &self.shared.common
    }

    /// Whether the engine can answer requests now. Lock-free.
    pub fn health(&self) -> EngineHealth {
        self.shared.common.health()
    }

    /// Verifies the accounting of blocks, tree and leases.
    ///
    /// # Errors
    /// [`EngineError::Audit`] describes the first inconsistency; [`EngineError::Interrupted`],
    /// [`EngineError::Stopped`].
    pub fn audit(&self) -> BoxFuture<'_, Result<AuditReport, EngineError>> {
        async move {
        self.call_admission(AdmissionMessage::Audit).await?.map_err(EngineError::Audit)
    }.boxed()
    }

    /// Stops the engine. Running and waiting requests end with [`EngineError::Stopped`]. The
    /// backend is dropped before this returns, unless it hangs for longer than
    /// [`EngineConfig::step_timeout`]. Returns false in that case: the backend's thread and memory
    /// are released when it returns from its step, which may be never.
    pub fn shutdown(&self) -> BoxFuture<'_, bool> {
        async move {
            // Fails only if the engine has stopped already.
            let stopped =
                call(&self.shared.supervisor, SupervisorMessage::Shutdown, "the supervisor");
            stopped.await.unwrap_or(true)
        }
        .boxed()
    }

    /// Makes a part of the engine fail at its next message, for tests.
    #[cfg(feature = "testing")]
    pub fn inject(&self, part: EnginePart, fault: Fault) {
        self.shared.common.faults.arm(part, fault);
    }

    async fn call_admission<T: Send + 'static>(
        &self,
        message: impl FnOnce(RpcReplyPort<T>) -> AdmissionMessage,
    ) -> Result<T, EngineError> {
        let generation = self.common().current()?;
        let answer = call(&generation.admission, message, "the admission actor").await;
        self.or_end(answer, &generation).await
    }

    async fn call_tree<T: Send + 'static>(
        &self,
        message: impl FnOnce(RpcReplyPort<T>) -> TreeMessage,
    ) -> Result<T, EngineError> {
        let generation = self.common().current()?;
        let answer = call(&generation.tree, message, PREFIX_TREE).await;
        self.or_end(answer, &generation).await
    }

    /// The answer of an actor; if it has stopped, the reason for the end of its generation.
    async fn or_end<T>(
        &self,
        answer: Result<T, ActorStopped>,
        generation: &Generation,
    ) -> Result<T, EngineError> {
        match answer {
            Ok(answer) => Ok(answer),
            Err(ActorStopped(_)) => Err(end_error(generation.end.clone().await)),
        }
    }

    /// Waits until no request runs or waits, for at most `limit`. Returns whether that happened.
    ///
    /// May be called from any executor: the timer runs on the engine's runtime.
    pub fn idle(&self, limit: Duration) -> BoxFuture<'_, bool> {
        async move {
            let gauges = Arc::clone(&self.context().gauges);
            let idle = poll_fn(move |context| gauges.poll_idle(context));
            let wait = async move { timeout(limit, idle).await.is_ok() };
            // An error means that the runtime has ended, and with it every request.
            self.shared.runtime.spawn(wait).await.unwrap_or(true)
        }
        .boxed()
    }

    /// Refuses new requests with [`EngineError::Draining`] from now on, and waits until no request
    /// runs or waits, for at most `limit`. Returns whether all requests had ended before that. The
    /// engine keeps running.
    pub async fn finish_requests(&self, limit: Duration) -> bool {
        self.context().gauges.close();
        self.idle(limit).await
    }

    /// Does [`finish_requests`](EngineHandle::finish_requests), then stops the engine. Requests
    /// that had not ended end with [`EngineError::Stopped`].
    ///
    /// If the returned future is dropped, the engine keeps running and refusing new requests.
    pub async fn drain(&self, limit: Duration) -> bool {
        let idle = self.finish_requests(limit).await;
        self.shutdown().await;
        idle
    }
}

/// Fails on a runtime without a time driver: timeouts of requests and pins would never end. tokio
/// cannot be asked whether there is one, but a timer panics without it.
fn require_timers(runtime: &Handle) -> Result<(), EngineError> {
    let _context = runtime.enter();
    catch_unwind(|| drop(tokio::time::sleep(Duration::ZERO))).map_err(|_| {
        start_failed("expected a tokio runtime with a time driver (`enable_time`), got one without")
    })
}

/// Starts the supervisor, which starts the other actors.
fn start_actors(
    common: Arc<Common>,
    executor: ExecutorThread,
    runtime: Handle,
) -> BoxFuture<'static, Result<EngineHandle, EngineError>> {
    let on = runtime.clone();
    let start = async move {
        let supervisor = SupervisorActor { common: Arc::clone(&common) };
        let (supervisor, _) = Actor::spawn(None, supervisor, executor)
            .await
            .map_err(|error| start_error(error, "the supervisor"))?;
        let shared = Shared { common, supervisor, next_id: AtomicU64::new(0), runtime };
        Ok(EngineHandle { shared: Arc::new(shared) })
    };
    // The handle is made by the task, so that the actors stop if the caller does not wait any
    // longer.
    let started = on.spawn(start);
    async move { started.await.map_err(|_| start_failed("the tokio runtime has ended"))? }.boxed()
}

fn start_failed(reason: &str) -> EngineError {
    EngineError::StartFailed { reason: reason.to_owned() }
}

/// Why an actor could not be started.
fn start_error(error: SpawnErr, name: &str) -> EngineError {
    let reason = match error {
        SpawnErr::StartupFailed(error) => match error.downcast::<EngineError>() {
            Ok(error) => return *error,
            Err(error) => error.to_string(),
        },
        other => other.to_string(),
    };
    EngineError::StartFailed { reason: format!("{name}: {reason}") }
}
