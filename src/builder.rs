//! Configures and starts an engine.

use std::time::Duration;

use stolon_actors::EngineHandle;
use stolon_backend::Backend;
use stolon_kvcache::EvictionOrder;
use stolon_model::{
    CpuBackend, CpuOptions, KvBudget, KvType, LoadOptions, LoadedModel, WeightType,
};
use stolon_scheduler::{AdmissionPolicy, EngineConfig, EngineError, EvictionOrderFactory};
#[cfg(feature = "text")]
use stolon_text::TextModel;

use crate::text::Text;
use crate::{Engine, Error, EvictionPolicy, ModelInfo, ModelSource, SamplingParams};

/// A model as a caller names it: text to be parsed when the engine is built, or a source.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ModelArg {
    /// A model directory, a `.gguf` file, a hub id or `random:PRESET`.
    Text(String),
    /// A source that needs no parsing.
    Source(ModelSource),
}

impl From<&str> for ModelArg {
    fn from(text: &str) -> ModelArg {
        ModelArg::Text(text.to_owned())
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

/// A backend and what is known about its model.
struct Loaded {
    id: String,
    backend: Box<dyn Backend>,
    text: Text,
    recommended_sampling: SamplingParams,
}

/// Settings of an engine to be started; see each setter for its default.
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

    /// The model: a [`ModelSource`], or text: a model directory, a `.gguf` file, a hub id
    /// (`org/name`, `org/name@revision`), or `random:PRESET`.
    pub fn model(mut self, model: impl Into<ModelArg>) -> Self {
        self.model = Some(model.into());
        self
    }

    /// Runs a custom backend instead of loading a model: another device, or a fake for tests. `id`
    /// is its name in [`ModelInfo`]. The number and size of blocks are the backend's. Prompts are
    /// token ids, and events carry no text, unless [`text_model`](Self::text_model) is called.
    pub fn backend(mut self, id: impl Into<String>, backend: Box<dyn Backend>) -> Self {
        self.backend = Some((id.into(), backend));
        self
    }

    /// The tokenizer and chat templates for a custom [`backend`](Self::backend). A loaded model
    /// brings its own.
    #[cfg(feature = "text")]
    pub fn text_model(mut self, model: TextModel) -> Self {
        self.text = Some(Text::new(model));
        self
    }

    /// Bytes for the KV cache. Default: a share of the memory that is free after the model is
    /// loaded, see [`KvBudget::Auto`](stolon_model::KvBudget); the log says how much it took.
    pub fn kv_memory(mut self, bytes: u64) -> Self {
        self.kv_memory = Some(bytes);
        self
    }

    /// KV blocks, instead of bytes.
    pub fn num_blocks(mut self, count: usize) -> Self {
        self.num_blocks = Some(count);
        self
    }

    /// Positions a KV block holds: a power of two from 1 to 256. Default 16.
    pub fn block_size(mut self, positions: usize) -> Self {
        self.block_size = Some(positions);
        self
    }

    /// What keys and values are stored as. Default: f32 for a model in f32, bf16 for all others.
    pub fn kv_type(mut self, kv_type: KvType) -> Self {
        self.kv_type = Some(kv_type);
        self
    }

    /// Most tokens one forward pass computes, prompt chunks and decodes together. Default 512.
    pub fn max_batched_tokens(mut self, tokens: usize) -> Self {
        self.config.max_batched_tokens = tokens;
        self
    }

    /// Most requests that run at the same time. Default 32.
    pub fn max_running(mut self, requests: usize) -> Self {
        self.config.max_running = requests;
        self
    }

    /// Most requests that wait; more are refused with [`Error::Overloaded`]. Default 1,024.
    pub fn max_queued_requests(mut self, requests: usize) -> Self {
        self.config.max_queued_requests = requests;
        self
    }

    /// Most uncached prompt tokens that wait; more are refused with [`Error::Overloaded`],
    /// unless nothing waits. Default 1,048,576.
    ///
    /// What is cached does not count, so a limit of a few thousand lets conversations go on whose history is
    /// there and refuses those whose history is gone, rather than have them drive each other out of a
    /// cache that is too small for all.
    pub fn max_queued_tokens(mut self, tokens: usize) -> Self {
        self.config.max_queued_tokens = tokens;
        self
    }

    /// Under any policy, at most so many uncached prompt tokens of later requests are admitted
    /// before an earlier one, and as many again as waited when that one came. Default 4,096; 0
    /// is strictly in order of arrival.
    pub fn max_overtake_tokens(mut self, tokens: usize) -> Self {
        self.config.max_overtake_tokens = tokens;
        self
    }

    /// Events a stream holds for a slow reader before its request pauses; at least 8. Default 256.
    pub fn event_capacity(mut self, events: usize) -> Self {
        self.config.event_capacity = events;
        self
    }

    /// Keeps computed prompts and answers for requests that start the same way. Default on.
    pub fn prefix_caching(mut self, on: bool) -> Self {
        self.config.prefix_caching = on;
        self
    }

    /// Which cached blocks are given up first when room is needed. Default
    /// [`EvictionPolicy::Lru`].
    pub fn eviction_policy(mut self, policy: EvictionPolicy) -> Self {
        self.config.eviction_policy = policy;
        self
    }

    /// A custom order of eviction, used instead of a built-in policy. `make` is called at startup
    /// and after each restart of the engine.
    pub fn eviction_order(
        mut self,
        make: impl Fn() -> Box<dyn EvictionOrder> + Send + Sync + 'static,
    ) -> Self {
        self.config.eviction_order = Some(EvictionOrderFactory::new(make));
        self
    }

    /// Most KV blocks that pins may hold together; below the number of blocks there are. A
    /// request can have so many fewer, since it must be able to end whatever is pinned.
    /// Default 0: nothing can be pinned.
    pub fn pin_budget(mut self, blocks: usize) -> Self {
        self.config.pin_budget = blocks;
        self
    }

    /// Bytes for the last rows of logits of cached prompts: a prompt repeated to its last token
    /// then needs no forward pass for its first token. Default 32 MiB; 0 keeps none.
    pub fn logit_cache_bytes(mut self, bytes: usize) -> Self {
        self.config.logit_cache_bytes = bytes;
        self
    }

    /// Longest time that one forward pass may take. One that takes longer counts as hung: the
    /// requests in flight, and those that come, end with [`Error::BackendHung`], until the backend
    /// comes back. Default: for ever. Needs a runtime with its time driver on.
    pub fn step_timeout(mut self, limit: Duration) -> Self {
        self.config.step_timeout = Some(limit);
        self
    }

    /// Which waiting request runs next. Default [`AdmissionPolicy::Cost`].
    pub fn admission(mut self, policy: AdmissionPolicy) -> Self {
        self.config.policy = policy;
        self
    }

    /// Charges a request's whole prompt and its whole `max_tokens` before it runs, as if
    /// nothing were cached: a baseline to compare with. Default off.
    pub fn conservative_admission(mut self, on: bool) -> Self {
        self.config.conservative = on;
        self
    }

    /// Threads that compute. Default: as many as the process may use.
    pub fn threads(mut self, count: usize) -> Self {
        self.threads = Some(count);
        self
    }

    /// What the model's matrices are held in. Default: as the file stores them.
    pub fn weights(mut self, weights: WeightType) -> Self {
        self.weights = weights;
        self
    }

    /// Loads the model (on a thread that may block) and starts the engine on the current tokio
    /// runtime. The log (`tracing`, level info) says how many KV blocks there are.
    ///
    /// # Errors
    /// [`Error::Load`] for a model that cannot be loaded or KV memory that cannot be had,
    /// [`Error::InvalidParameter`] for a setting that cannot work.
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
                let interrupted = |error: tokio::task::JoinError| EngineError::Interrupted {
                    reason: error.to_string(),
                };
                load.await.map_err(interrupted)??
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
            eos_token_ids: text.eos_ids().to_vec(),
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
        Ok(Engine::new(handle, text, recommended_sampling, info))
    }
}

/// Loads a model and makes its backend. Blocks the calling thread.
fn load(model: ModelArg, options: CpuOptions) -> Result<Loaded, Error> {
    let source = match model {
        ModelArg::Source(source) => source,
        ModelArg::Text(text) => text.parse()?,
    };
    let LoadedModel { id, config, weights, text, generation } =
        stolon_model::load(&source, &LoadOptions::default())?;
    #[cfg(feature = "text")]
    let text = Text::new(TextModel::new(&text, &generation.eos_token_ids)?);
    #[cfg(not(feature = "text"))]
    let text = {
        let _ = text;
        Text
    };
    let backend = Box::new(CpuBackend::new(config, weights, options)?);
    let recommended_sampling = generation.recommended_sampling();
    Ok(Loaded { id, backend, text, recommended_sampling })
}
