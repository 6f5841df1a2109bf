//! The handle callers hold: everything that happens in the caller's own task.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use ractor::{Actor, ActorRef, RpcReplyPort};
use stolon_kvcache::{Namespace, PinId, TreeDump, prefix_tree};
use stolon_model::sampling::SamplingError;
use stolon_model::{Backend, BackendSpec};

use crate::admission::AdmissionMessage;
use crate::admission::scheduler::Surroundings;
use crate::admission::sequence::Sequence;
use crate::config::{AdmissionPolicy, CoreConfig};
use crate::door::Door;
use crate::error::{CoreError, LengthBound};
use crate::fault::{Fault, FaultPlan, Part};
use crate::gauges::{CoreStats, Gauges};
use crate::memory::CoreAudit;
use crate::memory::actors::ask;
use crate::prefix_tree::{CacheEvents, CacheReport, CorePin, TreeMessage};
use crate::request::SequenceRequest;
use crate::stream::{SequenceStream, event_channel};
use crate::supervisor::{Common, Generation, SupervisorActor, SupervisorMessage};

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
        config.validate()?;
        let spec = backend.spec().clone();
        check_spec(&spec, &config)?;
        let policy = Arc::new(ArcSwap::from_pointee(config.policy));
        let door = Arc::new(Door::new(config.max_queued_requests, config.max_queued_tokens));
        let config = Arc::new(config);
        let gauges = Arc::new(Gauges::default());
        let common = Arc::new(Common {
            around: Surroundings { config, policy, door, gauges, spec },
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
        let max_tokens = check(&request, self.spec(), self.common().around.config.pin_budget)?;
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
        let max_tokens = check(&request, self.spec(), self.common().around.config.pin_budget)?;
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
        let uncached = match shares {
            true if repeats => 1,
            true => {
                let matched =
                    generation.reader.query_match_len(&request.namespace, &request.tokens);
                request.tokens.len().saturating_sub(matched).max(1)
            }
            false => request.tokens.len(),
        };
        let permit = around.door.enter(uncached).inspect_err(|_| around.gauges.rejected.add(1))?;
        let (events, receiver) = event_channel(around.config.event_capacity);
        // Ids only tell sequences apart.
        let id = self.shared.next_id.fetch_add(1, Ordering::Relaxed);
        let sequence =
            Sequence::new(id, request, max_tokens, around.spec.block_size, events, Instant::now());
        let message = AdmissionMessage::Submit(Box::new(sequence), permit);
        if generation.admission.cast(message).is_err() {
            return Err(self.shared.why_gone(&generation));
        }
        around.gauges.requests.add(1);
        Ok(SequenceStream::new(id, receiver, generation, Arc::clone(&self.shared)))
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
        let around = &self.shared.common.around;
        around.gauges.snapshot(around.door.waiting(), around.spec.block_count)
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

/// Checks a request against the backend; returns how many tokens it can generate at most.
/// `pinned` blocks may never come free.
pub(crate) fn check(
    request: &SequenceRequest,
    spec: &BackendSpec,
    pinned: usize,
) -> Result<usize, CoreError> {
    let got = request.tokens.len();
    if got == 0 {
        return Err(CoreError::EmptyPrompt);
    }
    let blocks = spec.block_count - pinned;
    let pool = blocks * spec.block_size;
    let context = spec.max_positions - 1;
    if got > context.min(pool) {
        let bound = if context <= pool {
            LengthBound::Context(spec.max_positions)
        } else {
            LengthBound::Pool { blocks, block_size: spec.block_size }
        };
        return Err(CoreError::PromptTooLong { got, limit: context.min(pool), bound });
    }
    let vocab_size = spec.vocab_size;
    let outside = |&(_, &id): &(usize, &u32)| id as usize >= vocab_size;
    if let Some((index, &got)) = request.tokens.iter().enumerate().find(outside) {
        return Err(CoreError::TokenOutOfRange { index, got, vocab_size });
    }
    if request.max_tokens == 0 {
        return Err(CoreError::invalid("max_tokens", "at least 1", 0));
    }
    if let Some(top) = request.prompt_logprobs.filter(|&top| top > vocab_size) {
        let expected = format!("at most the vocabulary's {vocab_size}");
        return Err(CoreError::invalid("prompt_logprobs", expected, top));
    }
    request.sampling.validate(vocab_size).map_err(|error| match error {
        SamplingError::InvalidParameter { name, expected, got } => {
            CoreError::InvalidParameter { name, expected, got }
        }
        other => CoreError::invalid("sampling", "usable parameters", other),
    })?;
    // The last token generated is never computed, so it needs no place in the pool.
    Ok(request.max_tokens.min(spec.max_positions - got).min(pool - got + 1))
}

/// Checks what a backend says of itself, and the settings that depend on it.
pub(crate) fn check_spec(spec: &BackendSpec, config: &CoreConfig) -> Result<(), CoreError> {
    prefix_tree(spec.block_size).map_err(|_| {
        CoreError::invalid("block_size", "a power of two from 1 to 256", spec.block_size)
    })?;
    if spec.block_count == 0 {
        return Err(CoreError::invalid("num_blocks", "at least 1", 0));
    }
    if config.pin_budget >= spec.block_count {
        let expected = format!("fewer than the pool's {} blocks", spec.block_count);
        return Err(CoreError::invalid("pin_budget", expected, config.pin_budget));
    }
    if spec.max_positions < 2 {
        return Err(CoreError::invalid("max_positions", "at least 2", spec.max_positions));
    }
    if spec.vocab_size == 0 {
        return Err(CoreError::invalid("vocab_size", "at least 1", 0));
    }
    Ok(())
}
