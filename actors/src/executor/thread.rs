//! The executor thread: makes the backend, computes one step after the other, and drops it.
//!
//! One thread does all of that over the whole life of an engine, also across restarts, so that a
//! backend may hold values that belong to a thread, for example the context of a device. It does
//! not have to be `Send` if the thread creates it.
//!
//! 1. [`ExecutorThread::start`] starts the thread, which makes the backend.
//! 2. [`ExecutorThread::serve`] gives it the jobs of a generation of actors. The thread computes
//!    them until the generation's executor actor drops its end of the channel, or one panics.
//! 3. When the [`ExecutorThread`] is dropped, the thread finishes its step, drops the backend and
//!    ends. No task waits for that unless it asks to ([`ExecutorThread::end`]).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use ractor::ActorRef;
use stolon_backend::{AdapterLoader, Backend, BackendSpec, KvFormat};
use stolon_scheduler::{DraftDone, EngineError, StepDone, StepPlan, execute};
use tokio::sync::oneshot;

use super::ExecutorMessage;
use crate::admission::AdmissionMessage;
use crate::fault::{EnginePart, FaultPlan};

/// A step, and the actor that receives its result.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) plan: Box<StepPlan>,
    pub(crate) results: ActorRef<AdmissionMessage>,
}

/// The jobs of one generation of actors.
struct Generation {
    jobs: Receiver<Job>,
    /// Learns of a panic.
    executor: ActorRef<ExecutorMessage>,
    /// Yields when the last job of the generation has ended.
    free: oneshot::Sender<()>,
}

/// The thread, as its owner sees it.
#[derive(Debug)]
pub(crate) struct ExecutorThread {
    generations: Sender<Generation>,
    /// Closes when the thread has dropped the backend.
    ended: oneshot::Receiver<()>,
}

/// The properties of the backend that the engine needs. They are constant over the backend's
/// lifetime.
#[derive(Debug)]
pub(crate) struct BackendTraits {
    pub(crate) spec: BackendSpec,
    /// The format in which it copies blocks; `None` if it cannot.
    pub(crate) kv_format: Option<KvFormat>,
    /// Reads adapters; `None` if it does not support them.
    pub(crate) adapters: Option<Arc<dyn AdapterLoader>>,
}

impl BackendTraits {
    fn of(backend: &dyn Backend) -> BackendTraits {
        let (kv_format, adapters) = (backend.kv_format(), backend.adapters());
        BackendTraits { spec: backend.spec().clone(), kv_format, adapters }
    }
}

impl ExecutorThread {
    /// Starts the thread and waits until `make` has made the backend on it. If the returned future
    /// is dropped before that, the thread drops the backend and ends.
    ///
    /// # Errors
    /// The error of `make`; [`EngineError::StartFailed`] if it panics.
    pub(crate) async fn start<E: From<EngineError> + Send + 'static>(
        make: impl FnOnce() -> Result<Box<dyn Backend>, E> + Send + 'static,
        faults: Arc<FaultPlan>,
    ) -> Result<(ExecutorThread, BackendTraits), E> {
        let failed = |reason| E::from(EngineError::StartFailed { reason });
        let (generations, queue) = mpsc::channel();
        let (made, traits) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let life = move || {
            match catch_unwind(AssertUnwindSafe(make)) {
                Ok(Ok(backend)) => {
                    // Fails only if the caller has dropped the future.
                    if made.send(Ok(BackendTraits::of(backend.as_ref()))).is_ok() {
                        serve(backend, &queue, &faults);
                    }
                }
                Ok(Err(error)) => drop(made.send(Err(error))),
                Err(panic) => {
                    let reason = panic_text(panic.as_ref());
                    let reason =
                        format!("loading the model or making the backend panicked: {reason}");
                    drop(made.send(Err(failed(reason))));
                }
            }
            drop::<oneshot::Sender<()>>(end);
        };
        let thread = std::thread::Builder::new().name("stolon-executor".to_owned()).spawn(life);
        thread.map_err(|error| failed(format!("the executor thread: {error}")))?;
        let lost = |_| failed("the executor thread ended".to_owned());
        let traits = traits.await.map_err(lost)??;
        Ok((ExecutorThread { generations, ended }, traits))
    }

    /// Computes `jobs` from now on. `executor` learns of a panic, which ends the generation. The
    /// receiver yields when no job of it is computed any longer; it fails if the thread has ended.
    pub(crate) fn serve(
        &self,
        jobs: Receiver<Job>,
        executor: ActorRef<ExecutorMessage>,
    ) -> oneshot::Receiver<()> {
        let (free, is_free) = oneshot::channel();
        // Fails only if the thread has ended, which the receiver then reports.
        let _ = self.generations.send(Generation { jobs, executor, free });
        is_free
    }

    /// Ends the thread. The receiver fails, that is, completes, when the backend was dropped.
    pub(crate) fn end(self) -> oneshot::Receiver<()> {
        self.ended
    }
}

/// Serves one generation after the other, then drops the backend.
fn serve(mut backend: Box<dyn Backend>, generations: &Receiver<Generation>, faults: &FaultPlan) {
    while let Ok(Generation { jobs, executor, free }) = generations.recv() {
        let outcome = compute(backend.as_mut(), &jobs, faults);
        // Fails only if the supervisor has stopped.
        let _ = free.send(());
        if let Err(panicked) = outcome {
            // Fails only if the actor has stopped; then the message is not needed.
            let _ = executor.cast(ExecutorMessage::Panicked(panicked));
        }
    }
    if let Err(panic) = catch_unwind(AssertUnwindSafe(move || drop(backend))) {
        tracing::error!(reason = panic_text(panic.as_ref()), "dropping the backend panicked");
    }
}

/// Computes jobs until the channel is closed.
///
/// # Errors
/// The message of a job that panics.
fn compute(
    backend: &mut dyn Backend,
    jobs: &Receiver<Job>,
    faults: &FaultPlan,
) -> Result<(), String> {
    while let Ok(Job { plan, results }) = jobs.recv() {
        // A panic may leave the backend's KV and this step's samplers in an inconsistent state.
        // Neither is used again: the engine restarts with an empty cache, and the sequences fail.
        let done =
            catch_unwind(AssertUnwindSafe(|| match faults.trigger(EnginePart::ExecutorThread) {
                Ok(()) => execute(backend, *plan),
                Err(error) => StepDone {
                    draft: DraftDone::default(),
                    encoded: None,
                    encoding: Duration::ZERO,
                    saved: Vec::new(),
                    loaded: Vec::new(),
                    outcome: Err(error.to_string()),
                    compute: Duration::ZERO,
                },
            }));
        let done = done.map_err(|panic| panic_text(panic.as_ref()))?;
        // Fails only if the admission actor has stopped; then the result is not needed.
        let _ = results.cast(AdmissionMessage::StepDone(Box::new(done)));
    }
    Ok(())
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
}
