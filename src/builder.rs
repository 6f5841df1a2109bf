//! Configures and starts an engine.

mod arg;
mod load;

use std::time::Duration;

use stolon_actors::EngineHandle;
use stolon_backend::{Backend, BackendSpec};
use stolon_kvcache::EvictionOrder;
use stolon_model::{EmbeddingConfig, EmbeddingSizes, KvType, WeightType};
use stolon_scheduler::{AdmissionPolicy, EngineConfig, EngineError, EvictionOrderFactory};
#[cfg(feature = "text")]
use stolon_text::TextModel;
use tokio::runtime::Handle;

use crate::engine::Inner;
use crate::prompt::Prompts;
use crate::text::Text;
use crate::tiers::TierOptions;
use crate::{EmbeddingInfo, Engine, Error, EvictionPolicy, ModelInfo};

pub use arg::ModelArg;
use load::{BackendFactory, Loaded};

/// Settings of an engine that is about to be started. Made with [`Engine::builder`].
///
/// One of [`model`](Self::model) and [`backend`](Self::backend) is required; each other setter
/// documents its default. Nothing is validated before [`build`](Self::build).
#[derive(Default)]
pub struct EngineBuilder {
    model: Option<ModelArg>,
    backend: Option<(String, BackendFactory)>,
    text: Option<Text>,
    #[cfg(feature = "text")]
    chat_template: Option<String>,
    kv_memory: Option<u64>,
    num_blocks: Option<usize>,
    block_size: Option<usize>,
    kv_type: Option<KvType>,
    threads: Option<usize>,
    weights: Option<WeightType>,
    #[cfg(feature = "candle")]
    device: Option<load::DeviceSettings>,
    embedding: Option<EmbeddingConfig>,
    embedding_sizes: Option<EmbeddingSizes>,
    #[cfg(feature = "hub")]
    download_progress: Option<stolon_model::ProgressCallback>,
    runtime: Option<Handle>,
    namespace_key: Option<[u8; 32]>,
    pub(crate) tiers: TierOptions,
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

    /// The model to load. Either a [`ModelSource`](crate::ModelSource), the path of a model
    /// directory or `.gguf` file, or text that is parsed by [`build`](Self::build):
    ///
    /// * the path of a Hugging Face model directory or of a `.gguf` file;
    /// * a hub id, `org/name`, `org/name@revision` or `org/name:Q4_K_M` (feature `hub`);
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
    /// Prompts must be token ids, and events carry no text, unless `text_model` is called too.
    ///
    /// The backend's spec sets the number and the size of KV blocks.
    /// [`model`](Self::model), [`kv_memory`](Self::kv_memory), [`num_blocks`](Self::num_blocks),
    /// [`block_size`](Self::block_size), [`kv_type`](Self::kv_type), [`threads`](Self::threads) and
    /// [`weights`](Self::weights) would have no effect, so [`build`](Self::build) refuses them.
    pub fn backend(self, id: impl Into<String>, backend: Box<dyn Backend + Send>) -> Self {
        self.set_backend(id, Box::new(move || Ok(backend)))
    }

    /// As [`backend`](Self::backend), for a backend that is made by `make` on the executor thread.
    /// That thread also computes every step and drops the backend, so that the backend may hold
    /// what belongs to one thread, such as the context of a device. It need not be `Send`.
    ///
    /// `make` is called once. A restart of the engine keeps the thread and the backend.
    ///
    /// ```
    /// # #[cfg(feature = "testing")]
    /// # fn example() {
    /// use stolon::Engine;
    /// use stolon::backend::BackendError;
    /// use stolon::backend::fake::{FakeBackend, FakeOptions};
    ///
    /// let builder = Engine::builder()
    ///     .backend_with("fake", || Ok::<_, BackendError>(FakeBackend::new(FakeOptions::default())));
    /// # drop(builder);
    /// # }
    /// ```
    pub fn backend_with<B, E>(
        self,
        id: impl Into<String>,
        make: impl FnOnce() -> Result<B, E> + Send + 'static,
    ) -> Self
    where
        B: Backend + 'static,
        E: std::fmt::Display,
    {
        let make = move || match make() {
            Ok(backend) => Ok(Box::new(backend) as Box<dyn Backend>),
            Err(error) => {
                Err(EngineError::StartFailed { reason: format!("the backend: {error}") }.into())
            }
        };
        self.set_backend(id, Box::new(make))
    }

    fn set_backend(mut self, id: impl Into<String>, make: BackendFactory) -> Self {
        self.backend = Some((id.into(), make));
        self
    }

    /// The chat template to use instead of those of the [`model`](Self::model): the source of a
    /// Jinja template. Has no effect on a `text_model`. A template that is malformed, or a model
    /// without a tokenizer, is an error when the engine is built.
    #[cfg(feature = "text")]
    pub fn chat_template(mut self, source: impl Into<String>) -> Self {
        self.chat_template = Some(source.into());
        self
    }

    /// The tokenizer and chat templates to use, with a custom [`backend`](Self::backend) or instead
    /// of those of a [`model`](Self::model). Default: those of the model; none for a custom
    /// backend.
    ///
    /// A token id that the model does not have is refused when a prompt contains it.
    #[cfg(feature = "text")]
    pub fn text_model(mut self, model: TextModel) -> Self {
        self.text = Some(Text::new(model));
        self
    }

    /// The tokio runtime that the engine's tasks run on. It needs a time driver and must outlive
    /// the engine. Default: the runtime on which [`build`](Self::build) is called.
    ///
    /// Each step passes through tasks of the engine. If the application keeps the workers of its
    /// runtime busy, for example with computations between two awaits, each token waits for them. A
    /// runtime of the engine's own, with one worker, avoids that. Engines and streams can be used
    /// from any runtime and any thread.
    ///
    /// ```
    /// # fn main() -> std::io::Result<()> {
    /// let runtime = tokio::runtime::Builder::new_multi_thread()
    ///     .worker_threads(1)
    ///     .enable_time()
    ///     .build()?;
    /// let builder = stolon::Engine::builder().runtime(runtime.handle().clone());
    /// # drop(builder);
    /// # Ok(())
    /// # }
    /// ```
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// Size of the KV cache in bytes. Default: half of the memory that is free after the model is
    /// loaded, at most 8 GiB ([`KvBudget::Auto`](crate::KvBudget::Auto)).
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

    /// Which cached blocks are evicted first when the KV cache is full, and which records of the
    /// disk tier when that is. Default: [`EvictionPolicy::Lru`].
    pub fn eviction_policy(mut self, policy: EvictionPolicy) -> Self {
        self.config.eviction_policy = policy;
        self
    }

    /// A custom eviction order, used instead of a built-in [`EvictionPolicy`]. Default: none.
    ///
    /// `make` is called at startup and after each restart of the engine, because a restarted engine
    /// has a new, empty cache, and once for the disk tier if there is one. The order's methods run
    /// while the engine changes the prefix tree. They should return quickly and must not panic.
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

    /// Maximum number of KV blocks that pinned prefixes ([`Cache::pin`](crate::Cache::pin)) may occupy; less than the
    /// number of blocks. Default: 0, nothing can be pinned.
    ///
    /// These blocks are not available to running requests, whether anything is pinned or not, so
    /// that every admitted request can complete.
    pub fn pin_budget(mut self, blocks: usize) -> Self {
        self.config.pin_budget = blocks;
        self
    }

    /// Maximum number of KV blocks that sessions ([`Sessions::open`](crate::Sessions::open)) keep from being evicted
    /// between their turns. Default: half of the blocks. With 0, sessions hold nothing.
    ///
    /// If the budget is used up, the session that has been idle longest gives up what it holds, but
    /// stays open. A running request that has no other block takes those of sessions in the same
    /// order, so sessions never make a request fail.
    pub fn session_budget(mut self, blocks: usize) -> Self {
        self.config.session_budget = Some(blocks);
        self
    }

    /// Maximum number of open sessions, from 1 to 65,536. Default: 1024. One more closes the one
    /// that has been idle longest, of the owner that has the most. The tokens of each session are
    /// kept in memory, 4 bytes for each.
    pub fn max_sessions(mut self, sessions: usize) -> Self {
        self.config.max_sessions = sessions;
        self
    }

    /// Time without a turn after which a session is closed, if it was opened without a time of its
    /// own; at most 24 hours. Default: 30 minutes.
    pub fn session_ttl(mut self, ttl: Duration) -> Self {
        self.config.session_ttl = ttl;
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

    /// Sets the secret key by which cache salts become namespaces. Programs that share stored KV
    /// through an object store, or that exchange cache events, need the same key to find each
    /// other's KV of requests with a salt. Default: the key in the directory of `kv_cache_dir`,
    /// where one is made, or else one of this process, drawn at random. With the key, a short salt
    /// can be found by trying all.
    pub fn namespace_key(mut self, key: [u8; 32]) -> Self {
        self.namespace_key = Some(key);
        self
    }

    /// Maximum number of tokens of a request, prompt and answer together; at least 2 and at most
    /// the context length of the model. Default: the context length.
    pub fn max_positions(mut self, tokens: usize) -> Self {
        self.config.max_positions = Some(tokens);
        self
    }

    /// Maximum duration of one forward pass. Default: no limit.
    ///
    /// A backend that takes longer is treated as hung: requests in flight and new requests fail
    /// with [`EngineError::BackendHung`] until the backend returns.
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

    /// The device that runs the model. Default: the CPU. A GPU needs the feature `cuda` or `metal`.
    ///
    /// On a GPU, [`threads`](Self::threads) and [`weights`](Self::weights) would have no effect, so
    /// [`build`](Self::build) refuses them.
    #[cfg(feature = "candle")]
    pub fn device(mut self, device: crate::DeviceChoice) -> Self {
        self.device.get_or_insert_default().device = device;
        self
    }

    /// Share of a GPU's memory that the engine may use, above 0 and up to 1. The KV cache gets what
    /// the weights and a step's activations leave, unless its size is set. Memory that other
    /// programs use counts. Default: 0.9. It has no effect on the CPU.
    #[cfg(feature = "candle")]
    pub fn gpu_memory_utilization(mut self, share: f64) -> Self {
        self.device.get_or_insert_default().memory_utilization = Some(share);
        self
    }

    /// Whether a GPU computes matrix products of a fixed number of rows, so that an answer does not
    /// depend on what is cached and on what else runs. Default: true. Without it, long prompts are
    /// computed faster, and KV cannot be stored or exported. It has no effect on the CPU, where
    /// answers never depend on it.
    #[cfg(feature = "candle")]
    pub fn batch_invariant(mut self, on: bool) -> Self {
        self.device.get_or_insert_default().batch_dependent = !on;
        self
    }

    /// Whether decode steps on a CUDA device are captured as CUDA graphs, which launch all kernels
    /// of a step at once, so that small models do not wait for the host. Default: false, because no
    /// GPU has run it yet. It has no effect on models with experts, on steps with
    /// log-probabilities, penalties, biases or grammars, or without flash attention unless
    /// [`batch_invariant`](Self::batch_invariant) is off.
    #[cfg(feature = "candle")]
    pub fn cuda_graphs(mut self, on: bool) -> Self {
        self.device.get_or_insert_default().cuda_graphs = on;
        self
    }

    /// Type in which the model's matrices are held in memory. Default: [`WeightType::Stored`], the
    /// type in the model's files.
    pub fn weights(mut self, weights: WeightType) -> Self {
        self.weights = Some(weights);
        self
    }

    /// How [`Engine::embed`] makes embeddings. Default: as the model's files say; without it, a
    /// custom backend and a model whose files do not say it make none. The backend must return
    /// hidden states.
    pub fn embedding(mut self, config: EmbeddingConfig) -> Self {
        self.embedding = Some(config);
        self
    }

    /// The sizes to which embeddings may be shortened. Default: those that the model's
    /// `config.json` declares. Many models that were trained for it do not declare it, such as
    /// Qwen3-Embedding.
    ///
    /// [`build`](Self::build) refuses it if the model is not meant for embeddings.
    pub fn embedding_sizes(mut self, sizes: EmbeddingSizes) -> Self {
        self.embedding_sizes = Some(sizes);
        self
    }

    /// Calls `callback` with the progress of each file that is downloaded from the hub, several
    /// times a second. Default: none, and progress is logged every five seconds.
    ///
    /// ```no_run
    /// let builder = stolon::Engine::builder().model("Qwen/Qwen3-0.6B").download_progress(|file| {
    ///     eprintln!("{}: {} bytes of {:?}", file.file, file.bytes, file.size);
    /// });
    /// # drop(builder);
    /// ```
    #[cfg(feature = "hub")]
    pub fn download_progress(
        mut self,
        callback: impl Fn(&crate::DownloadProgress<'_>) + Send + Sync + 'static,
    ) -> Self {
        self.download_progress = Some(stolon_model::ProgressCallback::new(callback));
        self
    }

    /// Loads the model and starts the engine. The number of KV blocks is logged (`tracing`, level
    /// info). If the returned future is dropped, loading continues in the background, and the
    /// model is then dropped.
    ///
    /// # Errors
    /// * [`Error::Load`] if the model cannot be loaded or the memory of the KV cache cannot be
    ///   allocated;
    /// * [`Error::Tokenizer`] if the model's tokenizer cannot be read;
    /// * [`EngineError::InvalidParameter`] if a setting has an impossible value or has no effect on
    ///   a custom backend, or if neither a model nor a backend is set;
    /// * `Error::Tier` if the directory of the disk tier or the object store cannot be used, or if
    ///   the backend does not support them (feature `tiers`);
    /// * [`EngineError::StartFailed`] if there is no tokio runtime, if it has no time driver, or if
    ///   loading the model or making the backend panics.
    pub async fn build(mut self) -> Result<Engine, Error> {
        self.config.validate()?;
        let (mut config, runtime) = (std::mem::take(&mut self.config), self.runtime.take());
        let tiers = std::mem::take(&mut self.tiers).prepare(&mut config)?;
        let (prefix_caching, key) = (config.prefix_caching, self.namespace_key);
        #[cfg(feature = "candle")]
        if let Some(device) = &mut self.device {
            device.step_tokens = config.max_batched_tokens;
            device.step_sequences = config.max_running;
        }
        let (own_embedding, sizes) = (self.embedding.take(), self.embedding_sizes.take());
        let (sender, loaded) = std::sync::mpsc::channel();
        let make = self.into_factory(sender)?;
        let handle = EngineHandle::start_with(make, config, runtime).await?;
        let missing = |_| EngineError::StartFailed { reason: "nothing was loaded".to_owned() };
        let Loaded { id, text, recommended_sampling, embedding, generates } =
            loaded.try_recv().map_err(missing)?;
        let spec = &handle.context().spec;
        let embedding = embedding_info(&id, spec, own_embedding.or(embedding), sizes)?;
        let info = ModelInfo {
            id,
            vocab_size: spec.vocab_size,
            max_positions: spec.max_positions,
            block_size: spec.block_size,
            num_blocks: spec.block_count,
            kv_bytes: spec.block_count * spec.block_bytes,
            eos_token_ids: text.eos_ids().as_slice().to_vec(),
            has_chat_template: text.has_chat_template(),
            embedding,
            generates,
            prefix_caching,
        };
        tracing::info!(
            model = info.id,
            num_blocks = info.num_blocks,
            block_size = info.block_size,
            kv_bytes = info.kv_bytes,
            "the engine is ready"
        );
        let prompts = Prompts::new(text, handle.context().prompt_limit(), handle.runtime().clone());
        let tiers = tiers.open(&handle).await?;
        let namespace_key = key.or_else(|| tiers.namespace_key());
        Ok(Engine::new(Inner { handle, prompts, recommended_sampling, info, namespace_key, tiers }))
    }
}

/// What the engine's embeddings are, if it makes any. `sizes` replaces those of `config`.
fn embedding_info(
    id: &str,
    spec: &BackendSpec,
    config: Option<EmbeddingConfig>,
    sizes: Option<EmbeddingSizes>,
) -> Result<Option<EmbeddingInfo>, Error> {
    let Some(mut config) = config else {
        let model = || Error::NotForEmbeddings { model: id.to_owned() };
        return sizes.map_or(Ok(None), |_| Err(model()));
    };
    let Some(size) = spec.hidden_size else {
        let expected = "a backend that returns hidden states";
        return Err(Error::invalid("embedding", expected, "one that returns logits only"));
    };
    config.sizes = sizes.unwrap_or(config.sizes);
    Ok(Some(EmbeddingInfo::new(size, config)))
}
