//! Configures and starts an engine.

use std::path::{Path, PathBuf};
use std::time::Duration;

use stolon_actors::EngineHandle;
use stolon_backend::Backend;
use stolon_kvcache::EvictionOrder;
use stolon_model::{
    CpuBackend, CpuOptions, KvBudget, KvType, LoadOptions, LoadedModel, WeightType,
};
use stolon_scheduler::{AdmissionPolicy, EngineConfig, EvictionOrderFactory};
#[cfg(feature = "text")]
use stolon_text::TextModel;
use stolon_text::{TextSource, TokenizerSource};

use crate::prompt::Prompts;
use crate::text::Text;
use crate::{Engine, Error, EvictionPolicy, ModelInfo, ModelSource, SamplingParams};

/// The argument of [`EngineBuilder::model`]: text that is parsed when the engine is built, or a
/// parsed source.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ModelArg {
    /// The path of a model directory or `.gguf` file, a hub id, `random:PRESET` or `demo`.
    Text(String),
    /// A parsed source.
    Source(ModelSource),
}

impl From<&str> for ModelArg {
    fn from(text: &str) -> ModelArg {
        ModelArg::Text(text.to_owned())
    }
}

impl From<&String> for ModelArg {
    fn from(text: &String) -> ModelArg {
        ModelArg::Text(text.clone())
    }
}

impl From<&Path> for ModelArg {
    /// See [`ModelSource::from`].
    fn from(path: &Path) -> ModelArg {
        ModelArg::Source(path.into())
    }
}

impl From<PathBuf> for ModelArg {
    /// See [`ModelSource::from`].
    fn from(path: PathBuf) -> ModelArg {
        ModelArg::Source(path.into())
    }
}

impl From<String> for ModelArg {
    fn from(text: String) -> ModelArg {
        ModelArg::Text(text)
    }
}

impl From<ModelSource> for ModelArg {
    fn from(source: ModelSource) -> ModelArg {
        ModelArg::Source(source)
    }
}

/// A backend with the name, text layer and recommended sampling of its model.
struct Loaded {
    id: String,
    backend: Box<dyn Backend>,
    text: Text,
    recommended_sampling: SamplingParams,
}

/// Settings of an engine that is about to be started. Made with [`Engine::builder`].
///
/// One of [`model`](Self::model) and [`backend`](Self::backend) is required; each other setter
/// documents its default. Nothing is validated before [`build`](Self::build).
#[derive(Default)]
pub struct EngineBuilder {
    model: Option<ModelArg>,
    backend: Option<(String, Box<dyn Backend>)>,
    text: Option<Text>,
    kv_memory: Option<u64>,
    num_blocks: Option<usize>,
    block_size: Option<usize>,
    kv_type: Option<KvType>,
    threads: Option<usize>,
    weights: WeightType,
    config: EngineConfig,
}

impl std::fmt::Debug for EngineBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineBuilder")
            .field("model", &self.model)
            .field("backend", &self.backend.as_ref().map(|(id, _)| id))
            .field("kv_memory", &self.kv_memory)
            .field("num_blocks", &self.num_blocks)
            .field("block_size", &self.block_size)
            .field("kv_type", &self.kv_type)
            .field("threads", &self.threads)
            .field("weights", &self.weights)
            .field("config", &self.config)
            .finish()
    }
}

impl EngineBuilder {
    pub(crate) fn new() -> EngineBuilder {
        EngineBuilder::default()
    }

    /// The model to load. Either a [`ModelSource`], the path of a model directory or `.gguf` file, or
    /// text that is parsed by [`build`](Self::build):
    ///
    /// * the path of a Hugging Face model directory or of a `.gguf` file;
    /// * a hub id, `org/name` or `org/name@revision` (feature `hub`);
    /// * `random:PRESET`, random weights in the shape of a real model, for benchmarks;
    /// * `demo`, the built-in model (feature `demo-model`).
    ///
    /// A model without a tokenizer answers prompts of token ids only.
    ///
    /// Required unless [`backend`](Self::backend) is called.
    pub fn model(mut self, model: impl Into<ModelArg>) -> Self {
        self.model = Some(model.into());
        self
    }

    /// Runs a custom [`Backend`] instead of loading a model. `id` is the model's name in
    /// [`ModelInfo`].
    ///
    /// The backend's spec sets the number and the size of KV blocks, so
    /// [`model`](Self::model), [`kv_memory`](Self::kv_memory), [`num_blocks`](Self::num_blocks),
    /// [`block_size`](Self::block_size), [`kv_type`](Self::kv_type), [`threads`](Self::threads) and
    /// [`weights`](Self::weights) have no effect. Prompts must be token ids, and events carry no
    /// text, unless `text_model` is called too.
    pub fn backend(mut self, id: impl Into<String>, backend: Box<dyn Backend>) -> Self {
        self.backend = Some((id.into(), backend));
        self
    }

    /// The tokenizer and chat templates to use with a custom [`backend`](Self::backend). Default:
    /// none. Has no effect on a model that is loaded, which has its own.
    #[cfg(feature = "text")]
    pub fn text_model(mut self, model: TextModel) -> Self {
        self.text = Some(Text::new(model));
        self
    }

    /// Size of the KV cache in bytes. Default: half of the memory that is free after the model is
    /// loaded, at most 8 GiB ([`KvBudget::Auto`]).
    ///
    /// The memory is reserved at startup and becomes resident when blocks are first written.
    /// [`build`](Self::build) fails with [`Error::Load`] if the size is less than one block.
    pub fn kv_memory(mut self, bytes: u64) -> Self {
        self.kv_memory = Some(bytes);
        self
    }

    /// Size of the KV cache in blocks, at least 1. Takes precedence over
    /// [`kv_memory`](Self::kv_memory). Default: derived from `kv_memory`.
    pub fn num_blocks(mut self, count: usize) -> Self {
        self.num_blocks = Some(count);
        self
    }

    /// Number of positions per KV block: a power of two from 1 to 256. Default: 16.
    ///
    /// Prefixes are shared in whole blocks. Smaller blocks match longer prefixes; larger blocks
    /// need less bookkeeping.
    pub fn block_size(mut self, positions: usize) -> Self {
        self.block_size = Some(positions);
        self
    }

    /// Element type of the KV cache. Default: f32 for a model with f32 weights, bf16 for all
    /// others.
    pub fn kv_type(mut self, kv_type: KvType) -> Self {
        self.kv_type = Some(kv_type);
        self
    }

    /// Maximum number of tokens in one forward pass, prefill chunks and decodes together; at least
    /// 1. Default: 512.
    ///
    /// A longer prompt is computed in several chunks. A larger value can make prefill faster,
    /// but delays the next token of requests that are decoding.
    pub fn max_batched_tokens(mut self, tokens: usize) -> Self {
        self.config.max_batched_tokens = tokens;
        self
    }

    /// Maximum number of requests that run at the same time; at least 1. Default: 32.
    pub fn max_running(mut self, requests: usize) -> Self {
        self.config.max_running = requests;
        self
    }

    /// Maximum number of requests in the admission queue; at least 1. Default: 1,024.
    ///
    /// If the queue is full, [`Engine::generate`] fails with [`EngineError::Overloaded`].
    pub fn max_queued_requests(mut self, requests: usize) -> Self {
        self.config.max_queued_requests = requests;
        self
    }

    /// Maximum number of tokens to generate for a request that does not call
    /// [`Request::max_tokens`](crate::Request::max_tokens); at least 1. Default: none, as many as
    /// the context and the KV cache can hold.
    ///
    /// Without a number in the request, admission expects an answer as long as those of earlier
    /// requests without one, whatever this setting is.
    pub fn default_max_tokens(mut self, tokens: impl Into<Option<usize>>) -> Self {
        self.config.default_max_tokens = tokens.into();
        self
    }

    /// Maximum number of uncached prompt tokens in the admission queue; at least 1. Default:
    /// 1,048,576.
    ///
    /// If a request would exceed it, [`Engine::generate`] fails with [`EngineError::Overloaded`].
    /// While the queue is empty, a request of any size is accepted.
    ///
    /// Cached tokens do not count. A limit of a few thousand therefore accepts conversations whose
    /// history is cached and refuses those whose history was evicted, instead of letting them evict
    /// each other from a cache that is too small for all.
    pub fn max_queued_tokens(mut self, tokens: usize) -> Self {
        self.config.max_queued_tokens = tokens;
        self
    }

    /// Bound on overtaking, in uncached prompt tokens. Default: 4,096.
    ///
    /// Under every admission policy, before a request is admitted, at most this many uncached
    /// prompt tokens of later requests are admitted, plus as many as were waiting when the request
    /// arrived. 0 means strictly in order of arrival.
    pub fn max_overtake_tokens(mut self, tokens: usize) -> Self {
        self.config.max_overtake_tokens = tokens;
        self
    }

    /// Number of unread events of a [`TokenStream`](crate::TokenStream) after which its request is
    /// paused; at least 8. Default: 256.
    ///
    /// A paused request continues when its events are read. Other requests are not affected.
    pub fn event_capacity(mut self, events: usize) -> Self {
        self.config.event_capacity = events;
        self
    }

    /// Whether the KV of computed prompts and answers is cached for later requests that start with
    /// the same tokens. Default: true.
    pub fn prefix_caching(mut self, on: bool) -> Self {
        self.config.prefix_caching = on;
        self
    }

    /// Which cached blocks are evicted first when the KV cache is full. Default:
    /// [`EvictionPolicy::Lru`].
    pub fn eviction_policy(mut self, policy: EvictionPolicy) -> Self {
        self.config.eviction_policy = policy;
        self
    }

    /// A custom eviction order, used instead of a built-in [`EvictionPolicy`]. Default: none.
    ///
    /// `make` is called at startup and after each restart of the engine, because a restarted engine
    /// has a new, empty cache. The order's methods run while the engine changes the prefix tree.
    /// They should return quickly and must not panic.
    ///
    /// ```
    /// use stolon::{Engine, EvictionCandidate, EvictionOrder, EvictionRank};
    ///
    /// /// Evicts the leaf with the longest prefix first, then the least recently used.
    /// #[derive(Debug)]
    /// struct LongestPrefixFirst;
    ///
    /// impl EvictionOrder for LongestPrefixFirst {
    ///     fn rank(&mut self, leaf: &EvictionCandidate) -> EvictionRank {
    ///         let blocks = (leaf.start_block + leaf.block_count) as u64;
    ///         EvictionRank(u64::MAX - blocks, leaf.last_use)
    ///     }
    /// }
    ///
    /// let builder = Engine::builder().eviction_order(|| Box::new(LongestPrefixFirst));
    /// # drop(builder);
    /// ```
    pub fn eviction_order(
        mut self,
        make: impl Fn() -> Box<dyn EvictionOrder> + Send + Sync + 'static,
    ) -> Self {
        self.config.eviction_order = Some(EvictionOrderFactory::new(make));
        self
    }

    /// Maximum number of KV blocks that pinned prefixes ([`Engine::pin`]) may occupy; less than the
    /// number of blocks. Default: 0, nothing can be pinned.
    ///
    /// These blocks are not available to running requests, whether anything is pinned or not, so
    /// that every admitted request can complete.
    pub fn pin_budget(mut self, blocks: usize) -> Self {
        self.config.pin_budget = blocks;
        self
    }

    /// Memory in bytes for cached logits of the last position of prompts. Default: 32 MiB. 0
    /// disables it.
    ///
    /// With its logits cached, a repeated prompt needs no forward pass for its first token.
    pub fn logit_cache_bytes(mut self, bytes: usize) -> Self {
        self.config.logit_cache_bytes = bytes;
        self
    }

    /// Maximum duration of one forward pass. Default: no limit.
    ///
    /// A backend that takes longer is treated as hung: requests in flight and new requests fail
    /// with [`EngineError::BackendHung`] until the backend returns. Requires a tokio runtime with a
    /// time driver.
    pub fn step_timeout(mut self, limit: Duration) -> Self {
        self.config.step_timeout = Some(limit);
        self
    }

    /// Which waiting request is admitted next. Default: [`AdmissionPolicy::Cost`]. Can be changed
    /// later with [`Engine::set_admission`].
    pub fn admission(mut self, policy: AdmissionPolicy) -> Self {
        self.config.policy = policy;
        self
    }

    /// Whether to reserve room for the whole prompt and `max_tokens` of every running request, as
    /// if nothing were cached. Default: false. It is a baseline for comparisons.
    pub fn conservative_admission(mut self, on: bool) -> Self {
        self.config.conservative = on;
        self
    }

    /// Number of threads that compute forward passes; at least 1. Default: the number of CPUs that
    /// the process may use.
    pub fn threads(mut self, count: usize) -> Self {
        self.threads = Some(count);
        self
    }

    /// Type in which the model's matrices are held in memory. Default: [`WeightType::Stored`], the
    /// type in the model's files.
    pub fn weights(mut self, weights: WeightType) -> Self {
        self.weights = weights;
        self
    }

    /// Loads the model on a blocking thread and starts the engine on the current tokio runtime. The
    /// number of KV blocks is logged (`tracing`, level info).
    ///
    /// # Errors
    /// * [`Error::Load`] if the model cannot be loaded or the memory of the KV cache cannot be
    ///   allocated;
    /// * [`Error::Tokenizer`] if the model's tokenizer cannot be read;
    /// * [`EngineError::InvalidParameter`] if a setting has an impossible value, or if neither a
    ///   model nor a backend is set;
    /// * [`Error::LoadPanicked`] if loading panicked, and [`EngineError::StartFailed`] if the
    ///   engine could not start.
    pub async fn build(self) -> Result<Engine, Error> {
        self.config.validate()?;
        let EngineBuilder {
            model,
            backend,
            text,
            kv_memory,
            num_blocks,
            block_size,
            kv_type,
            threads,
            weights,
            config,
        } = self;
        let loaded = match (backend, model) {
            (Some((id, backend)), _) => Loaded {
                id,
                backend,
                text: text.unwrap_or_default(),
                recommended_sampling: SamplingParams::default(),
            },
            (None, Some(model)) => {
                let kv_budget = match (num_blocks, kv_memory) {
                    (Some(blocks), _) => KvBudget::Blocks(blocks),
                    (None, Some(bytes)) => KvBudget::Bytes(bytes),
                    (None, None) => KvBudget::Auto,
                };
                let options = CpuOptions {
                    block_size: block_size.unwrap_or(16),
                    kv_budget,
                    kv_type,
                    threads,
                    weight_type: weights,
                    ..CpuOptions::default()
                };
                let load = tokio::task::spawn_blocking(move || load(model, options));
                let panicked = |error: tokio::task::JoinError| Error::LoadPanicked {
                    reason: error.to_string(),
                };
                load.await.map_err(panicked)??
            }
            (None, None) => {
                let got = "neither `model` nor `backend`";
                return Err(Error::invalid("model", "a model or a backend", got));
            }
        };
        let Loaded { id, backend, text, recommended_sampling } = loaded;
        let prefix_caching = config.prefix_caching;
        let handle = EngineHandle::start(backend, config).await?;
        let spec = handle.spec();
        let info = ModelInfo {
            id,
            vocab_size: spec.vocab_size,
            max_positions: spec.max_positions,
            block_size: spec.block_size,
            num_blocks: spec.block_count,
            kv_bytes: spec.block_count * spec.block_bytes,
            eos_token_ids: text.eos_ids().as_slice().to_vec(),
            has_chat_template: text.has_chat_template(),
            prefix_caching,
        };
        tracing::info!(
            model = info.id,
            num_blocks = info.num_blocks,
            block_size = info.block_size,
            kv_bytes = info.kv_bytes,
            "the engine is ready"
        );
        let prompts = Prompts::new(text, handle.prompt_limit(), tokio::runtime::Handle::current());
        Ok(Engine::new(handle, prompts, recommended_sampling, info))
    }
}

/// Loads a model and builds its CPU backend. Blocks the calling thread.
fn load(model: ModelArg, options: CpuOptions) -> Result<Loaded, Error> {
    let source = match model {
        ModelArg::Source(source) => source,
        ModelArg::Text(text) => text.parse()?,
    };
    let LoadedModel { id, config, weights, text, generation } =
        stolon_model::load(&source, &LoadOptions::default())?;
    let text = text_layer(&text, &generation.eos_token_ids)?;
    let backend = Box::new(CpuBackend::new(config, weights, options)?);
    let recommended_sampling = generation.recommended_sampling();
    Ok(Loaded { id, backend, text, recommended_sampling })
}

/// The tokenizer and chat templates of a model, if it has a tokenizer and this build supports it.
fn text_layer(source: &TextSource, eos_token_ids: &[u32]) -> Result<Text, Error> {
    if let TokenizerSource::Missing { directory } = &source.tokenizer {
        let directory = directory.display();
        tracing::warn!("{directory} has no tokenizer.json: prompts must be token ids");
        return Ok(Text::tokens_only(eos_token_ids));
    }
    #[cfg(feature = "text")]
    return Ok(Text::new(TextModel::new(source, eos_token_ids)?));
    #[cfg(not(feature = "text"))]
    Ok(Text::tokens_only(eos_token_ids))
}
