//! The handle callers hold: everything that happens in the caller's own task.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use ractor::{Actor, ActorRef, RpcReplyPort};
use stolon_kvcache::{Namespace, PinId, TreeDump};
use stolon_model::{Backend, BackendSpec};

use crate::admission::AdmissionMessage;
use crate::config::{AdmissionPolicy, CoreConfig};
use crate::error::CoreError;
use crate::fault::{Fault, FaultPlan, Part};
use crate::gauges::CoreStats;
use crate::memory::CoreAudit;
use crate::memory::actors::ask;
use crate::prefix_tree::{CacheEvents, CacheReport, CorePin, TreeMessage};
use crate::request::SequenceRequest;
use crate::stream::SequenceStream;
use crate::supervisor::{Common, Generation, SupervisorActor, SupervisorMessage};
use crate::surroundings::{Entered, Surroundings};

/// A running core. Clones share it; when the last clone and the last stream are gone, it stops.
#[derive(Clone, Debug)]
pub struct CoreHandle {
    shared: Arc<Shared>,
}

/// What keeps a core alive.
#[derive(Debug)]
pub(crate) struct Shared {
    common: Arc<Common>,
    supervisor: ActorRef<SupervisorMessage>,
    next_id: AtomicU64,
}

impl Shared {
    /// Why a generation answers no more.
    pub(crate) fn why_gone(&self, generation: &Generation) -> CoreError {
        if self.common.stopped.load(Ordering::Acquire) {
            return CoreError::Stopped;
        }
        let unknown = || CoreError::Interrupted { reason: "a part of it failed".to_owned() };
        generation.fault.get().cloned().unwrap_or_else(unknown)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.supervisor.stop(None);
    }
}

impl CoreHandle {
    /// Starts a core on the current tokio runtime; the backend moves to a thread of its own.
    ///
    /// # Errors
    /// [`CoreError::InvalidParameter`] for settings or a backend that cannot work.
    pub async fn start(
        backend: Box<dyn Backend>,
        config: CoreConfig,
    ) -> Result<CoreHandle, CoreError> {
        let common = Arc::new(Common {
            around: Surroundings::new(config, backend.spec().clone())?,
            faults: Arc::new(FaultPlan::default()),
            generation: ArcSwapOption::empty(),
            down: ArcSwapOption::empty(),
            stopped: false.into(),
        });
        let supervisor = SupervisorActor { common: Arc::clone(&common) };
        let (supervisor, _) = Actor::spawn(None, supervisor, backend)
            .await
            .map_err(|error| CoreError::Interrupted { reason: error.to_string() })?;
        let shared = Shared { common, supervisor, next_id: AtomicU64::new(0) };
        Ok(CoreHandle { shared: Arc::new(shared) })
    }

    /// Sizes of the backend.
    pub fn spec(&self) -> &BackendSpec {
        &self.shared.common.around.spec
    }

    /// Lets a request in and returns its events; never waits.
    ///
    /// # Errors
    /// Every way a request can be wrong, [`CoreError::Overloaded`] when too much is waiting,
    /// [`CoreError::Interrupted`] and [`CoreError::Stopped`].
    pub fn submit(&self, request: SequenceRequest) -> Result<SequenceStream, CoreError> {
        let max_tokens = self.common().around.check(&request)?;
        self.enter(request, max_tokens, self.common().current()?, false)
    }

    /// Lets `count` requests for the same prompt in. The prompt is computed once, and counts once
    /// at the door. Where the sampling has a seed, each has the one after its predecessor's.
    ///
    /// # Errors
    /// As [`CoreHandle::submit`]; then none of them is let in.
    pub fn submit_choices(
        &self,
        request: SequenceRequest,
        count: usize,
    ) -> Result<Vec<SequenceStream>, CoreError> {
        if count == 0 {
            return Err(CoreError::invalid("choices", "at least 1", count));
        }
        let max_tokens = self.common().around.check(&request)?;
        let generation = self.common().current()?;
        let choice = |index: usize| {
            let mut request = request.clone();
            let seed = &mut request.sampling.seed;
            *seed = seed.map(|seed| seed.wrapping_add(index as u64));
            self.enter(request, max_tokens, Arc::clone(&generation), index > 0)
        };
        // A refusal drops the streams made so far, which cancels them.
        (0..count).map(choice).collect()
    }

    /// Takes a checked request through the door; one that `repeats` the prompt of the one before
    /// finds that computed.
    fn enter(
        &self,
        request: SequenceRequest,
        max_tokens: usize,
        generation: Arc<Generation>,
        repeats: bool,
    ) -> Result<SequenceStream, CoreError> {
        let around = &self.common().around;
        let shares = around.config.prefix_caching && request.prompt_logprobs.is_none();
        let matched = match shares {
            true if repeats => request.tokens.len(),
            true => generation.reader.query_match_len(&request.namespace, &request.tokens),
            false => 0,
        };
        // Ids only tell sequences apart.
        let id = self.shared.next_id.fetch_add(1, Ordering::Relaxed);
        let entered = around.enter(id, request, max_tokens, matched, Instant::now())?;
        let Entered { sequence, permit, events } = entered;
        let message = AdmissionMessage::Submit(Box::new(sequence), permit);
        if generation.admission.cast(message).is_err() {
            return Err(self.shared.why_gone(&generation));
        }
        around.gauges.requests.add(1);
        Ok(SequenceStream::new(id, events, generation, Arc::clone(&self.shared)))
    }

    fn common(&self) -> &Common {
        &self.shared.common
    }

    /// How many of the tokens are cached now: lock-free and without any effect. A hint.
    pub fn query_match_len(&self, namespace: &Namespace, tokens: &[u32]) -> usize {
        let generation = self.shared.common.generation.load();
        let query =
            |generation: &Arc<Generation>| generation.reader.query_match_len(namespace, tokens);
        generation.as_ref().map_or(0, query)
    }

    /// Counts and gauges, without waiting.
    pub fn stats(&self) -> CoreStats {
        self.shared.common.around.stats()
    }

    /// The policy in use.
    pub fn policy(&self) -> AdmissionPolicy {
        **self.shared.common.around.policy.load()
    }

    /// Changes the policy; what waits is ordered by it from now on.
    pub fn set_policy(&self, policy: AdmissionPolicy) {
        self.shared.common.around.policy.store(Arc::new(policy));
    }

    /// Checks all bookkeeping.
    ///
    /// # Errors
    /// [`CoreError::Audit`] with what is wrong, [`CoreError::Interrupted`], [`CoreError::Stopped`].
    pub async fn audit(&self) -> Result<CoreAudit, CoreError> {
        self.ask(AdmissionMessage::Audit).await?.map_err(CoreError::Audit)
    }

    /// Keeps what is cached of the tokens from being evicted, for `ttl` or until
    /// [`unpin`](CoreHandle::unpin). A flush ends all pins, and so does a restart.
    ///
    /// # Errors
    /// [`CoreError::Pin`] when nothing of it is cached or [`CoreConfig::pin_budget`] would be
    /// exceeded, [`CoreError::Interrupted`], [`CoreError::Stopped`].
    pub async fn pin(
        &self,
        namespace: Namespace,
        tokens: Vec<u32>,
        ttl: Option<Duration>,
    ) -> Result<PinId, CoreError> {
        Ok(self.ask_tree(|reply| TreeMessage::Pin { namespace, tokens, ttl, reply }).await??)
    }

    /// Ends a pin; whether there was one.
    ///
    /// # Errors
    /// [`CoreError::Interrupted`], [`CoreError::Stopped`].
    pub async fn unpin(&self, id: PinId) -> Result<bool, CoreError> {
        self.ask_tree(|reply| TreeMessage::Unpin(id, reply)).await
    }

    /// All pins, oldest first.
    ///
    /// # Errors
    /// [`CoreError::Interrupted`], [`CoreError::Stopped`].
    pub async fn pins(&self) -> Result<Vec<CorePin>, CoreError> {
        self.ask_tree(TreeMessage::Pins).await
    }

    /// What is cached, and every change from now on, in a queue of `capacity` events. It ends when
    /// the core stops or starts again.
    ///
    /// # Errors
    /// [`CoreError::InvalidParameter`] when `capacity` is 0, [`CoreError::Interrupted`],
    /// [`CoreError::Stopped`].
    pub async fn events(&self, capacity: usize) -> Result<CacheEvents, CoreError> {
        let events = self.ask_tree(|reply| TreeMessage::Subscribe(capacity, reply)).await?;
        events.map_err(|_| CoreError::invalid("capacity", "at least 1 event", capacity))
    }

    /// Numbers about the cache.
    ///
    /// # Errors
    /// [`CoreError::Interrupted`], [`CoreError::Stopped`].
    pub async fn cache_report(&self) -> Result<CacheReport, CoreError> {
        self.ask_tree(TreeMessage::Report).await
    }

    /// A picture of the tree, taken without a message to anybody.
    ///
    /// # Errors
    /// [`CoreError::Interrupted`], [`CoreError::Stopped`].
    pub fn dump(&self) -> Result<TreeDump, CoreError> {
        Ok(self.shared.common.current()?.reader.dump())
    }

    /// Empties the cache, except what running requests use, and ends all pins.
    ///
    /// # Errors
    /// [`CoreError::Interrupted`], [`CoreError::Stopped`].
    pub async fn flush(&self) -> Result<(), CoreError> {
        self.ask(AdmissionMessage::Flush).await
    }

    /// Stops the core: what runs or waits ends with [`CoreError::Stopped`], and the backend is
    /// dropped before this returns, unless it hangs: then that is waited for no longer than
    /// [`CoreConfig::step_timeout`].
    pub async fn shutdown(&self) {
        // If it is gone already, it has stopped.
        let _ = ask(&self.shared.supervisor, SupervisorMessage::Shutdown, "the supervisor").await;
    }

    /// Makes a part fail at its next message: for tests of what the rest then does.
    #[doc(hidden)]
    pub fn inject(&self, part: Part, fault: Fault) {
        self.shared.common.faults.arm(part, fault);
    }

    async fn ask<T: Send + 'static>(
        &self,
        message: impl FnOnce(RpcReplyPort<T>) -> AdmissionMessage,
    ) -> Result<T, CoreError> {
        let generation = self.shared.common.current()?;
        let answer = ask(&generation.admission, message, "admission").await;
        answer.map_err(|_| self.shared.why_gone(&generation))
    }

    async fn ask_tree<T: Send + 'static>(
        &self,
        message: impl FnOnce(RpcReplyPort<T>) -> TreeMessage,
    ) -> Result<T, CoreError> {
        let generation = self.shared.common.current()?;
        let answer = ask(&generation.tree, message, "the prefix tree").await;
        answer.map_err(|_| self.shared.why_gone(&generation))
    }

    /// Waits until nothing runs or waits, at most so long; whether that came to be.
    pub async fn idle(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        loop {
            let stats = self.stats();
            if stats.running == 0 && stats.waiting == 0 {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}
