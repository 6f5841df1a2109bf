//! What the scheduler shares with the callers: settings, limits, statistics, and the path by which
//! a request enters the engine (validation, queue permit, event channel).
//!
//! The engine, the simulation and the tests all use this one path.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use stolon_backend::{BackendSpec, ImageInput};
use stolon_kvcache::{
    BlockPool, EvictionPolicy, Namespace, PrefixMatch, StepFence, TokenSpan, TokenSpanInterner,
    TreeBuilder, TreeReader, TreeWriter,
};
use tracing::Span;
use tracing::field::Empty;

use crate::blocks_for;
use crate::config::{AdmissionPolicy, EngineConfig};
use crate::error::{EngineError, LengthBound};
use crate::event_channel::{EventReceiver, event_channel};
use crate::gauges::Gauges;
use crate::images::{EncodedImages, PromptImage, pixel_bytes};
use crate::memory::BlockAllocator;
use crate::pending::PendingPrompts;
use crate::permits::{QueueLimits, QueuePermit};
use crate::pin_budget::{BudgetLoan, PinBudget, Pinned};
use crate::quota::QuotaShare;
use crate::request::{RequestOptions, SequenceRequest};
use crate::request_counts::RequestRecord;
use crate::sequence::{Sequence, Terms};
use crate::session::Sessions;
use crate::states::CheckpointRule;
use crate::stats::EngineStats;
use crate::tenant::TenantId;
use crate::transfer::PromptLookup;
use crate::wait::Arrival;
use validation::{answer_min, check, check_spec, check_tokens, prompt_limit, unsupported};

mod validation;

/// Number of images whose numbers are remembered at least, 64 bytes for each.
const REMEMBERED_IMAGES: usize = 1 << 14;

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
    /// Divides the blocks of the pin budget between pins and long requests.
    pub pin_budget: Arc<PinBudget>,
    /// The open sessions.
    pub sessions: Arc<Sessions>,
    /// Counters and gauges.
    pub gauges: Arc<Gauges>,
    /// The backend's sizes.
    pub spec: BackendSpec,
    /// Numbers the images of prompts. It outlives the prefix trees, because a number is never used
    /// for another image.
    spans: Arc<TokenSpanInterner>,
    /// The images whose embeddings are cached, so that they are not encoded again.
    pub(crate) encoded: Arc<EncodedImages>,
    pub(crate) limits: Arc<QueueLimits>,
    /// The prompts of requests that wait or run.
    pending: Arc<PendingPrompts>,
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
    /// The same limit, for the part of the pool that is not pinned.
    fn next_to(self, pinned: Pinned) -> PromptLimit {
        match self.bound {
            LengthBound::Pool { blocks, block_size } => {
                let bound = LengthBound::Pins { blocks, block_size, pinned };
                PromptLimit { bound, ..self }
            }
            _ => self,
        }
    }

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
    pub fn new(
        mut config: EngineConfig,
        mut spec: BackendSpec,
    ) -> Result<EngineContext, EngineError> {
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
        if spec.whole_prompts {
            config.prefix_caching = false;
        }
        let mut default_policy = EvictionPolicy::default();
        if let Some(state) = spec.state {
            // Each running request has a slot. Checkpoints differ much in the number of positions
            // that they save.
            config.max_running = config.max_running.min(state.slots.max(1));
            default_policy = EvictionPolicy::CostAware;
        }
        let demotable = config.sink_of_pins().is_some();
        let pin_budget = PinBudget::new(config.pin_budget, demotable, &spec);
        let session_budget = config.session_budget.unwrap_or(spec.block_count / 2);
        let (max_sessions, session_ttl) = (config.max_sessions, config.session_ttl);
        Ok(EngineContext {
            policy: Arc::new(ArcSwap::from_pointee(config.policy)),
            eviction_policy: Arc::new(ArcSwap::from_pointee(match config.eviction_order {
                Some(_) => None,
                None => Some(config.eviction_policy.unwrap_or(default_policy)),
            })),
            pin_budget: Arc::new(pin_budget),
            sessions: Arc::new(Sessions::new(session_budget, max_sessions, session_ttl)),
            limits: Arc::new(QueueLimits::new(
                config.max_queued_requests,
                config.max_queued_tokens,
                config.max_queued_pixel_bytes,
            )),
            spans: Arc::new(TokenSpanInterner::new(REMEMBERED_IMAGES)),
            encoded: Arc::default(),
            pending: Arc::default(),
            config: Arc::new(config),
            gauges: Arc::new(Gauges::default()),
            spec,
        })
    }

    /// Makes an empty cache with as many blocks as the backend has.
    ///
    /// # Errors
    /// [`EngineError::InvalidParameter`] for a size that the prefix cache does not support.
    pub fn empty_cache(&self) -> Result<EmptyCache, EngineError> {
        let eviction = match self.eviction_policy() {
            Some(policy) => policy.order(),
            None => self.config.new_eviction_order(),
        };
        let mut builder = TreeBuilder::new(self.spec.block_size)
            .eviction_order(eviction)
            .pin_budget(self.pin_budget.blocks())
            .demotable_pins(self.config.sink_of_pins().is_some())
            .block_count(self.spec.block_count)
            .checkpoint_blocks(self.spec.checkpoint_blocks());
        if let Some(quota) = self.config.namespace_quota {
            builder = builder.namespace_quota(quota);
        }
        let (writer, reader) = builder.build().map_err(unsupported)?;
        let (pool, fence) = BlockPool::new(self.spec.block_count).map_err(unsupported)?;
        let takes_evicted = self.config.kv_sink.as_ref().is_some_and(|sink| sink.takes_evicted());
        let allocator = BlockAllocator::new(pool, self.config.logit_cache_bytes);
        let allocator = allocator.noting_evicted(takes_evicted);
        Ok(EmptyCache { writer, reader, allocator, fence })
    }

    /// Appends an image to the tokens of a prompt.
    ///
    /// # Errors
    /// [`EngineError::InvalidParameter`] if the image has no positions, or if 2^28 different images
    /// were appended before.
    pub fn append_image(
        &self,
        input: Arc<ImageInput>,
        tokens: &mut Vec<u32>,
    ) -> Result<PromptImage, EngineError> {
        let start = tokens.len();
        let kv_len = u32::try_from(input.kv_len).unwrap_or(u32::MAX);
        if start.saturating_add(input.kv_len) > self.prompt_limit().tokens {
            return Err(self.prompt_limit().error(start.saturating_add(input.kv_len)));
        }
        let ImageInput { content_hash, columns, .. } = *input;
        let span = TokenSpan::Image { content_hash, kv_len, columns: columns as u32 };
        let appended = self.spans.append(span, tokens);
        appended.map_err(|error| EngineError::invalid("images", "an image", error))?;
        Ok(PromptImage { start, input })
    }

    /// The interner that numbers the images of prompts.
    pub fn spans(&self) -> &Arc<TokenSpanInterner> {
        &self.spans
    }

    /// The work of a prompt of which `cached` tokens are cached in its namespace, in tokens to
    /// compute: the others, and encoding their images.
    pub fn uncached_work(&self, namespace: &Namespace, tokens: &[u32], cached: usize) -> usize {
        let uncached = tokens.get(cached..).unwrap_or_default();
        uncached.len() + self.encoding_cost(namespace, uncached)
    }

    /// What encoding the images of uncached tokens costs in a namespace, in tokens to compute. Those
    /// in the encoder cache cost nothing.
    pub(crate) fn encoding_cost(&self, namespace: &Namespace, uncached: &[u32]) -> usize {
        if self.spec.image_width.is_none() {
            return 0;
        }
        let is_encoded = |position: u32| {
            let image = self.spans().image_at(position);
            let key = image.map(|image| (*namespace, (image.content_hash, image.kv_len as usize)));
            key.is_some_and(|key| self.encoded.contains(&key))
        };
        let (mut positions, mut last) = (0, None);
        for &position in uncached {
            let Some(number) = TokenSpan::image_number(position) else { continue };
            let known = last.filter(|(of, _)| *of == number);
            let (_, encoded) = known.unwrap_or_else(|| (number, is_encoded(position)));
            last = Some((number, encoded));
            positions += usize::from(!encoded);
        }
        self.gauges.encoding_cost(positions)
    }

    /// Where checkpoints are taken; `None` for a model without recurrent states.
    pub(crate) fn checkpoint_rule(&self) -> Option<CheckpointRule> {
        let (spec, sink) = (&self.spec, self.config.kv_sink.as_ref());
        spec.state.map(|_| CheckpointRule {
            pool_blocks: if sink.is_none() { spec.block_count } else { 0 },
            block_size: spec.block_size,
            blocks: spec.checkpoint_blocks(),
            distance: sink
                .map_or(spec.block_size, |sink| sink.checkpoint_distance(spec.block_size)),
        })
    }

    /// Number of leading tokens of a prompt that its repetition does not compute, if all that can be
    /// is cached.
    pub fn resume_max(&self, prompt_len: usize) -> usize {
        match self.checkpoint_rule() {
            Some(rule) => rule.end_of_prompt(prompt_len),
            None => prompt_len / self.spec.block_size * self.spec.block_size,
        }
    }

    /// Number of leading tokens that a prompt does not compute if it has its first `len` tokens in
    /// common with a cached prompt, and goes on otherwise.
    pub fn cached_max(&self, len: usize) -> usize {
        let block_size = self.spec.block_size;
        self.resume_max(len + 1).min(len / block_size * block_size)
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
        // A prompt that is computed as a whole is not continued.
        prompt_limit(&self.spec, 0, usize::from(!self.spec.whole_prompts))
    }

    /// Validates the tokens of an embedding's input, as if nothing were pinned.
    ///
    /// # Errors
    /// `EmptyPrompt`, `PromptTooLong`, `TokenOutOfRange`.
    pub fn check_embedding(&self, tokens: &[u32]) -> Result<(), EngineError> {
        check_tokens(tokens, prompt_limit(&self.spec, 0, 0), &self.spec)
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
        let (got, budget) = (request.tokens.len(), self.pin_budget.reserved());
        let limit = |reserved| prompt_limit(&self.spec, reserved, answer_min(request));
        if got <= limit(budget).tokens || got > limit(0).tokens {
            let reserved = if got <= limit(0).tokens { budget } else { 0 };
            return Ok((check(request, &self.spec, &self.config, reserved)?, None));
        }
        let needed = blocks_for(self.spec.block_size, got);
        match self.pin_budget.borrow(needed, self.spec.block_count) {
            Ok((loan, pinned)) => {
                let max_tokens = check(request, &self.spec, &self.config, pinned.blocks)?;
                Ok((max_tokens, Some(loan)))
            }
            Err(pinned) => Err(limit(pinned.blocks).next_to(pinned).error(got)),
        }
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
    /// [`EngineError::Draining`] if no request may enter any longer.
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
        let uncached = &request.tokens[matched.min(prompt_tokens)..];
        let encoding = self.encoding_cost(&request.namespace, uncached);
        let uncached = prompt_tokens.saturating_sub(matched).max(1) + encoding;
        let refused = |error: &EngineError| {
            tracing::debug!(target: "stolon", prompt_tokens, uncached, %error, "request refused");
        };
        // The answers to one prompt share its images.
        let pixels = if choice == 0 { pixel_bytes(&request.images) } else { 0 };
        let tenant = request.options.tenant.as_deref();
        let tenant = tenant.map(|name| TenantId::new(Some(name)));
        let permit = self.limits.acquire(tenant, uncached, pixels).inspect_err(|error| {
            let counter = match error {
                EngineError::Overloaded { queued_requests, .. }
                    if *queued_requests < self.limits.requests_max(tenant) =>
                {
                    &self.gauges.rejected_by_tokens
                }
                _ => &self.gauges.rejected_by_requests,
            };
            counter.add(1);
            refused(error);
        })?;
        let share = self.charge(&request, max_tokens, choice).inspect_err(|error| {
            self.gauges.rejected_by_quota.add(1);
            refused(error);
        })?;
        let span = request_span(id, choice, prompt_tokens);
        let record = RequestRecord::new(&self.gauges, span).inspect_err(refused)?;
        let (sender, events) = event_channel(self.config.event_capacity);
        let block_size = self.spec.block_size;
        // The prompt of a further answer counts as cached, because the first one computes it.
        let found = if choice == 0 { matched } else { 0 };
        let bins = self.spec.regions.filter(|_| request.options.regions);
        let is_shared = self.config.prefix_caching && !request.options.skip_writing_prefix_cache;
        let pending = (is_shared && choice == 0)
            .then(|| self.pending.add(request.namespace, Arc::clone(&request.tokens)));
        let terms = Terms {
            choice,
            max_tokens,
            loan,
            share,
            block_size,
            bins,
            encoding,
            found,
            pending,
            is_background: false,
        };
        let sequence = Sequence::new(id, request, terms, record, sender, now);
        Ok((sequence, permit, events))
    }

    /// Validates a prompt that is to be computed for the cache while there is no request. Returns
    /// its state, for the scheduler, and the caller's end of its event channel. The channel has no
    /// tokens: it has [`Event::Started`](crate::Event::Started) and, if all of the prompt was
    /// computed, [`Event::Finished`](crate::Event::Finished). It is closed without that if a
    /// request came first.
    ///
    /// # Errors
    /// Every way in which a request can be invalid, also that its prompt needs blocks of the pin
    /// budget, or that the engine has no prefix cache; [`EngineError::Draining`].
    pub fn submit_background(
        &self,
        id: u64,
        request: SequenceRequest,
        now: Instant,
    ) -> Result<(Sequence, EventReceiver), EngineError> {
        if !self.config.prefix_caching {
            let expected = "a prefix cache, because the prompt is computed for it";
            return Err(EngineError::invalid("background", expected, "none"));
        }
        let max_tokens = check(&request, &self.spec, &self.config, self.pin_budget.reserved())?;
        let record = RequestRecord::background(&self.gauges)?;
        let (sender, events) = event_channel(self.config.event_capacity);
        let block_size = self.spec.block_size;
        let terms = Terms { max_tokens, block_size, is_background: true, ..Terms::default() };
        let sequence = Sequence::new(id, request, terms, record, sender, now);
        Ok((sequence, events))
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

    /// A look-up of stored KV for a prompt whose cached part is `found`.
    pub fn prompt_lookup(
        &self,
        namespace: Namespace,
        tokens: Arc<Vec<u32>>,
        found: PrefixMatch,
        priority: i32,
    ) -> PromptLookup {
        let PrefixMatch { cached, resume } = found;
        let checkpoint_positions = self.spec.checkpoint_blocks() * self.spec.block_size;
        let (prefill_rate, is_repeated) = (self.prefill_rate(), false);
        PromptLookup {
            namespace,
            tokens,
            cached,
            resume,
            checkpoint_positions,
            priority,
            prefill_rate,
            is_repeated,
        }
    }

    /// Number of leading tokens of a prompt that are cached or will be, because another request
    /// waits or runs that has them. `cached` of them are cached. The same number for a model with a
    /// recurrent state: what can be shared depends on where checkpoints will be.
    pub fn expected_match(&self, namespace: &Namespace, tokens: &[u32], cached: usize) -> usize {
        match self.spec.state {
            None => self.pending.shared(namespace, tokens, cached, self.spec.block_size),
            Some(_) => cached,
        }
    }

    /// Whether a request with `uncached` uncached tokens would be refused now, because the
    /// admission queue is full. It may change before the request is submitted.
    pub fn queue_is_full(&self, uncached: usize) -> bool {
        self.limits.is_full(uncached.max(1))
    }

    /// Number of uncached tokens in the admission queue.
    pub fn queued_tokens(&self) -> usize {
        self.limits.queued_tokens()
    }

    /// The expected time until the first token of a request with these options that arrives `now`,
    /// of which `cached` tokens are cached and `uncached` are to be computed, and the part of it that
    /// the request waits for others. `None` before anything was computed.
    pub fn first_token_estimate(
        &self,
        cached: usize,
        uncached: usize,
        options: &RequestOptions,
        now: Instant,
    ) -> Option<(Duration, Duration)> {
        let tenant = TenantId::new(options.tenant.as_deref());
        let arrival = Arrival { cached, uncached, class: options.priority, tenant };
        self.limits.workload().first_token(arrival, now)
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
