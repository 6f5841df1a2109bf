//! What the scheduler shares with the callers: settings, limits, statistics, and the path by which
//! a request enters the engine (validation, queue permit, event channel).
//!
//! The engine, the simulation and the tests all use this one path.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use stolon_backend::BackendSpec;
use stolon_kvcache::{
    BlockPool, EvictionPolicy, StepFence, TreeBuilder, TreeReader, TreeWriter, prefix_tree,
};
use tracing::Span;
use tracing::field::Empty;

use crate::config::{AdmissionPolicy, EngineConfig};
use crate::error::{EngineError, LengthBound};
use crate::event_channel::{EventReceiver, event_channel};
use crate::memory::BlockAllocator;
use crate::permits::{QueueLimits, QueuePermit};
use crate::pin_budget::{BudgetLoan, PinBudget};
use crate::quota::QuotaShare;
use crate::request::{RequestOptions, SequenceRequest};
use crate::request_counts::RequestRecord;
use crate::sequence::{Sequence, Terms};
use crate::session::Sessions;
use crate::stats::{EngineStats, Gauges};

/// Everything that outlives a scheduler. Clones share all of it except the sizes, which are
/// constant.
#[derive(Clone, Debug)]
pub struct EngineContext {
    /// The settings.
    pub config: Arc<EngineConfig>,
    /// The admission policy in use. It can be changed at any time.
    pub policy: Arc<ArcSwap<AdmissionPolicy>>,
    /// The eviction policy in use; `None` for the custom order of the settings.
    eviction_policy: Arc<ArcSwap<Option<EvictionPolicy>>>,
    /// Whether requests or pins use the blocks of the pin budget.
    pub pin_budget: Arc<PinBudget>,
    /// The open sessions.
    pub sessions: Arc<Sessions>,
    /// Counters and gauges.
    pub gauges: Arc<Gauges>,
    /// The backend's sizes.
    pub spec: BackendSpec,
    pub(crate) limits: Arc<QueueLimits>,
}

/// The parts of an empty cache, to be handed to their owners.
#[derive(Debug)]
pub struct EmptyCache {
    /// The writer of the prefix tree.
    pub writer: TreeWriter,
    /// A reader of the prefix tree.
    pub reader: TreeReader,
    /// The block pool with all blocks free.
    pub allocator: BlockAllocator,
    /// Delays the reuse of released blocks until the steps that can still touch them have ended.
    pub fence: StepFence,
}

/// The maximum length of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLimit {
    /// Maximum number of tokens.
    pub tokens: usize,
    /// What sets the limit.
    pub bound: LengthBound,
}

impl PromptLimit {
    /// The error of a prompt of `got` tokens.
    pub fn error(self, got: usize) -> EngineError {
        EngineError::PromptTooLong { got, limit: self.tokens, bound: self.bound }
    }
}

impl EngineContext {
    /// Validates the settings and the backend's sizes.
    ///
    /// # Errors
    /// [`EngineError::InvalidParameter`] for the first impossible value.
    pub fn new(config: EngineConfig, mut spec: BackendSpec) -> Result<EngineContext, EngineError> {
        config.validate()?;
        check_spec(&spec, &config)?;
        if let Some(limit) = config.max_positions {
            if limit < 2 || limit > spec.max_positions {
                let context = spec.max_positions;
                let expected = format!("from 2 to the model's context length {context}");
                return Err(EngineError::invalid("max_positions", expected, limit));
            }
            spec.max_positions = limit;
        }
        let session_budget = config.session_budget.unwrap_or(spec.block_count / 2);
        let (max_sessions, session_ttl) = (config.max_sessions, config.session_ttl);
        Ok(EngineContext {
            policy: Arc::new(ArcSwap::from_pointee(config.policy)),
            eviction_policy: Arc::new(ArcSwap::from_pointee(match config.eviction_order {
                Some(_) => None,
                None => Some(config.eviction_policy),
            })),
            pin_budget: Arc::default(),
            sessions: Arc::new(Sessions::new(session_budget, max_sessions, session_ttl)),
            limits: Arc::new(QueueLimits::new(
                config.max_queued_requests,
                config.max_queued_tokens,
            )),
            config: Arc::new(config),
            gauges: Arc::new(Gauges::default()),
            spec,
        })
    }

    /// Makes an empty cache with as many blocks as the backend has.
    ///
    /// # Errors
    /// [`EngineError::InvalidParameter`] for a block size that the prefix tree does not support.
    pub fn empty_cache(&self) -> Result<EmptyCache, EngineError> {
        let eviction = match self.eviction_policy() {
            Some(policy) => policy.order(),
            None => self.config.new_eviction_order(),
        };
        let (writer, reader) = TreeBuilder::new(self.spec.block_size)
            .eviction_order(eviction)
            .pin_budget(self.config.pin_budget)
            .block_count(self.spec.block_count)
            .build()
            .map_err(|_| invalid_block_size(self.spec.block_size))?;
        let (pool, fence) = BlockPool::new(self.spec.block_count);
        let takes_evicted = self.config.kv_sink.as_ref().is_some_and(|sink| sink.takes_evicted());
        let allocator = BlockAllocator::new(pool, self.config.logit_cache_bytes);
        let allocator = allocator.noting_evicted(takes_evicted);
        Ok(EmptyCache { writer, reader, allocator, fence })
    }

    /// The eviction policy in use; `None` for a custom order.
    pub fn eviction_policy(&self) -> Option<EvictionPolicy> {
        **self.eviction_policy.load()
    }

    /// Sets the eviction policy of caches that are made from now on.
    pub fn set_eviction_policy(&self, policy: EvictionPolicy) {
        self.eviction_policy.store(Arc::new(Some(policy)));
    }

    /// The maximum length of a prompt while nothing is pinned: what fits the context and the KV
    /// pool, with room for one generated token.
    pub fn prompt_limit(&self) -> PromptLimit {
        prompt_limit(&self.spec, 0, 1)
    }

    /// Validates the tokens of an embedding's input, as if nothing were pinned.
    ///
    /// # Errors
    /// `EmptyPrompt`, `PromptTooLong`, `TokenOutOfRange`.
    pub fn check_embedding(&self, tokens: &[u32]) -> Result<(), EngineError> {
        check_tokens(tokens, prompt_limit(&self.spec, 0, 0), self.spec.vocab_size)
    }

    /// Maximum number of answers to one prompt that can be requested at once: all of them must fit
    /// into the admission queue.
    pub fn max_choices(&self) -> usize {
        /// Bounds the memory of a request if the queue has no limit in practice.
        const MAX_CHOICES: usize = 1024;
        self.config.max_queued_requests.min(MAX_CHOICES)
    }

    /// Validates a request. Returns the maximum number of tokens to generate, and the right to use
    /// the blocks of the pin budget, if the prompt needs them.
    fn check(&self, request: &SequenceRequest) -> Result<(usize, Option<BudgetLoan>), EngineError> {
        let (got, reserved) = (request.tokens.len(), self.config.pin_budget);
        let limit = |reserved| prompt_limit(&self.spec, reserved, answer_min(request)).tokens;
        let needs_more = got > limit(reserved) && got <= limit(0);
        let loan = if needs_more { self.pin_budget.borrow() } else { None };
        let reserved = if loan.is_some() { 0 } else { reserved };
        Ok((check(request, &self.spec, &self.config, reserved)?, loan))
    }

    /// Validates a request, of which `matched` positions are cached, and takes a queue permit for
    /// it. Returns its state, for the scheduler, the permit, and the caller's end of its event
    /// channel.
    ///
    /// `choice` is the number of the answer among several to the same prompt, from 0. If the request
    /// has a seed, the answer uses that seed plus `choice`. Log-probabilities of the prompt are
    /// computed for the first answer only, and only the first one can be the turn of a session.
    ///
    /// # Errors
    /// Every way in which a request can be invalid, [`EngineError::Overloaded`] if the admission
    /// queue is full, [`EngineError::QuotaExceeded`] if the request's quota is used up,
    /// [`EngineError::Draining`] if no request may enter any more.
    pub fn submit(
        &self,
        id: u64,
        mut request: SequenceRequest,
        choice: u64,
        matched: usize,
        now: Instant,
    ) -> Result<(Sequence, QueuePermit, EventReceiver), EngineError> {
        let (max_tokens, loan) = self.check(&request)?;
        if choice > 0 {
            request.options.prompt_logprobs = None;
            request.turn = None;
        }
        let prompt_tokens = request.tokens.len();
        let uncached = prompt_tokens.saturating_sub(matched).max(1);
        let refused = |error: &EngineError| {
            tracing::debug!(target: "stolon", prompt_tokens, uncached, %error, "request refused");
        };
        let permit = self.limits.acquire(uncached).inspect_err(|error| {
            self.gauges.rejected.add(1);
            if let EngineError::Overloaded { queued_requests, .. } = error
                && *queued_requests < self.config.max_queued_requests
            {
                self.gauges.rejected_by_tokens.add(1);
            }
            refused(error);
        })?;
        let share = self.charge(&request, max_tokens, choice).inspect_err(|error| {
            self.gauges.rejected.add(1);
            refused(error);
        })?;
        let span = request_span(id, choice, prompt_tokens);
        let record = RequestRecord::new(&self.gauges, span).inspect_err(refused)?;
        let (sender, events) = event_channel(self.config.event_capacity);
        let terms = Terms { choice, max_tokens, loan, share, block_size: self.spec.block_size };
        let sequence = Sequence::new(id, request, terms, record, sender, now);
        Ok((sequence, permit, events))
    }

    /// Charges a request to its quota, if it has one. The answers to one prompt count the prompt
    /// once.
    fn charge(
        &self,
        request: &SequenceRequest,
        max_tokens: usize,
        choice: u64,
    ) -> Result<Option<QuotaShare>, EngineError> {
        let Some(quota) = &request.options.quota else { return Ok(None) };
        let is_first = choice == 0;
        let prompt = if is_first { request.tokens.len() } else { 0 };
        let answer = max_tokens * answer_min(request);
        quota.charge(prompt + answer, is_first, |tokens| self.limits.retry_after(tokens)).map(Some)
    }

    /// Whether a request with `uncached` uncached tokens would be refused now, because the
    /// admission queue is full. It may change before the request is submitted.
    pub fn queue_is_full(&self, uncached: usize) -> bool {
        self.limits.is_full(uncached.max(1))
    }

    /// Number of uncached tokens in the admission queue, and the time to compute them at the recent
    /// throughput; `None` before anything was computed.
    pub fn queue_estimate(&self) -> (usize, Option<Duration>) {
        let queued = self.limits.queued_tokens();
        (queued, self.limits.time_of(queued))
    }

    /// Number of prompt positions that recent steps have computed per second; `None` before the
    /// first one.
    pub fn prefill_rate(&self) -> Option<f64> {
        let rate = self.gauges.prefill_rate.get();
        (rate > 0).then_some(rate as f64)
    }

    /// A copy of all counters and gauges.
    pub fn stats(&self) -> EngineStats {
        let sessions = self.sessions.counts(Instant::now());
        let (queued, blocks) = (self.limits.queued_tokens(), self.spec.block_count);
        self.gauges.snapshot(queued, blocks, sessions)
    }
}

/// The span of a request, from its submission to its end. The fields that are empty here are
/// recorded when they are known.
fn request_span(id: u64, choice: u64, prompt_tokens: usize) -> Span {
    tracing::info_span!(
        target: "stolon",
        "request",
        id,
        choice,
        prompt_tokens,
        cached_tokens = Empty,
        queue_ms = Empty,
        ttft_ms = Empty,
        completion_tokens = Empty,
        outcome = Empty,
        reason = Empty,
    )
}

/// The least number of tokens that a request generates: none if it is for an embedding.
fn answer_min(request: &SequenceRequest) -> usize {
    usize::from(request.options.pooling.is_none())
}

/// `reserved` blocks are not available to requests. The context has to hold `answer_min` generated
/// tokens too.
fn prompt_limit(spec: &BackendSpec, reserved: usize, answer_min: usize) -> PromptLimit {
    let (blocks, block_size) = (spec.block_count - reserved, spec.block_size);
    let (pool, context) = (blocks * block_size, spec.max_positions - answer_min);
    if context <= pool {
        PromptLimit { tokens: context, bound: LengthBound::Context(spec.max_positions) }
    } else {
        PromptLimit { tokens: pool, bound: LengthBound::Pool { blocks, block_size } }
    }
}

/// Validates a request against the backend's sizes and returns the number of tokens it can generate
/// at most: fewer than requested if the context length or the KV pool, without `reserved` blocks,
/// is exhausted first.
fn check(
    request: &SequenceRequest,
    spec: &BackendSpec,
    config: &EngineConfig,
    reserved: usize,
) -> Result<usize, EngineError> {
    let (got, vocab_size) = (request.tokens.len(), spec.vocab_size);
    check_tokens(&request.tokens, prompt_limit(spec, reserved, answer_min(request)), vocab_size)?;
    let pool = (spec.block_count - reserved) * spec.block_size;
    request.stored.as_ref().map_or(Ok(()), |stored| stored.check(spec))?;
    let options = &request.options;
    if options.pooling.is_some() {
        if spec.hidden_size.is_none() {
            let expected = "a backend that returns hidden states";
            return Err(EngineError::invalid("pooling", expected, "one that returns logits only"));
        }
        if options.prompt_logprobs.is_some() {
            let expected = "none for an embedding";
            return Err(EngineError::invalid("prompt_logprobs", expected, "a number"));
        }
        // It generates nothing, and ends when the prompt is computed.
        return Ok(1);
    }
    let max_tokens = options.max_tokens.or(config.default_max_tokens).unwrap_or(usize::MAX);
    if max_tokens == 0 {
        return Err(EngineError::invalid("max_tokens", "at least 1", 0));
    }
    let stop_ids = options.stop_ids.as_slice();
    if stop_ids.len() > RequestOptions::MAX_STOP_IDS {
        let expected = format!("at most {} different ids", RequestOptions::MAX_STOP_IDS);
        return Err(EngineError::invalid("stop_ids", expected, "more"));
    }
    if let Some(&got) = stop_ids.last().filter(|&&id| id as usize >= vocab_size) {
        let expected = format!("ids below the vocabulary size {vocab_size}");
        return Err(EngineError::invalid("stop_ids", expected, got));
    }
    let top_max = vocab_size.min(RequestOptions::MAX_PROMPT_LOGPROBS);
    if let Some(top) = options.prompt_logprobs.filter(|&top| top > top_max) {
        let expected = format!("at most {top_max}");
        return Err(EngineError::invalid("prompt_logprobs", expected, top));
    }
    options.sampling.validate(vocab_size)?;
    // The last generated token is never fed back, so it needs no position in the pool.
    Ok(max_tokens.min(spec.max_positions - got).min(pool - got + 1))
}

/// Validates the tokens of a prompt.
fn check_tokens(tokens: &[u32], limit: PromptLimit, vocab_size: usize) -> Result<(), EngineError> {
    if tokens.is_empty() {
        return Err(EngineError::EmptyPrompt);
    }
    if tokens.len() > limit.tokens {
        return Err(limit.error(tokens.len()));
    }
    let outside = |&(_, &id): &(usize, &u32)| id as usize >= vocab_size;
    match tokens.iter().enumerate().find(outside) {
        Some((index, &got)) => Err(EngineError::TokenOutOfRange { index, got, vocab_size }),
        None => Ok(()),
    }
}

/// Validates the backend's sizes, and the settings that depend on them.
fn check_spec(spec: &BackendSpec, config: &EngineConfig) -> Result<(), EngineError> {
    prefix_tree(spec.block_size).map_err(|_| invalid_block_size(spec.block_size))?;
    if spec.block_count == 0 {
        return Err(EngineError::invalid("num_blocks", "at least 1", 0));
    }
    if config.pin_budget >= spec.block_count {
        let expected = format!("fewer than the pool's {} blocks", spec.block_count);
        return Err(EngineError::invalid("pin_budget", expected, config.pin_budget));
    }
    if let Some(got) = config.session_budget.filter(|&budget| budget > spec.block_count) {
        let expected = format!("at most the pool's {} blocks", spec.block_count);
        return Err(EngineError::invalid("session_budget", expected, got));
    }
    if spec.max_positions < 2 {
        return Err(EngineError::invalid("max_positions", "at least 2", spec.max_positions));
    }
    if spec.vocab_size == 0 {
        return Err(EngineError::invalid("vocab_size", "at least 1", 0));
    }
    Ok(())
}

fn invalid_block_size(got: usize) -> EngineError {
    EngineError::invalid("block_size", "a power of two from 1 to 256", got)
}
