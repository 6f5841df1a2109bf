//! [`Engine`], the handle through which a program uses a running engine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::{BoxFuture, try_join_all};
use stolon_actors::EngineHandle;
use stolon_backend::Pooling;
use stolon_checkpoint::SuppressedTokens;
use stolon_cpu::Head;
use stolon_scheduler::{
    AdmissionPolicy, AuditReport, EngineHealth, EngineHistograms, EngineStats, SequenceRequest,
    StoredKv, Timings, TokenSet,
};
use stolon_text::{AnswerParser, StopStrings};

use crate::adapters::AdapterTable;
use crate::after::After;
use crate::cache_miss::{MissLog, Missed};
use crate::marks::{Marked, Marking};
use crate::min_tokens::MinTokens;
use crate::next_turn::{NextTurn, NextTurns};
use crate::prompt::{PromptTokens, Prompts};
use crate::repetition::RepetitionDetector;
use crate::request::Prompt;
use crate::stream::AnswerState;
use crate::suppressed::Suppressed;
use crate::text::Exchange;
use crate::tiers::EngineTiers;
use crate::{
    BestOf, CacheMiss, ChatMessage, Completion, EngineBuilder, Error, Estimate, ModelInfo,
    Namespace, PrefixMatch, Request, SamplingParams, SharedProcessor, TokenStream,
};

mod adapters;
mod cache;
mod embed;
mod labels;
mod score;
mod sessions;
mod stop;

pub use cache::Cache;
pub use labels::LabelScores;
pub use score::{Ranked, Scores};
pub use sessions::{SessionOptions, Sessions};

/// Maximum size in bytes of the part of an expected answer that is used.
const PREDICTION_BYTES: usize = 128 << 10;

/// A running engine. Clones share it. It stops when the last clone and the last stream are dropped.
///
/// An engine runs on the tokio runtime on which it was built, which must outlive it, and on threads
/// of its own. Several engines can run in one process. The crate documentation has more on
/// runtimes, threads, drop and cancellation.
#[derive(Clone, Debug)]
pub struct Engine {
    pub(crate) inner: Arc<Inner>,
}

/// The state that the clones of an engine share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) handle: EngineHandle,
    pub(crate) prompts: Prompts,
    pub(crate) sampling: DefaultSampling,
    pub(crate) info: ModelInfo,
    /// What is computed from pooled hidden states; `None` if they are the result.
    pub(crate) head: Option<Head>,
    /// How hidden states are pooled for scores; `None` if the model computes none.
    pub(crate) score_pooling: Option<Pooling>,
    /// [`EngineBuilder::namespace_key`], or the one of the tiers.
    pub(crate) namespace_key: Option<[u8; 32]>,
    pub(crate) tiers: EngineTiers,
    pub(crate) adapters: AdapterTable,
    pub(crate) misses: Arc<MissLog>,
    /// `None` if next turns are not computed in advance.
    pub(crate) next_turns: Option<NextTurns>,
}

/// The sampling parameters of requests that give none.
#[derive(Clone, Debug, Default)]
pub(crate) struct DefaultSampling {
    /// [`Engine::recommended_sampling`].
    pub(crate) recommended: SamplingParams,
    /// [`Engine::chat_sampling`].
    pub(crate) chat: SamplingParams,
    /// The tokens that the model must not generate, whatever a request says; `None` if it may
    /// generate all.
    pub(crate) suppressed: Option<Arc<SuppressedTokens>>,
}

impl Engine {
    pub(crate) fn new(inner: Inner) -> Engine {
        Engine { inner: Arc::new(inner) }
    }

    /// Starts configuring an engine.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::new()
    }

    /// Submits a request and returns its event stream.
    ///
    /// The prompt is rendered and tokenized. Conversations and long texts are processed on blocking
    /// threads of the engine's runtime, so that the calling task does not block. Then the request is
    /// validated and its uncached part is counted. An engine whose admission queue is full refuses
    /// at once.
    ///
    /// Cancel safe: if the future is dropped before it completes, nothing is submitted.
    ///
    /// # Errors
    /// Every way in which a request can be invalid, and [`EngineError`](crate::EngineError)'s
    /// `Overloaded`, `QuotaExceeded`, `Draining`, `Interrupted`, `BackendHung` and `Stopped`.
    pub async fn generate(&self, request: Request) -> Result<TokenStream, Error> {
        let (request, answer) = self.prepare(request).await?;
        let turn = request.turn.clone().map(|turn| (turn, request.content()));
        Ok(TokenStream::new(self.inner.handle.submit(request)?, answer, turn))
    }

    /// Submits a request and returns its whole answer.
    ///
    /// ```no_run
    /// # async fn complete(engine: stolon::Engine) -> Result<(), stolon::Error> {
    /// let answer = engine.complete(stolon::Request::text("A stolon is").max_tokens(32)).await?;
    /// println!("{}", answer.text);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Engine::generate`], and the error that the request ends with.
    pub async fn complete(&self, request: Request) -> Result<Completion, Error> {
        self.generate(request).await?.collect_text().await
    }

    /// Submits `count` requests for the same prompt, which is computed once. If the request has a
    /// seed, each of the `count` requests uses its predecessor's seed plus 1. Log-probabilities of
    /// the prompt, if requested, come with the first stream.
    ///
    /// # Errors
    /// As [`Engine::generate`]; then none of them is submitted. `InvalidParameter` for several
    /// requests that are the turn of a session, which has one answer.
    pub async fn generate_choices(
        &self,
        request: Request,
        count: usize,
    ) -> Result<Vec<TokenStream>, Error> {
        if request.session.is_some() && count > 1 {
            return Err(Error::invalid("choices", "1 in a turn of a session", count));
        }
        if count == 1 {
            return Ok(vec![self.generate(request).await?]);
        }
        let (request, mut answer) = self.prepare(request).await?;
        // Nobody knows which of the answers the conversation goes on with.
        answer.next_turn = None;
        let sequences = self.inner.handle.submit_choices(request, count)?;
        let stream = |sequence| TokenStream::new(sequence, answer.clone(), None);
        Ok(sequences.into_iter().map(stream).collect())
    }

    /// Generates `candidates` answers to one request and returns the `count` best: those with the
    /// highest mean log-probability per token under the model's own distribution, before
    /// temperature, penalties and bias. Among equals the earlier one wins. The prompt is computed
    /// once.
    ///
    /// Candidates only differ if the sampling has a temperature above 0.
    ///
    /// # Errors
    /// `InvalidParameter` if `count` is 0 or above `candidates`, the errors of
    /// [`Engine::generate_choices`], and the error of any candidate; the others are then canceled.
    pub async fn best_of(
        &self,
        mut request: Request,
        candidates: usize,
        count: usize,
    ) -> Result<BestOf, Error> {
        if count == 0 || count > candidates {
            let expected = format!("from 1 to {candidates}, the number of candidates");
            return Err(Error::invalid("count", expected, count));
        }
        let requested = request.logprobs.or(request.options.sampling.logprobs);
        request.logprobs = Some(requested.unwrap_or(0));
        let streams = self.generate_choices(request, candidates).await?;
        let completions = try_join_all(streams.into_iter().map(TokenStream::collect_text)).await?;
        let mut best = BestOf::choose(completions, count);
        if requested.is_none() {
            best.completions.iter_mut().for_each(|completion| completion.logprobs.clear());
        }
        Ok(best)
    }

    /// The namespace and the tokens of a request's prompt, rendered and tokenized on the calling
    /// thread.
    pub(crate) fn lookup(&self, request: &Request) -> Result<(Namespace, Vec<u32>), Error> {
        let namespace = self.namespace(request)?;
        Ok((namespace, self.inner.prompts.tokens_here(request)?))
    }

    /// Why a part of a prompt is not cached. `stored` is the number of leading tokens whose KV was
    /// read from outside of the pool.
    fn miss(
        &self,
        exchange: &Exchange,
        namespace: &Namespace,
        tokens: &[u32],
        stored: usize,
    ) -> Option<CacheMiss> {
        let (handle, context) = (&self.inner.handle, self.inner.handle.context());
        let PrefixMatch { cached, resume } = handle.query_resume(namespace, tokens);
        let found = PrefixMatch { cached: cached.max(stored), resume: resume.max(stored) };
        let evictions = context.gauges.evicted_blocks();
        let resume_max = |len| context.resume_max(len);
        let mut miss =
            self.inner.prompts.text.miss(exchange, tokens, found, resume_max, evictions)?;
        let time = |rate: f64| Duration::from_secs_f64(miss.lost_tokens as f64 / rate);
        miss.lost_time = context.prefill_rate().map(time);
        Some(miss)
    }

    /// Splits a request into the part that the engine computes and the state of its stream. The
    /// future is boxed, like the futures of [`EngineHandle`].
    fn prepare(
        &self,
        request: Request,
    ) -> BoxFuture<'_, Result<(SequenceRequest, AnswerState), Error>> {
        async move {
            let submitted = Instant::now();
            if !self.inner.info.generates {
                return Err(self.inner.info.not_generating());
            }
            if let Some(task) = &request.task {
                return Err(Error::invalid("task", "none, because nothing is embedded", task));
            }
            let request = self.appended(request).await?;
            let (mut request, namespace) = self.with_adapter(request).await?;
            let turn = self.begin_turn(&request, &namespace)?;
            let writes = !request.options.skip_writing_prefix_cache;
            let conversation = self.conversation(&request).filter(|_| writes);
            let marked = Marked::of(&request).filter(|_| writes);
            let prompt = self.inner.prompts.take_tokens(&mut request).await?;
            let text = &self.inner.prompts.text;
            let exchange = text.exchange(&request, &prompt);
            let format = request.answer_format.clone();
            if !request.stop.is_empty() {
                // Stop strings are searched in text.
                text.require_tokenizer()?;
            }
            let stop_strings = StopStrings::new(&*request.stop, false)?;
            let parser = request.answer_format.clone().filter(|_| !request.stop.is_empty());
            let parser = parser.map(|format| {
                AnswerParser::with_stops(format.as_ref().clone(), stop_strings.clone())
            });
            let eos_ids = if request.ignore_eos { TokenSet::default() } else { text.eos_ids() };
            let mut options = request.options;
            if !request.prompt_ends.as_slice().is_empty() {
                let given = options.stop_ids.as_slice().iter();
                let ends = given.chain(request.prompt_ends.as_slice()).copied();
                options.stop_ids = ends.collect();
            }
            options.sampling.logprobs = request.logprobs.or(options.sampling.logprobs);
            options.sampling.processor = request.processor.or(options.sampling.processor);
            let ends = eos_ids.as_slice().iter().chain(options.stop_ids.as_slice());
            let ends: Vec<u32> = ends.copied().collect();
            if let Some(grammar) = request.grammar {
                let (inner, client) = (options.sampling.processor.take(), options.tenant.clone());
                let prompts = &self.inner.prompts;
                let processor = prompts.grammar_processor(grammar, &ends, inner, client).await?;
                options.sampling.processor = Some(processor);
            }
            if let Some(text) = request.prediction.filter(|text| !text.is_empty()) {
                let most = text.len().min(PREDICTION_BYTES);
                let end = (0..=most).rfind(|&end| text.is_char_boundary(end)).unwrap_or(0);
                let text = text[..end].to_owned();
                let client = options.tenant.clone();
                let expected = self.inner.prompts.encode(text, false, client).await?;
                options.prediction = expected.into();
            }
            let tokens = Arc::new(prompt.tokens);
            options.marks = self.prefix_marks(marked, &tokens).await;
            let marking = (!options.marks.is_empty()).then(|| Marking {
                handle: self.inner.handle.clone(),
                namespace,
                tokens: Arc::clone(&tokens),
                marks: Arc::clone(&options.marks),
                tenant: options.tenant.clone(),
            });
            if let Some(suppressed) = &self.inner.sampling.suppressed {
                let inner = options.sampling.processor.take();
                let rule = Suppressed { tokens: suppressed.clone(), prompt: tokens.clone() };
                options.sampling.processor = Some(SharedProcessor::new(After { inner, rule }));
            }
            if request.min_tokens > 0 {
                let inner = options.sampling.processor.take();
                let processor =
                    After { inner, rule: MinTokens { count: request.min_tokens, ends } };
                options.sampling.processor = Some(SharedProcessor::new(processor));
            }
            let images = request.placed;
            let detokenizer = text.detokenizer(&request.shown_tokens);
            let mut answer = AnswerState {
                text: detokenizer.map(|detokenizer| (detokenizer, stop_strings)),
                parser,
                format: request.answer_format,
                parts: None,
                recording: None,
                next_turn: None,
                missed: None,
                marking,
                repetition: request.end_repetition.then(RepetitionDetector::new),
                stops: request.stop,
                eos_ids: eos_ids.clone(),
                stop_ids: options.stop_ids.clone(),
                text_after: request.text_after,
                min_tokens: request.min_tokens,
                submitted,
                usage: crate::request::prompt_usage(&tokens, &images),
                timings: Timings::default(),
            };
            let sequence =
                SequenceRequest { tokens, images, namespace, eos_ids, stored: None, turn, options };
            let sequence = self.inner.handle.with_stored(sequence).await;
            if let Some(exchange) = exchange {
                let stored = sequence.stored.as_ref().map_or(0, StoredKv::kv_end);
                let miss = self.miss(&exchange, &sequence.namespace, &sequence.tokens, stored);
                let (log, tenant) = (&self.inner.misses, &sequence.options.tenant);
                answer.missed = miss.map(|miss| Missed::new(miss, log, tenant));
                if !sequence.options.skip_writing_prefix_cache {
                    let evictions = self.inner.handle.context().gauges.evicted_blocks();
                    answer.recording = text.recording(exchange, format, evictions);
                    let tokens = &sequence.tokens;
                    answer.next_turn = conversation
                        .and_then(|conversation| NextTurn::new(self, conversation, tokens));
                }
            }
            Ok((sequence, answer))
        }
        .boxed()
    }

    /// The tokens that this engine would have to compute for a request, and how long the request
    /// would wait, so that a router can choose between engines. Lock-free and without side effects;
    /// the numbers may change before a request runs. Takes a few microseconds, and up to two
    /// milliseconds while hundreds of requests wait.
    ///
    /// A prompt that is not token ids yet is rendered and tokenized on the calling thread; see
    /// [`Engine::tokenized`].
    ///
    /// # Errors
    /// The errors of rendering and tokenizing the prompt.
    pub fn estimate(&self, request: &Request) -> Result<Estimate, Error> {
        let (namespace, tokens) = self.lookup(request)?;
        let (handle, context) = (&self.inner.handle, self.inner.handle.context());
        let cached_tokens = handle.query_resume(&namespace, &tokens).resume;
        let expected = context.expected_match(&namespace, &tokens, cached_tokens);
        let (prompt_tokens, tokens) = (tokens.len(), Arc::new(tokens));
        let stored = self.inner.tiers.stored(&namespace, &tokens);
        let spared = expected.max(stored).max(cached_tokens);
        let work = context.uncached_work(&namespace, &tokens, spared);
        let now = Instant::now();
        let first_token = context.first_token_estimate(spared, work, &request.options, now);
        Ok(Estimate {
            prompt_tokens,
            cached_tokens,
            pending_tokens: expected - cached_tokens,
            stored_tokens: stored.saturating_sub(cached_tokens),
            queued_tokens: context.queued_tokens(),
            expected_first_token: first_token.map(|(total, _)| total),
            expected_wait: first_token.map(|(_, wait)| wait),
        })
    }

    /// The same request with its prompt as token ids, so that it is tokenized once for any number
    /// of [`Cache::query_match_len`], [`Engine::estimate`] and [`Engine::generate`], also of other
    /// engines that run the same model. With images, the tokens are for this engine only.
    ///
    /// # Errors
    /// The errors of rendering and tokenizing the prompt.
    pub async fn tokenized(&self, request: Request) -> Result<Request, Error> {
        let mut request = self.appended(request).await?;
        let (marked, conversation) = (Marked::of(&request), self.conversation(&request));
        let prompt = self.inner.prompts.take_tokens(&mut request).await?;
        let PromptTokens { tokens, exchange } = prompt;
        let (placed, prompt_ends) = (Arc::clone(&request.placed), request.prompt_ends.clone());
        let placed_marks = Arc::clone(&request.placed_marks);
        let kept = request.with_tokens(tokens);
        let mut request = Request { placed, placed_marks, exchange, prompt_ends, ..kept };
        request.conversation = conversation;
        if let Some(marked) = marked {
            request.marks = marked.marks.into();
            request.conversation = request.conversation.or(marked.conversation);
        }
        Ok(request)
    }

    /// The request before its prompt became token ids, if it is a conversation without images whose
    /// next turn is to be prepared.
    fn conversation(&self, request: &Request) -> Option<Arc<Request>> {
        self.inner.next_turns.as_ref()?;
        request.conversation.clone().or_else(|| match request.prompt() {
            Prompt::Chat(_) if !request.has_images() => Some(Arc::new(request.clone())),
            _ => None,
        })
    }

    /// The token ids of the prompt, as [`Engine::generate`] computes them.
    ///
    /// # Errors
    /// The errors of rendering and tokenizing the prompt.
    pub async fn prompt_tokens(&self, request: &Request) -> Result<Vec<u32>, Error> {
        let request = self.appended(request.clone()).await?;
        Ok(self.inner.prompts.tokens(&request).await?.tokens)
    }

    /// Whether the engine can answer requests now: it runs, restarts, hangs, drains or has stopped.
    /// Lock-free, for a server's health checks.
    pub fn health(&self) -> EngineHealth {
        self.inner.handle.health()
    }

    /// Counters and gauges, read without waiting.
    pub fn stats(&self) -> EngineStats {
        self.inner.handle.context().stats()
    }

    /// Distributions of the times and sizes of requests and steps, read without waiting.
    pub fn histograms(&self) -> EngineHistograms {
        self.inner.handle.context().gauges.histograms()
    }

    /// The model that the engine runs, and its sizes.
    pub fn model_info(&self) -> &ModelInfo {
        &self.inner.info
    }

    /// The sampling parameters that the model's authors recommend; greedy if they recommend none.
    /// They are not applied by default.
    pub fn recommended_sampling(&self) -> SamplingParams {
        self.inner.sampling.recommended.clone()
    }

    /// The sampling parameters for chats. They are those that the model's authors recommend; if
    /// they recommend none, temperature 0.8, top-k 40, top-p 0.95 and min-p 0.05, because small
    /// models often repeat themselves endlessly when they are decoded greedily. With a custom
    /// backend, greedy. They are not applied by default.
    pub fn chat_sampling(&self) -> SamplingParams {
        self.inner.sampling.chat.clone()
    }

    /// The admission policy in use.
    pub fn admission(&self) -> AdmissionPolicy {
        **self.inner.handle.context().policy.load()
    }

    /// Changes the admission policy, also for requests that are waiting already.
    pub fn set_admission(&self, policy: AdmissionPolicy) {
        self.inner.handle.context().policy.store(Arc::new(policy));
    }

    /// Verifies the accounting of blocks, tree and leases.
    ///
    /// # Errors
    /// `Audit` describes the first inconsistency; `Interrupted` and `Stopped`.
    pub async fn audit(&self) -> Result<AuditReport, Error> {
        Ok(self.inner.handle.audit().await?)
    }

    /// The token ids of a text. `add_special` adds the special tokens that the model expects around
    /// a text. A long text is tokenized on another thread.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`], [`Error::Tokenizer`].
    pub async fn tokenize(
        &self,
        text: impl Into<String>,
        add_special: bool,
    ) -> Result<Vec<u32>, Error> {
        self.tokenize_for(text, add_special, None).await
    }

    /// The same as [`Engine::tokenize`], for a client: the [`Request::tenant`] of its requests.
    /// Clients share the threads that tokenize fairly.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`], [`Error::Tokenizer`].
    pub async fn tokenize_for(
        &self,
        text: impl Into<String>,
        add_special: bool,
        client: Option<Arc<str>>,
    ) -> Result<Vec<u32>, Error> {
        self.inner.prompts.encode(text.into(), add_special, client).await
    }

    /// Whether the model was trained to fill gaps in texts ([`Request::infill`]): its tokenizer has
    /// the tokens for it.
    pub fn supports_infill(&self) -> bool {
        self.inner.prompts.text.infill_ends().is_ok()
    }

    /// Runs work that takes longer than about a millisecond and is not a step of the model, such as
    /// parsing a body of megabytes, on the threads on which the engine tokenizes large prompts.
    /// They have a low priority, so that steps are not delayed, and clients share them fairly;
    /// `client` is the [`Request::tenant`] of the client's requests. For servers around the engine.
    ///
    /// If the future is dropped before the work has begun, it is not done. A panic of the work is
    /// passed on.
    ///
    /// # Errors
    /// [`EngineError::Stopped`](crate::EngineError::Stopped) if the threads have ended.
    pub async fn long_work<T: Send + 'static>(
        &self,
        client: Option<Arc<str>>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        self.inner.prompts.long_work.run(client, work).await
    }

    /// The text of token ids. `skip_special` leaves special tokens out.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`].
    pub fn detokenize(&self, ids: &[u32], skip_special: bool) -> Result<String, Error> {
        self.inner.prompts.text.decode(ids, skip_special)
    }

    /// The spelling of a token in the vocabulary, such as `Ġthe`, which may differ from its text.
    /// `None` if the id has no text, or if the tokens of the model are bytes.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`].
    pub fn token_spelling(&self, id: u32) -> Result<Option<String>, Error> {
        self.inner.prompts.text.spelling(id)
    }

    /// The prompt text of a conversation, rendered with the model's chat template and ending where
    /// the assistant's answer begins. Renders on the calling thread.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`].
    pub fn render_chat(
        &self,
        messages: &[ChatMessage],
        tools: Option<&serde_json::Value>,
    ) -> Result<String, Error> {
        self.inner.prompts.text.render_chat(messages, tools)
    }
}
