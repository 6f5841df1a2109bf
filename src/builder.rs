//! Configures and starts an engine.

mod adapters;
mod arg;
mod cache;
mod draft;
#[cfg(feature = "hub")]
mod hub;
mod load;
mod memory;
mod mtp;
mod rerank;
mod scheduling;

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use stolon_actors::EngineHandle;
use stolon_backend::Backend;
use stolon_checkpoint::{
    EmbeddingConfig, EmbeddingSizes, KvType, LoadOptions, WeightType, WindowKv,
};
use stolon_scheduler::{EngineConfig, EngineError};
use tokio::runtime::Handle;

use crate::adapters::AdapterTable;
use crate::device::Device;
use crate::engine::Inner;
use crate::images::Fetch;
use crate::next_turn::NextTurns;
use crate::prompt::Prompts;
use crate::text::{Remembered, Text};
use crate::tiers::TierOptions;
use crate::{EmbeddingInfo, Engine, Error, ModelInfo};

use adapters::AdapterSettings;
pub use arg::ModelArg;
use load::{BackendFactory, Loaded, PooledParts};
pub(crate) use memory::{KvPart, MemoryParts};
pub(crate) use rerank::RerankSettings;

/// The default of [`EngineBuilder::history_bytes`].
const HISTORY_BYTES: usize = 32 << 20;

/// Settings of an engine that is about to be started. Made with [`Engine::builder`].
///
/// One of [`model`](Self::model) and [`backend`](Self::backend) is required; each other setter
/// documents its default. Nothing is validated before [`build`](Self::build).
#[derive(Default)]
pub struct EngineBuilder {
    model: Option<ModelArg>,
    pub(crate) draft_model: Option<ModelArg>,
    backend: Option<(String, BackendFactory)>,
    pub(crate) text: Option<Text>,
    /// A chat template in place of those of the model.
    pub(crate) chat_template: Option<String>,
    /// The answers and the prompt of a reranker, in place of those of the model's files.
    pub(crate) rerank: RerankSettings,
    kv_memory: Option<u64>,
    num_blocks: Option<usize>,
    pub(crate) block_size: Option<usize>,
    pub(crate) kv_type: Option<KvType>,
    pub(crate) window_kv: Option<WindowKv>,
    pub(crate) threads: Option<usize>,
    pub(crate) bind_threads: bool,
    pub(crate) weights: Option<WeightType>,
    pub(crate) map_embeddings: bool,
    pub(crate) device: Device,
    embedding: Option<EmbeddingConfig>,
    embedding_sizes: Option<EmbeddingSizes>,
    load_options: LoadOptions,
    runtime: Option<Handle>,
    namespace_key: Option<[u8; 32]>,
    /// `None` selects [`HISTORY_BYTES`].
    history_bytes: Option<usize>,
    /// Whether the beginnings of next turns are computed in advance.
    next_turn_prefill: bool,
    /// The history of an earlier engine of the same model.
    pub(crate) remembered: Option<Remembered>,
    /// Whether the threads that load the model have a low priority, because other engines of a
    /// [`ModelSet`](crate::ModelSet) compute meanwhile.
    pub(crate) yield_while_loading: bool,
    pub(crate) tiers: TierOptions,
    pub(crate) adapters: AdapterSettings,
    pub(crate) fetch: Fetch,
    config: EngineConfig,
}

impl std::fmt::Debug for EngineBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineBuilder")
            .field("model", &self.model)
            .field("draft_model", &self.draft_model)
            .field("mtp", &self.has_mtp())
            .field("backend", &self.backend.as_ref().map(|(id, _)| id))
            .field("kv_memory", &self.kv_memory)
            .field("num_blocks", &self.num_blocks)
            .field("block_size", &self.block_size)
            .field("kv_type", &self.kv_type)
            .field("window_kv", &self.window_kv)
            .field("threads", &self.threads)
            .field("bind_threads", &self.bind_threads)
            .field("weights", &self.weights)
            .field("map_embeddings", &self.map_embeddings)
            .field("config", &self.config)
            .finish()
    }
}

impl EngineBuilder {
    pub(crate) fn new() -> EngineBuilder {
        EngineBuilder::default()
    }

    /// The model to load. Either a [`ModelSource`](crate::ModelSource), the path of a model
    /// directory or `.gguf` file, or a string that is parsed by [`build`](Self::build):
    ///
    /// * the path of a Hugging Face model directory or of a `.gguf` file;
    /// * a hub id, `org/name`, `org/name@revision` or `org/name:Q4_K_M` (feature `hub`);
    /// * `random:PRESET`, random weights in the shape of a real model, for benchmarks;
    /// * `demo`, the built-in model, or `demo-vision`, the one that answers questions about pictures
    ///   (feature `demo-model`).
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
    /// [`block_size`](Self::block_size), [`kv_type`](Self::kv_type), [`window_kv`](Self::window_kv),
    /// [`threads`](Self::threads), [`weights`](Self::weights), `device`, `chat_template`,
    /// [`draft_model`](Self::draft_model), [`mtp`](Self::mtp) and
    /// [`override_generation_config`](Self::override_generation_config) would have no effect, so
    /// [`build`](Self::build) refuses them.
    pub fn backend(self, id: impl Into<String>, backend: Box<dyn Backend + Send>) -> Self {
        self.set_backend(id, Box::new(move || Ok(backend)))
    }

    /// As [`backend`](Self::backend), for a backend that is made by `make` on the executor thread.
    /// That thread also computes every step and drops the backend, so that the backend may hold
    /// what belongs to one thread, such as the context of a device. It does not have to be `Send`.
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

    /// Sets the GGUF file with the image encoder of a GGUF model, which llama.cpp calls `mmproj`.
    /// Only for Gemma 3, SmolVLM, Idefics 3, Qwen3-VL and Qwen3.5.
    pub fn mmproj(mut self, path: impl Into<std::path::PathBuf>) -> Self {
        self.load_options.mmproj = Some(path.into());
        self
    }

    /// Replaces members of the model's `generation_config.json`, which are the defaults of
    /// [`Engine::recommended_sampling`] and [`Engine::chat_sampling`]: a JSON object with any of
    /// `do_sample`, `temperature`, `top_k`, `top_p`, `min_p` and `repetition_penalty`. One of them
    /// switches sampling on, unless `do_sample` is false. Another member, or a value that is out of
    /// range, is an error when the engine is built.
    pub fn override_generation_config(mut self, members: serde_json::Value) -> Self {
        self.load_options.generation = Some(members);
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

    /// Number of threads that compute forward passes; at least 1. Default: one for each performance
    /// core of one socket that the process may use, by its affinity mask and its cgroup's quota.
    pub fn threads(mut self, count: usize) -> Self {
        self.threads = Some(count);
        self
    }

    /// Binds each of these threads to one processor (Linux). This helps if nothing else computes on
    /// the machine, above all if it has several sockets. Two engines must not be bound to the same
    /// processors: start each process with `taskset`, for example. If there are fewer processors
    /// than threads, a warning is logged and nothing is bound. Default: `false`.
    pub fn bind_threads(mut self, bind: bool) -> Self {
        self.bind_threads = bind;
        self
    }

    /// Type in which the model's matrices are held in memory. Default: [`WeightType::Stored`], the
    /// type in the model's files.
    pub fn weights(mut self, weights: WeightType) -> Self {
        self.weights = Some(weights);
        self
    }

    /// Whether embeddings are read row by row from the memory-mapped model file instead of being
    /// loaded, where they are not also the output matrix: the embeddings of most text encoders and
    /// of large models, and the per-layer embeddings of Gemma 4. Answers do not depend on it. Rows
    /// that are not in the system's file cache are read from the disk when a token needs them, and
    /// the file must not be changed while the engine runs. Default: `false`, unless there is no
    /// memory for them. On a GPU, [`build`](Self::build) refuses it.
    pub fn map_embeddings(mut self, map: bool) -> Self {
        self.map_embeddings = map;
        self
    }

    /// How [`Engine::embed`] makes embeddings. Default: as the model's files say; a custom backend,
    /// or a model whose files do not say it, makes none. The backend must return hidden states.
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
    /// * [`Error::Adapter`] if an adapter cannot be loaded;
    /// * `Error::Tier` if the directory of the disk tier or the object store cannot be used, or if
    ///   the backend does not support them (feature `tiers`);
    /// * [`EngineError::StartFailed`] if there is no tokio runtime, if it has no time driver, or if
    ///   loading the model or making the backend panics.
    pub async fn build(self) -> Result<Engine, Error> {
        self.start().await
    }

    /// As [`EngineBuilder::build`], compiled once, as the futures of [`EngineHandle`] are.
    fn start(mut self) -> BoxFuture<'static, Result<Engine, Error>> {
        async move {
            self.config.validate()?;
            let (mut config, runtime) = (std::mem::take(&mut self.config), self.runtime.take());
            let tiers = std::mem::take(&mut self.tiers).prepare(&mut config)?;
            let key = self.namespace_key;
            let AdapterSettings { adapters, memory } = self.adapters.clone();
            let fetch = self.fetch.clone();
            let next_turns = self.next_turn_prefill && config.prefix_caching;
            let history = self.history_bytes.unwrap_or(HISTORY_BYTES);
            let earlier = self.remembered.take();
            let (own_embedding, sizes) = (self.embedding.take(), self.embedding_sizes.take());
            let (sender, loaded) = std::sync::mpsc::channel();
            let make = self.into_factory(&config, sender)?;
            let handle = EngineHandle::start_with(make, config, runtime).await?;
            let missing = |_| EngineError::StartFailed { reason: "nothing was loaded".to_owned() };
            let Loaded {
                id,
                text,
                sampling,
                embedding,
                generates,
                images,
                prompts,
                drafting,
                pooled,
                tasks,
            } = loaded.try_recv().map_err(missing)?;
            let (is_encoder, head, scores) = match pooled {
                Some(PooledParts { is_encoder, head, scores }) => (is_encoder, Some(head), scores),
                None => (false, None, None),
            };
            let (score_pooling, scores) = scores.unzip();
            let spec = &handle.context().spec;
            let size = spec
                .hidden_size
                .map(|hidden| head.as_ref().map_or(hidden, |head| head.output_size(hidden)));
            let embedding = embedding_info(&id, size, own_embedding.or(embedding), sizes)?;
            let info = ModelInfo {
                id,
                vocab_size: spec.vocab_size,
                max_positions: spec.max_positions,
                block_size: spec.block_size,
                num_blocks: spec.block_count,
                kv_bytes: spec.block_count * spec.block_bytes,
                state_bytes: spec.state.map_or(0, |state| state.bytes),
                eos_token_ids: text.eos_ids().as_slice().to_vec(),
                has_chat_template: text.has_chat_template(),
                embedding,
                scores,
                prompts,
                tasks: tasks.names,
                task_required: tasks.required,
                is_encoder,
                generates,
                takes_images: spec.image_width.is_some(),
                skills: text.skills.names(),
                reasons: text.skills.reason(),
                regions: spec.regions,
                image_token_id: images.image_token(),
                drafting,
                prefix_caching: handle.context().config.prefix_caching,
            };
            tracing::info!(
                model = info.id,
                num_blocks = info.num_blocks,
                block_size = info.block_size,
                kv_bytes = info.kv_bytes,
                "the engine is ready"
            );
            let (context, runtime) = (handle.context().clone(), handle.runtime().clone());
            let text = text.with_history(history, earlier);
            let tiers = tiers.open(&handle).await?;
            let text = tiers.with_stored_history(text, &handle).await?;
            let prompts = Prompts::new(text, images.with(fetch), context, runtime)?;
            let namespace_key = key.or_else(|| tiers.namespace_key());
            let (loader, runtime) = (handle.adapters().cloned(), handle.runtime().clone());
            let table = AdapterTable::new(loader, info.id.clone(), memory, runtime);
            for (name, path) in tasks.adapters.into_iter().chain(adapters) {
                table.load(&name, &path, false).await?;
            }
            let adapters = table;
            Ok(Engine::new(Inner {
                handle,
                prompts,
                sampling,
                info,
                head,
                score_pooling,
                namespace_key,
                misses: Arc::default(),
                tiers,
                adapters,
                next_turns: next_turns.then(NextTurns::new),
            }))
        }
        .boxed()
    }
}

/// Describes the engine's embeddings, if it makes any. `sizes` replaces those of `config`.
fn embedding_info(
    id: &str,
    size: Option<usize>,
    config: Option<EmbeddingConfig>,
    sizes: Option<EmbeddingSizes>,
) -> Result<Option<EmbeddingInfo>, Error> {
    let Some(mut config) = config else {
        let model = || Error::NotForEmbeddings { model: id.to_owned() };
        return sizes.map_or(Ok(None), |_| Err(model()));
    };
    let Some(size) = size else {
        let expected = "a backend that returns hidden states";
        return Err(Error::invalid("embedding", expected, "one that returns logits only"));
    };
    config.sizes = sizes.unwrap_or(config.sizes);
    Ok(Some(EmbeddingInfo::new(size, config)))
}
