//! The handle that callers hold. Its methods run in the caller's own task.

use std::future::poll_fn;
use std::ops::Range;
use std::panic::catch_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use futures::FutureExt;
use ractor::{Actor, ActorRef, RpcReplyPort, SpawnErr};
use stolon_backend::{Backend, BackendSpec, KvFormat};
use stolon_kvcache::{CachedPrefix, EvictionPolicy, Namespace, PinId, TreeDump};
use stolon_scheduler::{
    ActorStopped, AdmissionPolicy, AuditReport, CacheStats, EngineConfig, EngineContext,
    EngineError, EngineHealth, EngineHistograms, EngineStats, PreparedRequest, PromptLimit,
    SaveRequest, SequenceRequest, SessionId, SessionInfo, SessionPrefix, Sessions, Submission,
};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::admission::AdmissionMessage;
use crate::block_allocator::AllocatorMessage;
use crate::cache::{CacheEvents, Pin, PinOptions, Removal};
use crate::executor::ExecutorThread;
use crate::fault::{EnginePart, Fault, FaultPlan};
use crate::memory::{BLOCK_ALLOCATOR, PREFIX_TREE, call};
use crate::prefix_tree::TreeMessage;
use crate::stream::SequenceStream;
use crate::supervisor::{Common, Generation, SupervisorActor, SupervisorMessage, end_error};

/// A running engine that works on token ids. Clones share it. It stops when the last clone and the
/// last stream are dropped.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    shared: Arc<Shared>,
}

/// What the handle and the streams share. Dropping it stops the engine.
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
    pub async fn start(
        backend: Box<dyn Backend + Send>,
        config: EngineConfig,
    ) -> Result<EngineHandle, EngineError> {
        EngineHandle::start_with(move || Ok(backend as Box<dyn Backend>), config, None).await
    }

    /// Starts an engine. `make` makes the backend on the executor thread, which also computes every
    /// step and drops the backend. The actors run on `runtime`, or on the current one.
    ///
    /// # Errors
    /// That of `make`; [`EngineError::InvalidParameter`] for impossible settings or backend sizes;
    /// [`EngineError::StartFailed`] if `make` panics, without a runtime, or if it has no time
    /// driver.
    pub async fn start_with<E: From<EngineError> + Send + 'static>(
        make: impl FnOnce() -> Result<Box<dyn Backend>, E> + Send + 'static,
        config: EngineConfig,
        runtime: Option<Handle>,
    ) -> Result<EngineHandle, E> {
        let failed = |reason: &str| EngineError::StartFailed { reason: reason.to_owned() };
        let current = || {
            let expected = "expected to be called from a tokio runtime, got none";
            Handle::try_current().map_err(|_| failed(expected))
        };
        let runtime = runtime.map_or_else(current, Ok)?;
        require_timers(&runtime)?;
        config.validate()?;
        let faults = Arc::new(FaultPlan::default());
        let (executor, spec, kv_format) = ExecutorThread::start(make, Arc::clone(&faults)).await?;
        let common = Arc::new(Common {
            context: EngineContext::new(config, spec)?,
            kv_format,
            faults,
            generation: ArcSwapOption::empty(),
            down: ArcSwapOption::empty(),
            stopped: false.into(),
        });
        // The handle is made by the task, so that the actors stop if the caller does not wait any
        // more.
        let start = start_actors(common, executor, runtime.clone());
        let started = runtime.spawn(start).await;
        Ok(started.map_err(|_| failed("the tokio runtime has ended"))??)
    }

    /// The runtime that the actors run on.
    pub fn runtime(&self) -> &Handle {
        &self.shared.runtime
    }

    /// The sizes of the backend.
    pub fn spec(&self) -> &BackendSpec {
        &self.shared.common.context.spec
    }

    /// The format in which the backend copies blocks out of and into the KV pool; `None` if it
    /// cannot copy blocks.
    pub fn kv_format(&self) -> Option<&KvFormat> {
        self.common().kv_format.as_ref()
    }

    /// The maximum length of a prompt.
    pub fn prompt_limit(&self) -> PromptLimit {
        self.shared.common.context.prompt_limit()
    }

    /// Validates the tokens of an embedding's input, as if nothing were pinned.
    ///
    /// # Errors
    /// `EmptyPrompt`, `PromptTooLong`, `TokenOutOfRange`.
    pub fn check_embedding(&self, tokens: &[u32]) -> Result<(), EngineError> {
        self.shared.common.context.check_embedding(tokens)
    }

    /// Submits a request and returns its event stream, without waiting.
    ///
    /// # Errors
    /// Every way in which a request can be invalid, [`EngineError::Overloaded`] if the admission
    /// queue is full, [`EngineError::Draining`], [`EngineError::Interrupted`] and
    /// [`EngineError::Stopped`].
    pub fn submit(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        let prepared = self.common().context.prepare(request)?;
        self.send(prepared, self.common().current()?, false)
    }

    /// Submits `count` requests for the same prompt. The prompt is computed once and counts once
    /// towards the limits of the admission queue. If the request has a seed, each of the `count`
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
        let context = &self.common().context;
        let max = context.max_choices();
        if count == 0 || count > max {
            return Err(EngineError::invalid("choices", format!("from 1 to {max}"), count));
        }
        let prepared = context.prepare(request)?;
        let generation = self.common().current()?;
        let choice = |index: usize| {
            self.send(prepared.choice(index as u64), Arc::clone(&generation), index > 0)
        };
        // If one is refused, the streams made so far are dropped, which cancels their requests.
        (0..count).map(choice).collect()
    }

    /// Sends a validated request to the admission actor. `repeats_prompt`: a request submitted just
    /// before computes the same prompt.
    fn send(
        &self,
        prepared: PreparedRequest,
        generation: Arc<Generation>,
        repeats_prompt: bool,
    ) -> Result<SequenceStream, EngineError> {
        let context = &self.common().context;
        let request = prepared.request();
        let shares = context.config.prefix_caching && !request.options.needs_whole_prompt();
        let matched = match shares {
            true if repeats_prompt => request.tokens.len(),
            true => generation.reader.query_match_len(&request.namespace, &request.tokens),
            false => 0,
        };
        // Ids only need to be unique, so relaxed ordering suffices.
        let id = self.shared.next_id.fetch_add(1, Ordering::Relaxed);
        let submission = context.submit(id, prepared, matched, Instant::now())?;
        let Submission { sequence, permit, events } = submission;
        let message = AdmissionMessage::Submit(Box::new(sequence), permit);
        // If the generation has just ended, the sequence is dropped here, which closes the event
        // channel. The stream then yields the reason.
        let _ = generation.admission.cast(message);
        Ok(SequenceStream::new(id, events, &generation, Arc::clone(&self.shared)))
    }

    fn common(&self) -> &Common {
        &self.shared.common
    }

    /// The number of leading tokens that are cached now. Lock-free and without side effects. The
    /// answer is a hint: it may change before a request runs.
    pub fn query_match_len(&self, namespace: &Namespace, tokens: &[u32]) -> usize {
        let generation = self.shared.common.generation.load();
        let query =
            |generation: &Arc<Generation>| generation.reader.query_match_len(namespace, tokens);
        generation.as_ref().map_or(0, query)
    }

    /// Whether the engine can answer requests now. Lock-free.
    pub fn health(&self) -> EngineHealth {
        self.shared.common.health()
    }

    /// Number of uncached tokens in the admission queue, and the time to compute them at the recent
    /// throughput; `None` before anything was computed. Lock-free.
    pub fn queue_estimate(&self) -> (usize, Option<Duration>) {
        self.shared.common.context.queue_estimate()
    }

    /// Whether a request with `uncached` uncached tokens would be refused now, because the
    /// admission queue is full. It may change before the request is submitted. Lock-free.
    pub fn queue_is_full(&self, uncached: usize) -> bool {
        self.common().context.queue_is_full(uncached)
    }

    /// The time to compute this many positions of a prompt at the recent speed, without waiting;
    /// `None` before a prompt was computed. Lock-free.
    pub fn prefill_time(&self, positions: usize) -> Option<Duration> {
        self.common().context.prefill_time(positions)
    }

    /// Counters and gauges, read without waiting.
    pub fn stats(&self) -> EngineStats {
        self.shared.common.context.stats()
    }

    /// Distributions of times and sizes, read without waiting.
    pub fn histograms(&self) -> EngineHistograms {
        self.shared.common.context.gauges.histograms()
    }

    /// The admission policy in use.
    pub fn policy(&self) -> AdmissionPolicy {
        **self.shared.common.context.policy.load()
    }

    /// Changes the admission policy, also for requests that are waiting already.
    pub fn set_policy(&self, policy: AdmissionPolicy) {
        self.shared.common.context.policy.store(Arc::new(policy));
    }

    /// The open sessions. Their turns are requests with [`SequenceRequest::turn`].
    pub fn sessions(&self) -> &Arc<Sessions> {
        &self.common().context.sessions
    }

    /// Opens a session `to` that continues where `from` is or, with `tokens`, from its first
    /// tokens.
    ///
    /// # Errors
    /// As [`Sessions::fork`].
    pub async fn fork_session(
        &self,
        from: &SessionId,
        to: SessionId,
        tokens: Option<usize>,
    ) -> Result<SessionInfo, EngineError> {
        let prefix = self.sessions().fork(from, to, tokens, Instant::now())?;
        self.hold(prefix).await
    }

    /// Takes a session back to its first `tokens` tokens.
    ///
    /// # Errors
    /// As [`Sessions::rewind`].
    pub async fn rewind_session(
        &self,
        id: &SessionId,
        tokens: usize,
    ) -> Result<SessionInfo, EngineError> {
        let prefix = self.sessions().rewind(id, tokens, Instant::now())?;
        self.hold(prefix).await
    }

    /// Lets a session hold what is cached of its tokens. While the engine restarts, that is
    /// nothing.
    async fn hold(&self, prefix: SessionPrefix) -> Result<SessionInfo, EngineError> {
        let (namespace, tokens) = (prefix.namespace, Arc::clone(&prefix.tokens));
        // The least priority, so that it does not change that of the prefix.
        let (limit, priority) = (tokens.len(), i32::MIN);
        let acquire = |reply| TreeMessage::Acquire { namespace, tokens, limit, priority, reply };
        if let Ok(acquired) = self.call_tree(acquire).await {
            self.sessions().hold(&prefix, acquired.lease);
        }
        Ok(self.sessions().info(&prefix.id, Instant::now())?)
    }

    /// Verifies the accounting of blocks, tree and leases.
    ///
    /// # Errors
    /// [`EngineError::Audit`] describes the first inconsistency; [`EngineError::Interrupted`],
    /// [`EngineError::Stopped`].
    pub async fn audit(&self) -> Result<AuditReport, EngineError> {
        self.call_admission(AdmissionMessage::Audit).await?.map_err(EngineError::Audit)
    }

    /// Protects the cached prefix of the tokens from eviction, for its time to live or until
    /// [`unpin`](EngineHandle::unpin). A flush or a restart ends all pins.
    ///
    /// # Errors
    /// [`EngineError::Pin`] if nothing of it is cached or [`EngineConfig::pin_budget`] would be
    /// exceeded, [`EngineError::PinBudgetInUse`], [`EngineError::Interrupted`],
    /// [`EngineError::Stopped`].
    pub async fn pin(
        &self,
        namespace: Namespace,
        tokens: Vec<u32>,
        options: PinOptions,
    ) -> Result<PinId, EngineError> {
        self.call_tree(|reply| TreeMessage::Pin { namespace, tokens, options, reply }).await?
    }

    /// Copies the cached ones of these blocks of a prompt out of the KV pool, from the first one
    /// on. Returns their bytes one after another, [`BackendSpec::block_bytes`] for each; `None` if
    /// nothing is cached or the copy failed. The blocks are not evicted before they are copied.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub async fn save_blocks(
        &self,
        namespace: Namespace,
        tokens: Arc<Vec<u32>>,
        blocks: Range<usize>,
    ) -> Result<Option<Vec<u8>>, EngineError> {
        let generation = self.common().current()?;
        let (sender, saved) = oneshot::channel();
        // Fails only if the caller does not wait for the copy any more.
        let done = Box::new(move |bytes| drop(sender.send(bytes)));
        let request = SaveRequest { namespace, tokens, blocks, done };
        // If the generation has just ended, the request is dropped here.
        let _ = generation.admission.cast(AdmissionMessage::Save(Box::new(request)));
        match saved.await {
            Ok(bytes) => Ok(Some(bytes)),
            Err(_) => match generation.end.clone().now_or_never() {
                Some(end) => Err(end_error(end)),
                None => Ok(None),
            },
        }
    }

    /// Removes part of the cache, except for what running requests use. Returns the number of
    /// blocks that were freed.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub async fn evict(&self, removal: Removal) -> Result<usize, EngineError> {
        let generation = self.shared.common.current()?;
        let namespace = match &removal {
            Removal::Namespace(namespace) => Some(*namespace),
            Removal::Prefix(..) => None,
        };
        let release = || {
            namespace.inspect(|namespace| self.sessions().release_namespace(namespace));
        };
        release();
        let remove = |reply| AllocatorMessage::Remove(removal, reply);
        let answer = call(&generation.allocator, remove, BLOCK_ALLOCATOR).await;
        // A turn that began in between has locked what is no longer in the tree.
        release();
        self.or_end(answer, &generation).await
    }

    /// The eviction policy in use; `None` for a custom order.
    pub fn eviction_policy(&self) -> Option<EvictionPolicy> {
        self.common().context.eviction_policy()
    }

    /// Changes the eviction policy, also for what is cached already. It replaces a custom order.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub fn set_eviction_policy(&self, policy: EvictionPolicy) -> Result<(), EngineError> {
        // A generation that starts from now on has the policy from its beginning.
        self.common().context.set_eviction_policy(policy);
        let generation = self.common().current()?;
        // Fails only if the generation has just ended.
        let _ = generation.tree.cast(TreeMessage::SetEvictionPolicy(policy));
        Ok(())
    }

    /// Ends a pin. Returns whether it existed.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub async fn unpin(&self, id: PinId) -> Result<bool, EngineError> {
        self.call_tree(|reply| TreeMessage::Unpin(id, reply)).await
    }

    /// All pins, oldest first.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub async fn pins(&self) -> Result<Vec<Pin>, EngineError> {
        self.call_tree(TreeMessage::Pins).await
    }

    /// The content of the cache, and every change from now on, in a queue of at most `capacity`
    /// events. The engine never waits for the reader.
    ///
    /// # Errors
    /// [`EngineError::InvalidParameter`] if `capacity` is 0, [`EngineError::Interrupted`],
    /// [`EngineError::Stopped`].
    pub async fn events(&self, capacity: usize) -> Result<CacheEvents, EngineError> {
        let events = self.call_tree(|reply| TreeMessage::Subscribe(capacity, reply)).await?;
        events.map_err(|_| EngineError::invalid("capacity", "at least 1 event", capacity))
    }

    /// Statistics of the prefix cache.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub async fn cache_stats(&self) -> Result<CacheStats, EngineError> {
        self.call_tree(TreeMessage::Stats).await
    }

    /// A copy of the tree's structure, made by a reader concurrently with changes.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub fn dump(&self) -> Result<TreeDump, EngineError> {
        Ok(self.shared.common.current()?.reader.dump())
    }

    /// The cached prefix that ends with the block of this chained hash, if there is one. Found by a
    /// reader concurrently with changes.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub fn cached_prefix(&self, hash: u64) -> Result<Option<CachedPrefix>, EngineError> {
        Ok(self.shared.common.current()?.reader.cached_prefix(hash))
    }

    /// Empties the cache, except for what running requests use, and ends all pins.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub async fn flush(&self) -> Result<(), EngineError> {
        self.call_admission(AdmissionMessage::Flush).await
    }

    /// Stops the engine. Running and waiting requests end with [`EngineError::Stopped`]. The
    /// backend is dropped before this returns, unless it hangs for longer than
    /// [`EngineConfig::step_timeout`].
    pub async fn shutdown(&self) {
        // Fails only if the engine has stopped already.
        let _ = call(&self.shared.supervisor, SupervisorMessage::Shutdown, "the supervisor").await;
    }

    /// Makes a part of the engine fail at its next message, for tests.
    #[doc(hidden)]
    pub fn inject(&self, part: EnginePart, fault: Fault) {
        self.shared.common.faults.arm(part, fault);
    }

    async fn call_admission<T: Send + 'static>(
        &self,
        message: impl FnOnce(RpcReplyPort<T>) -> AdmissionMessage,
    ) -> Result<T, EngineError> {
        let generation = self.shared.common.current()?;
        let answer = call(&generation.admission, message, "the admission actor").await;
        self.or_end(answer, &generation).await
    }

    async fn call_tree<T: Send + 'static>(
        &self,
        message: impl FnOnce(RpcReplyPort<T>) -> TreeMessage,
    ) -> Result<T, EngineError> {
        let generation = self.shared.common.current()?;
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
    pub async fn idle(&self, limit: Duration) -> bool {
        let gauges = Arc::clone(&self.common().context.gauges);
        let idle = poll_fn(move |context| gauges.poll_idle(context));
        let wait = async move { tokio::time::timeout(limit, idle).await.is_ok() };
        // An error means that the runtime has ended, and with it every request.
        self.shared.runtime.spawn(wait).await.unwrap_or(true)
    }

    /// Refuses new requests with [`EngineError::Draining`] from now on, and waits until no request
    /// runs or waits, for at most `limit`. Returns whether all requests had ended before that. The
    /// engine keeps running.
    pub async fn finish_requests(&self, limit: Duration) -> bool {
        self.common().context.gauges.close();
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
/// has no way to ask for it, but a timer panics without one.
fn require_timers(runtime: &Handle) -> Result<(), EngineError> {
    let _context = runtime.enter();
    catch_unwind(|| drop(tokio::time::sleep(Duration::ZERO))).map_err(|_| {
        let expected =
            "expected a tokio runtime with a time driver (`enable_time`), got one without";
        EngineError::StartFailed { reason: expected.to_owned() }
    })
}

/// Starts the supervisor, which starts the other actors.
async fn start_actors(
    common: Arc<Common>,
    executor: ExecutorThread,
    runtime: Handle,
) -> Result<EngineHandle, EngineError> {
    let supervisor = SupervisorActor { common: Arc::clone(&common) };
    let (supervisor, _) = Actor::spawn(None, supervisor, executor)
        .await
        .map_err(|error| start_error(error, "the supervisor"))?;
    let shared = Shared { common, supervisor, next_id: AtomicU64::new(0), runtime };
    Ok(EngineHandle { shared: Arc::new(shared) })
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
