//! The handle an embedding program holds.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use stolon_actors::{CoreHandle, SequenceRequest};
use stolon_kvcache::{Namespace, PinId, TreeDump};
use stolon_model::{Detokenizer, StopStrings};

use crate::stream::StreamParts;
use crate::text::Text;
use crate::{
    AdmissionPolicy, AuditReport, BestOf, CacheEvents, CacheStats, ChatMessage, EngineBuilder,
    EngineStats, Error, ModelInfo, Pin, Request, SamplingParams, TokenStream,
};

/// A running engine. Clones share it; when the last clone and the last stream are gone, it stops
/// by itself.
///
/// An engine runs on the tokio runtime it was built on, which must outlive it, and on threads of
/// its own. It has no global state: several engines in one process know nothing of each other.
#[derive(Clone, Debug)]
pub struct Engine {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    core: CoreHandle,
    text: Text,
    info: ModelInfo,
}

impl Engine {
    pub(crate) fn new(core: CoreHandle, text: Text, info: ModelInfo) -> Engine {
        Engine { inner: Arc::new(Inner { core, text, info }) }
    }

    /// Starts configuring an engine.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::new()
    }

    /// Lets a request in and returns its events.
    ///
    /// Renders, tokenises, checks and counts the uncached part in the calling task, without
    /// waiting; so an engine that is full says so at once.
    ///
    /// # Errors
    /// Every way a request can be wrong, [`Error::Overloaded`] and [`Error::EngineStopped`].
    pub fn generate(&self, request: Request) -> Result<TokenStream, Error> {
        let (sequence, parts) = self.prepare(request)?;
        Ok(TokenStream::new(self.inner.core.submit(sequence)?, parts))
    }

    /// Lets `count` requests for the same answer in: their prompt is computed once, and what is
    /// cached of it is shared. Where the sampling has a seed, each draws from the seed after its
    /// predecessor's.
    ///
    /// # Errors
    /// As [`Engine::generate`]; then none of them is let in.
    pub fn generate_choices(
        &self,
        request: Request,
        count: usize,
    ) -> Result<Vec<TokenStream>, Error> {
        let (sequence, parts) = self.prepare(request)?;
        let sequences = self.inner.core.submit_choices(sequence, count)?;
        let stream = |sequence| TokenStream::new(sequence, parts.clone());
        Ok(sequences.into_iter().map(stream).collect())
    }

    /// Generates `candidates` answers to one request and keeps the `count` best of them: those
    /// with the highest log-probability per token, as the model gives it before temperature,
    /// penalties and bias. Of equal ones the earlier is the better. The prompt is computed once.
    ///
    /// Candidates only differ where the sampling has a temperature.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] when `count` is 0 or above `candidates`, those of
    /// [`Engine::generate_choices`], and whatever a candidate ends with; the others are then
    /// cancelled.
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
        let asked = request.logprobs.or(request.sampling.logprobs);
        request.logprobs = Some(asked.unwrap_or(0));
        let streams = self.generate_choices(request, candidates)?;
        let told = try_join_all(streams.into_iter().map(TokenStream::collect_text)).await?;
        let mut best = BestOf::choose(told, count);
        if asked.is_none() {
            best.completions.iter_mut().for_each(|kept| kept.logprobs = Vec::new());
        }
        Ok(best)
    }

    /// Turns a request into what the core takes and what its stream needs.
    fn prepare(&self, request: Request) -> Result<(SequenceRequest, StreamParts), Error> {
        let submitted = Instant::now();
        let text = &self.inner.text;
        let tokens = text.prompt_tokens(&request)?;
        if !request.stop.is_empty() {
            // Stop strings are found in text, so there must be some.
            text.tokenizer()?;
        }
        if let Some(max_tokens) = request.max_tokens.filter(|&max_tokens| max_tokens == 0) {
            return Err(Error::invalid("max_tokens", "at least 1", max_tokens));
        }
        let stop_strings = StopStrings::new(request.stop.iter().cloned(), false)?;
        let eos_token_ids =
            if request.ignore_eos { Vec::new() } else { text.eos_token_ids().to_vec() };
        let mut stop_ids = eos_token_ids.clone();
        stop_ids.extend(&request.stop_ids);
        let mut sampling = request.sampling;
        sampling.logprobs = request.logprobs.or(sampling.logprobs);
        let prompt_tokens = tokens.len();
        let sequence = SequenceRequest {
            tokens,
            namespace: namespace(request.cache_salt.as_deref()),
            sampling,
            max_tokens: request.max_tokens.unwrap_or(Request::DEFAULT_MAX_TOKENS),
            stop_ids,
            prompt_logprobs: request.prompt_logprobs,
            priority: request.priority,
            queue_timeout: request.queue_timeout,
            timeout: request.timeout,
        };
        let detokenizer = text.tokenizer().ok().cloned();
        let parts = StreamParts {
            detokenizer: detokenizer.map(|t| Detokenizer::continuing(t, true)),
            stops: request.stop,
            stop_strings,
            eos_token_ids,
            stop_ids: request.stop_ids,
            prompt_tokens,
            submitted,
        };
        Ok((sequence, parts))
    }

    /// Computes a prompt and keeps it cached, so that requests which start with it find it there.
    /// Returns its length in tokens. Only whole blocks are kept; they may be evicted like any.
    ///
    /// # Errors
    /// As [`Engine::generate`], and whatever its stream ends with.
    pub async fn warm(&self, request: Request) -> Result<usize, Error> {
        let stream = self.generate(request.max_tokens(1))?;
        let prompt_tokens = stream.prompt_tokens();
        stream.collect_text().await?;
        Ok(prompt_tokens)
    }

    /// How many of the request's prompt tokens are in the cache now: lock-free, and without any
    /// effect on the cache. A hint: it may change before the request runs.
    ///
    /// # Errors
    /// Those of rendering and tokenising the prompt.
    pub fn query_match_len(&self, request: &Request) -> Result<usize, Error> {
        let tokens = self.prompt_tokens(request)?;
        let namespace = namespace(request.cache_salt.as_deref());
        Ok(self.inner.core.query_match_len(&namespace, &tokens))
    }

    /// Keeps what is cached of the request's prompt from being evicted, for `ttl` or until
    /// [`Engine::unpin`]; [`Engine::warm`] computes it first. A flush ends all pins, and so does
    /// a failure after which the engine starts again.
    ///
    /// # Errors
    /// Those of rendering and tokenising the prompt, [`Error::Pin`] when nothing of it is cached
    /// or [`EngineBuilder::pin_budget`] would be exceeded, [`Error::Interrupted`],
    /// [`Error::EngineStopped`].
    pub async fn pin(&self, request: &Request, ttl: Option<Duration>) -> Result<PinId, Error> {
        let tokens = self.prompt_tokens(request)?;
        let namespace = namespace(request.cache_salt.as_deref());
        Ok(self.inner.core.pin(namespace, tokens, ttl).await?)
    }

    /// Ends a pin; whether there was one of this name.
    ///
    /// # Errors
    /// [`Error::Interrupted`], [`Error::EngineStopped`].
    pub async fn unpin(&self, id: PinId) -> Result<bool, Error> {
        Ok(self.inner.core.unpin(id).await?)
    }

    /// All pins, oldest first.
    ///
    /// # Errors
    /// [`Error::Interrupted`], [`Error::EngineStopped`].
    pub async fn pins(&self) -> Result<Vec<Pin>, Error> {
        Ok(self.inner.core.pins().await?.into_iter().map(Pin::from).collect())
    }

    /// What is cached, and every change from now on, in a queue of at most `capacity` events. The
    /// engine never waits for its reader.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] when `capacity` is 0, [`Error::Interrupted`],
    /// [`Error::EngineStopped`].
    pub async fn events(&self, capacity: usize) -> Result<CacheEvents, Error> {
        Ok(CacheEvents::new(self.inner.core.events(capacity).await?))
    }

    /// Numbers about the prefix cache.
    ///
    /// # Errors
    /// [`Error::Interrupted`], [`Error::EngineStopped`].
    pub async fn cache_stats(&self) -> Result<CacheStats, Error> {
        Ok(self.inner.core.cache_report().await?.into())
    }

    /// A picture of the prefix tree, taken beside the running engine, in time and memory in
    /// proportion to its nodes; [`TreeDump::to_graphviz`] draws it.
    ///
    /// # Errors
    /// [`Error::Interrupted`], [`Error::EngineStopped`].
    pub fn dump(&self) -> Result<TreeDump, Error> {
        Ok(self.inner.core.dump()?)
    }

    /// The prompt's tokens, as [`Engine::generate`] would compute them.
    ///
    /// # Errors
    /// Those of rendering and tokenising the prompt.
    pub fn prompt_tokens(&self, request: &Request) -> Result<Vec<u32>, Error> {
        self.inner.text.prompt_tokens(request)
    }

    /// Counts and gauges, without waiting.
    pub fn stats(&self) -> EngineStats {
        self.inner.core.stats().into()
    }

    /// What the engine runs.
    pub fn model_info(&self) -> &ModelInfo {
        &self.inner.info
    }

    /// The sampling that the model's makers recommend; greedy where they say nothing. Requests
    /// are greedy unless told otherwise.
    pub fn recommended_sampling(&self) -> SamplingParams {
        let model = self.inner.text.model();
        model.map(|model| model.recommended_sampling().clone()).unwrap_or_default()
    }

    /// The admission policy in use.
    pub fn admission(&self) -> AdmissionPolicy {
        self.inner.core.policy()
    }

    /// Changes the admission policy; what waits is ordered by it from now on.
    pub fn set_admission(&self, policy: AdmissionPolicy) {
        self.inner.core.set_policy(policy);
    }

    /// Checks all bookkeeping: blocks, tree, leases.
    ///
    /// # Errors
    /// [`Error::Audit`] with what is wrong, [`Error::Interrupted`], [`Error::EngineStopped`].
    pub async fn audit(&self) -> Result<AuditReport, Error> {
        Ok(self.inner.core.audit().await?.into())
    }

    /// Empties the prefix cache, except what running requests use, and ends all pins.
    ///
    /// # Errors
    /// [`Error::Interrupted`], [`Error::EngineStopped`].
    pub async fn flush(&self) -> Result<(), Error> {
        Ok(self.inner.core.flush().await?)
    }

    /// Stops the engine: what runs or waits ends with [`Error::EngineStopped`], and the model's
    /// memory is given back before this returns.
    pub async fn shutdown(&self) {
        self.inner.core.shutdown().await;
    }

    /// Waits until nothing runs or waits, for at most `limit`; then stops the engine. Stop
    /// sending requests before.
    pub async fn drain(&self, limit: Duration) {
        self.inner.core.idle(limit).await;
        self.inner.core.shutdown().await;
    }

    /// Token ids of a text, with the tokens the model wants around a text if `add_special`.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`], [`Error::Tokenizer`].
    pub fn tokenize(&self, text: &str, add_special: bool) -> Result<Vec<u32>, Error> {
        Ok(self.inner.text.tokenizer()?.encode(text, add_special)?)
    }

    /// Text of token ids; special tokens are left out if `skip_special`.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`].
    pub fn detokenize(&self, ids: &[u32], skip_special: bool) -> Result<String, Error> {
        Ok(self.inner.text.tokenizer()?.decode(ids, skip_special))
    }

    /// The prompt text of a conversation, rendered with the model's chat template, up to where
    /// the assistant is to answer.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`].
    pub fn render_chat(
        &self,
        messages: &[ChatMessage],
        tools: Option<&serde_json::Value>,
    ) -> Result<String, Error> {
        self.inner.text.render(messages, tools)
    }
}

fn namespace(salt: Option<&str>) -> Namespace {
    match salt {
        Some(salt) => Namespace::builder().salt(salt).build(),
        None => Namespace::default(),
    }
}
