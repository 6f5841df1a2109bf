//! The state of one request, from submission to its end.
//!
//! 1. **Waiting**: it has tokens and a place in the queue, but no lease and no block.
//! 2. **Running**: its cached prefix is leased and its other blocks are reserved. Each step
//!    advances `computed` toward the number of tokens. When it gets there, a token is sampled and
//!    appended.
//! 3. **Preempted**: waiting again. The tokens generated so far are part of what must be
//!    recomputed. Events that were sent to the caller are not sent again.
//! 4. **Ended**: dropped. Dropping it returns every lease, on every path.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem;
use std::sync::Arc;
use std::time::Instant;

use stolon_backend::{
    BackendSpec, Draw, LogitRows, Pooler, Pooling, RegionBins, SamplerState, SamplingError,
    TokenLogprob,
};
use stolon_kvcache::{BlockLease, Namespace};

use crate::budget::{AnswerLimit, DecodeForecast};
use crate::error::EngineError;
use crate::event_channel::EventSender;
use crate::images::SequenceImages;
use crate::pending::PendingPrompt;
use crate::pin_budget::BudgetLoan;
use crate::quota::{QuotaId, QuotaShare};
use crate::request::{RequestOptions, SequenceRequest};
use crate::request_counts::RequestRecord;
use crate::schedule::SequenceView;
use crate::scheduler::BACKGROUND_CHUNK;
use crate::session::{SessionContent, SessionHold, Turn, TurnEnd};
use crate::speculation::Drafts;
use crate::step_plan::{PromptTargets, RowTask};
use crate::tenant::TenantId;
use crate::token_set::TokenSet;
use crate::transfer::StoredKv;

pub(crate) use held::Held;

mod answer;
mod held;
mod stored;

/// Maximum number of logit rows of one sequence in one step, for a sequence with prompt
/// log-probabilities. A row is as wide as the vocabulary, so this bounds memory.
const LOGIT_ROWS_MAX: usize = 64;

/// The state of a request. See the module documentation.
#[derive(Debug)]
pub struct Sequence {
    /// Unique within an engine.
    pub(crate) id: u64,
    /// Prompt and generated tokens. Messages to the memory share it; appending a token copies it
    /// only if such a message still exists.
    pub(crate) tokens: Arc<Vec<u32>>,
    /// Number of prompt tokens at the start of `tokens`.
    pub(crate) prompt_len: usize,
    /// The images of the prompt.
    pub(crate) images: SequenceImages,
    /// Cost of encoding its images, as a number of tokens to compute.
    pub(crate) encoding: usize,
    /// Whether it is not a request but a prompt that is computed for the cache while there is no
    /// request. It ends without a token.
    pub(crate) is_background: bool,
    /// Cached positions are shared within it.
    pub(crate) namespace: Namespace,
    /// The tenant that it belongs to.
    pub(crate) tenant: TenantId,
    /// Hash of the namespace and of the first block of tokens. Requests with the same value can
    /// probably share a prefix. A hint only.
    pub(crate) prefix_hash: u64,
    /// `None` while the step plan carries it to the executor.
    pub(crate) sampler: Option<Box<SamplerState>>,
    /// The sources of tokens that are proposed to follow; `None` before the first draft.
    pub(crate) drafts: Option<Box<Drafts>>,
    /// Maximum number of tokens to generate, limited to what context and pool can hold.
    pub(crate) max_tokens: usize,
    pub(crate) eos_ids: TokenSet,
    /// `None` unless an embedding was requested, and while the step plan carries it to the
    /// executor.
    pub(crate) pooler: Option<Pooler>,
    /// The request's options. `sampler` has the sampling parameters, and `max_tokens` above
    /// replaces the requested number.
    pub(crate) options: RequestOptions,
    /// Prompt log-probabilities, until they were sent.
    pub(crate) prompt_logprobs: Option<PromptLogprobs>,
    /// Its entry in the counts of requests. Declared before `events`, so that a caller who finds
    /// the channel closed finds the request counted as ended.
    pub(crate) record: RequestRecord,
    /// Carries events to the caller.
    pub(crate) events: EventSender,
    /// Submission, deadlines and milestones.
    pub(crate) times: Times,
    /// Number of prompt tokens found in the cache when it first ran; `None` before that.
    pub(crate) cached_tokens: Option<usize>,
    /// Number of leading tokens of its prompt that were cached when it was submitted, or had been
    /// committed when it was preempted. It can be evicted while it waits.
    pub(crate) found: usize,
    /// KV of its prompt that is loaded instead of computed; `None` once it is not needed any
    /// longer.
    pub(crate) stored: Option<StoredKv>,
    /// Blocks and positions that it holds while it runs.
    pub(crate) held: Held,
    /// The right to use the blocks of the pin budget, if its prompt needs them.
    pub(crate) loan: Option<BudgetLoan>,
    /// Its share of its quota, if it has one.
    pub(crate) share: Option<QuotaShare>,
    /// The turn of a session, if the request is one.
    pub(crate) turn: Option<Arc<Turn>>,
    /// Remembers its prompt for estimates until it ends.
    pub(crate) _pending: Option<Arc<PendingPrompt>>,
    /// Whether it is part of the step in flight.
    pub(crate) in_step: bool,
    /// Whether a token of it is being sampled outside of a step. Until that has ended, it takes
    /// part in no step.
    pub(crate) is_sampling: bool,
    /// Set if it must end before it is complete.
    pub(crate) end: Option<Ending>,
}

/// Why a sequence ends before it is complete.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Ending {
    /// The caller dropped the stream.
    Canceled,
    /// It fails with this error.
    Failed(EngineError),
}

/// The error of a sequence whose logits cannot be sampled from.
pub(crate) fn unusable_logits(failure: &SamplingError) -> EngineError {
    let reason = failure.to_string();
    match failure {
        SamplingError::ProcessorFailed { .. } => EngineError::LogitsProcessor { reason },
        SamplingError::ProcessorBusy { .. } => EngineError::ProcessorBusy { reason },
        _ => EngineError::InvalidLogits { reason },
    }
}

/// Submission, deadlines and milestones of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) submitted: Instant,
    /// When it times out in the queue.
    pub(crate) queue_deadline: Option<Instant>,
    /// When it times out, queued or running.
    pub(crate) deadline: Option<Instant>,
    /// When it first left the queue.
    pub(crate) started: Option<Instant>,
    /// When its first token was sampled.
    pub(crate) first_token: Option<Instant>,
    /// When its last token so far was sampled.
    pub(crate) last_token: Option<Instant>,
}

/// Prompt log-probabilities, collected over the prefill chunks.
#[derive(Debug)]
pub(crate) struct PromptLogprobs {
    /// Number of most likely alternatives to report for each token.
    pub(crate) top: usize,
    /// The entries so far, in order of position.
    pub(crate) gathered: Vec<Option<TokenLogprob>>,
}

/// The limits and rights that a request got when it was validated.
#[derive(Debug, Default)]
pub(crate) struct Terms {
    /// Number of the answer among several to the same prompt, from 0.
    pub(crate) choice: u64,
    /// Maximum number of tokens to generate, limited to what context and pool can hold.
    pub(crate) max_tokens: usize,
    /// The right to use the blocks of the pin budget, if the prompt needs them.
    pub(crate) loan: Option<BudgetLoan>,
    /// The request's share of its quota, if it has one.
    pub(crate) share: Option<QuotaShare>,
    /// Positions per block.
    pub(crate) block_size: usize,
    /// The bins of coordinates and sizes, if the request may generate some.
    pub(crate) bins: Option<RegionBins>,
    /// Cost of encoding its images, as a number of tokens to compute.
    pub(crate) encoding: usize,
    /// Number of leading tokens of its prompt that are cached, according to the last look-up.
    pub(crate) found: usize,
    /// Remembers its prompt for estimates; `None` if it is not added to the cache.
    pub(crate) pending: Option<Arc<PendingPrompt>>,
    /// [`Sequence::is_background`].
    pub(crate) is_background: bool,
}

impl Sequence {
    /// A waiting request.
    pub(crate) fn new(
        id: u64,
        request: SequenceRequest,
        terms: Terms,
        record: RequestRecord,
        events: EventSender,
        submitted: Instant,
    ) -> Sequence {
        let Terms { choice, max_tokens, loan, share, block_size, .. } = terms;
        let Terms { bins, encoding, found, pending, is_background, .. } = terms;
        let SequenceRequest { tokens, images, namespace, eos_ids, stored, turn, mut options } =
            request;
        let stored = stored.filter(|_| !options.needs_whole_prompt());
        let mut prefix_hash = DefaultHasher::new();
        namespace.hash(&mut prefix_hash);
        tokens[..tokens.len().min(block_size)].hash(&mut prefix_hash);
        let sampler = SamplerState::new(options.sampling.clone(), &tokens);
        let sampler = match bins {
            Some(bins) => sampler.with_regions(bins),
            None => sampler,
        };
        let sampler = if choice > 0 { sampler.choice(choice) } else { sampler };
        let gathered = |top| PromptLogprobs { top, gathered: Vec::new() };
        Sequence {
            id,
            prompt_len: tokens.len(),
            sampler: Some(Box::new(sampler)),
            drafts: None,
            tokens,
            images: SequenceImages::new(images),
            encoding,
            is_background,
            namespace,
            tenant: TenantId::new(options.tenant.as_deref()),
            prefix_hash: prefix_hash.finish(),
            max_tokens,
            eos_ids,
            pooler: options.pooling.map(Pooler::new),
            // Once they are reported, the prompt may be read from the cache.
            prompt_logprobs: options.prompt_logprobs.take().map(gathered),
            record,
            events,
            times: Times {
                submitted,
                queue_deadline: options.queue_timeout.and_then(|t| submitted.checked_add(t)),
                deadline: options.timeout.and_then(|t| submitted.checked_add(t)),
                started: None,
                first_token: None,
                last_token: None,
            },
            cached_tokens: None,
            found,
            stored,
            options,
            held: Held::default(),
            loan,
            share,
            turn,
            _pending: pending,
            in_step: false,
            is_sampling: false,
            end: None,
        }
    }

    /// Releases the blocks that the request holds, because it has ended. If it is a complete turn
    /// of a session, the session keeps its prefix and its last block.
    pub(crate) fn release(&mut self, is_complete: bool, now: Instant) {
        let held = mem::take(&mut self.held);
        self.loan = None;
        self.share = None;
        let Some(turn) = self.turn.take() else { return };
        if !is_complete {
            return turn.abandon(now);
        }
        let cached_tokens = self.cached_tokens.unwrap_or_default();
        let (tokens, images) = (Arc::clone(&self.tokens), Arc::clone(self.images.all()));
        let (content, prompt_tokens) = (SessionContent { tokens, images }, self.prompt_len);
        turn.complete(TurnEnd { content, prompt_tokens, cached_tokens }, now);
        // With a recurrent state, the next turn resumes from a checkpoint, not in this block.
        let reserved = held.reserved.filter(|_| held.state.slot.is_none());
        if let Some(prefix) = held.lease {
            let after = &self.tokens[prefix.len()..held.computed.max(prefix.len())];
            let hold = SessionHold::new(prefix, after, reserved);
            turn.keep(hold.with_checkpoint(held.state.of_session));
        }
    }

    /// The block in which the turn before ended, if the request is a turn of a session and
    /// continues in it after the prefix of `held`. Returns it with the number of its positions that
    /// are used.
    pub(crate) fn partial_block(&self, held: &Held) -> Option<(BlockLease, usize)> {
        let (turn, prefix) = self.turn.as_ref().zip(held.lease.as_ref())?;
        // Stored KV is loaded into whole blocks.
        if self.bypasses_match() || self.stored_after(prefix.len(), prefix.len()) > 0 {
            return None;
        }
        // The last position is computed in any case, because its logits are needed.
        let rest = self.tokens.get(prefix.len()..self.tokens.len() - 1)?;
        turn.take_partial(prefix, rest)
    }

    /// Number of tokens generated so far.
    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Number of tokens that it may still generate.
    pub(crate) fn remaining(&self) -> usize {
        self.max_tokens.saturating_sub(self.generated())
    }

    /// Number of tokens that it is expected to generate still, at least 1.
    pub(crate) fn expected(&self, forecast: DecodeForecast) -> usize {
        forecast.remaining(self.answer_limit(), self.generated())
    }

    /// Number of tokens that it may generate still, at least 1; see [`DecodeForecast::likely`]. The
    /// quantile differs from one request to the next and covers all values evenly.
    pub(crate) fn likely(&self, forecast: DecodeForecast) -> usize {
        const GOLDEN_RATIO: f64 = 0.618_033_988_749_895;
        let quantile = (self.id as f64 * GOLDEN_RATIO).fract();
        forecast.likely(self.answer_limit(), self.generated(), quantile)
    }

    /// What limits the length of its answer.
    pub(crate) fn answer_limit(&self) -> AnswerLimit {
        match self.options.max_tokens.or(self.options.pooling.map(|_| 1)) {
            Some(_) => AnswerLimit::Requested(self.max_tokens),
            None => AnswerLimit::Open(self.max_tokens),
        }
    }

    /// Whether the whole prompt must be computed even if it is cached.
    pub(crate) fn bypasses_match(&self) -> bool {
        self.prompt_logprobs.is_some() || self.options.needs_whole_prompt()
    }

    /// Number of positions whose state is computed, also by the step in flight.
    pub(crate) fn passed(&self) -> usize {
        self.held.computed.max(self.held.state.planned)
    }

    /// Whether the positions that it computes are added to the cache, so that others can share
    /// them.
    pub(crate) fn writes_cache(&self) -> bool {
        !self.options.skip_writing_prefix_cache
    }

    /// The quota that it is charged to.
    pub(crate) fn quota_id(&self) -> Option<QuotaId> {
        self.share.as_ref().map(QuotaShare::id)
    }

    /// Whether it is stalled by a slow consumer: its event channel has no room for another step.
    pub(crate) fn is_stalled(&self) -> bool {
        !self.events.has_room()
    }

    /// How it ends when it has timed out.
    pub(crate) fn timed_out(&self, now: Instant) -> Ending {
        let elapsed = now.saturating_duration_since(self.times.submitted);
        let total = self.times.deadline.is_some_and(|deadline| deadline <= now);
        Ending::Failed(if total {
            EngineError::Timeout { elapsed }
        } else {
            EngineError::QueueTimeout { waited: elapsed }
        })
    }

    /// What step planning needs to know about it, when `computed` positions are in the KV store
    /// after the step's loads. While there is more to be loaded, it takes no part in steps.
    /// `cache_logits` is the same value that [`Sequence::row_task`] will get.
    pub(crate) fn view(
        &self,
        spec: &BackendSpec,
        arrival: u64,
        computed: usize,
        cache_logits: bool,
    ) -> SequenceView {
        let all_logits = self.prompt_logprobs.is_some();
        let (chunk_rows, last_rows) = match self.options.pooling {
            _ if self.is_background => (LogitRows::None, LogitRows::None),
            Some(Pooling::Last) => (LogitRows::None, LogitRows::LastHidden),
            Some(_) => (LogitRows::AllHidden, LogitRows::AllHidden),
            None if self.options.regions => (LogitRows::None, LogitRows::Regions),
            None if all_logits => (LogitRows::All, LogitRows::All),
            None => {
                let draw = if spec.draws { self.next_draw(cache_logits) } else { None };
                (LogitRows::None, draw.map_or(LogitRows::Last, LogitRows::Drawn))
            }
        };
        let (image, after) = self.images.next_whole(computed).unzip();
        let not_encoded = self.images.next_to_encode(computed).map(|image| image.start);
        let limit = after.flatten().into_iter().chain(not_encoded).min();
        let image_limit = limit.map_or(usize::MAX, |limit| limit.saturating_sub(computed));
        SequenceView {
            computed,
            tokens: self.tokens.len(),
            committed: self.held.committed(),
            covered: self.held.table.len() * spec.block_size,
            last_step: self.held.last_step,
            arrival,
            class: self.options.priority,
            tenant: self.tenant,
            chunk_max: match self.is_background {
                true => image_limit.min(BACKGROUND_CHUNK),
                false if all_logits => LOGIT_ROWS_MAX,
                false => image_limit,
            },
            image: match spec.whole_prompts {
                true => Some((0, self.tokens.len())),
                false => image.map(|image| (image.start, image.end)),
            },
            chunk_rows,
            last_rows,
            paused: self.end.is_some()
                || image_limit == 0
                || self.is_sampling
                || self.is_stalled()
                || self.held.state.load.is_some()
                || computed < self.loadable().end * spec.block_size,
        }
    }

    /// How the backend draws the next token, in the step that computes the last of its tokens;
    /// `None` if the whole row is needed.
    fn next_draw(&self, cache_logits: bool) -> Option<Draw> {
        let is_cached = cache_logits && self.generated() == 0;
        self.sampler.as_ref().filter(|_| !is_cached)?.next_draw()
    }

    /// What to do with the output of its tokens `start..start + count`. `cache_logits` requests the
    /// logits of the prompt's last position.
    pub(crate) fn row_task(&mut self, start: usize, count: usize, cache_logits: bool) -> RowTask {
        if self.is_background {
            return RowTask::default();
        }
        if self.options.pooling.is_some() {
            return RowTask { pooler: self.pooler.take(), ..RowTask::default() };
        }
        let end = start + count;
        let return_logits = cache_logits && end == self.prompt_len && self.generated() == 0;
        let sampler = if end == self.tokens.len() { self.sampler.take() } else { None };
        let prompt = self.prompt_logprobs.as_ref().map(|wanted| PromptTargets {
            tokens: self.tokens[start + 1..self.tokens.len().min(end + 1)].to_vec(),
            top: wanted.top,
        });
        RowTask { sampler, return_logits, prompt, ..RowTask::default() }
    }

    /// Releases every block. Its positions are recomputed later.
    pub(crate) fn release_blocks(&mut self) {
        debug_assert!(!self.in_step, "a step still reads its blocks");
        debug_assert!(!self.is_sampling, "its sampler is away");
        self.held = Held::default();
        if let Some(wanted) = &mut self.prompt_logprobs {
            wanted.gathered.clear();
        }
        self.pooler = self.options.pooling.map(Pooler::new);
    }
}

/// However a request ends, its span gets its token counts and times.
impl Drop for Sequence {
    fn drop(&mut self) {
        let span = &self.record.span;
        if span.is_disabled() {
            return;
        }
        let record_ms = |field, moment: Option<Instant>| {
            if let Some(moment) = moment {
                let since = moment.saturating_duration_since(self.times.submitted);
                span.record(field, since.as_secs_f64() * 1e3);
            }
        };
        record_ms("queue_ms", self.times.started);
        record_ms("ttft_ms", self.times.first_token);
        span.record("cached_tokens", self.cached_tokens.unwrap_or(0));
        span.record("completion_tokens", self.generated());
    }
}
