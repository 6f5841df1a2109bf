//! Stolon is an LLM inference engine that runs inside an async Rust program. It is built around a
//! prefix cache that all requests share.
//!
//! # A first program
//!
//! The engine needs a tokio runtime with a time driver, as `#[tokio::main]` makes it.
//!
//! ```no_run
//! use stolon::{Engine, Event, Request};
//!
//! # async fn first_program() -> Result<(), stolon::Error> {
//! let engine = Engine::builder().model("Qwen/Qwen3-0.6B").kv_memory(512 << 20).build().await?;
//! let request = Request::text("A stolon is").max_tokens(64).stop(["\n"]);
//! let mut stream = engine.generate(request).await?; // dropping the stream cancels the request
//! while let Some(event) = stream.next().await {
//!     match event? {
//!         Event::Token(token) => print!("{}", token.text),
//!         Event::Finished(end) => println!("\n{} cached tokens", end.usage.cached_tokens),
//!         _ => {}
//!     }
//! }
//! engine.shutdown().await;
//! # Ok(())
//! # }
//! ```
//!
//! [`Engine`] is `Clone + Send + Sync + 'static`, and streams are owned. Keep an engine in the
//! state of your web framework and call it from any task.
//!
//! # Optimize it in your `Cargo.toml`
//!
//! The profiles of a dependency do not apply to your builds. In a plain `cargo run` the kernels
//! would be compiled without optimization, which makes them dozens of times slower; the engine then
//! logs a warning when it is built. Add to your `Cargo.toml`:
//!
//! ```toml
//! [profile.dev.package.stolon-kernels]
//! opt-level = 3
//! [profile.dev.package.stolon-cpu]
//! opt-level = 3
//! ```
//!
//! # Concepts
//!
//! * **Prefix cache.** The keys and values (KV) of every position that was computed are stored in
//!   blocks of a fixed number of positions. A radix tree indexes them by token ids. A request that
//!   starts with the same tokens reuses the full blocks of the shared prefix.
//!   [`Cache::query_match_len`] returns how much of a prompt is cached, without a lock and without
//!   side effects. [`Cache::pin`] protects a prefix from eviction, and [`Request::cache_salt`]
//!   separates tenants. When the cache is full, an [`EvictionPolicy`] selects what is evicted.
//! * **Admission.** A request waits in the admission queue until its *uncached* part fits into free
//!   KV blocks. [`AdmissionPolicy`] orders the queue, and the amount of later work that may
//!   overtake a request is bounded. A full queue refuses requests with
//!   [`EngineError::Overloaded`], which estimates when to retry.
//! * **Events.** A [`TokenStream`] yields one [`Event::Started`], then an [`Event::Token`] for each
//!   token, and [`Event::Finished`] with the reason, token counts and times. If the reader of a
//!   stream stops reading, only its own request is paused.
//! * **Batch invariance.** The logits of a request do not depend on what else is in the batch, how
//!   the prompt was cut into chunks, or whether its prefix was cached. Greedy answers and seeded
//!   answers are therefore repeatable. `EngineBuilder::batch_invariant` can switch it off on a GPU.
//!
//! # Runtimes, threads, drop and cancellation
//!
//! * **Tasks.** The engine's tasks run on the tokio runtime on which it was built, or on
//!   [`EngineBuilder::runtime`]. If that runtime ends, the engine stops ([`EngineError::Stopped`]).
//!   Engines and streams can be used from other runtimes and from any executor. If your application
//!   keeps its workers busy, give the engine a runtime of its own.
//! * **Threads.** One thread loads the model, computes every step and drops the backend. The CPU
//!   backend adds [`EngineBuilder::threads`] threads for its kernels. Conversations are rendered and
//!   longer prompts tokenized on the runtime's blocking threads, large ones on threads with a low
//!   priority: a quarter as many as there are cores, at least two ([`Engine::long_work`]). Clients
//!   ([`Request::tenant`]) share both fairly.
//! * **Drop.** Dropping a [`TokenStream`] cancels its request. Dropping the last [`Engine`] and the
//!   last stream stops the engine without waiting; the memory of the model is released soon after,
//!   on the engine's own thread. [`Engine::shutdown`] waits for that, and [`Engine::drain`] first
//!   lets the requests in flight complete.
//! * **Cancellation.** [`TokenStream::next`] loses no event if its future is dropped, for example
//!   in `select!`. If the future of [`Engine::generate`] is dropped, the request is not submitted
//!   or is canceled.
//! * **Failures.** If a part of the engine panics, its requests end with
//!   [`EngineError::Interrupted`], and the engine restarts with an empty cache. If that happens ten
//!   times in a row without a completed step, it stops with [`EngineError::GaveUp`].
//!   [`Error::is_retryable`] says whether it helps to send a request again, and
//!   [`Engine::health`] what the engine is doing. With `panic = "abort"` in your profile, a panic
//!   ends the whole program instead.
//! * **Forks.** A process that is forked without `exec` has the memory of an engine, but none of its
//!   threads: a call there waits forever. Build an engine in the new process, with a runtime of its
//!   own. The Python package refuses such calls.
//! * **Signals.** The engine installs no signal handler. With a disk tier, a program that may run
//!   with a limit on the size of files handles or ignores `SIGXFSZ`, which would end it
//!   (`EngineBuilder::kv_cache_dir`).
//! * **Shared state.** Several engines can run in one process; they share nothing but the default
//!   collector of `crossbeam-epoch`. A thread that stays pinned in it delays the release of the
//!   index memory of all prefix trees, not of KV blocks.
//!
//! # Tracing
//!
//! Each request has a `tracing` span named `request` (target `stolon`, level info) in the span of
//! its caller: prompt, cached and generated tokens, milliseconds in the queue and to the first
//! token, how it ended and why. Refusals, evictions and preemptions are events of level debug. The
//! actor library logs spans of its own; filter them with `ractor=warn`.
//!
//! # Features
//!
//! | feature | default | what it adds |
//! |---|---|---|
//! | `text` | yes | prompts and answers as text: tokenizers and chat templates |
//! | `grammar` | yes | answers that follow a JSON schema or a grammar ([`Request::grammar`]) |
//! | `schema` | no | answers and tools with Rust types (`Engine::ask`, `Tool::new`); implies `grammar` |
//! | `images` | no | prompts with images ([`Request::image`]) |
//! | `hub` | yes | downloading models from the Hugging Face hub |
//! | `tiers` | no | cached prefixes outside of the KV pool: a disk tier, export and import |
//! | `object-store` | no | an object store behind the disk tier; implies `tiers` |
//! | `candle` | no | `EngineBuilder::device`, by itself for the CPU only |
//! | `cuda` | no | NVIDIA GPUs; implies `candle` |
//! | `cuda-core` | no | NVIDIA GPUs without flash attention, which is faster to compile; implies `candle` |
//! | `metal` | no | Apple GPUs; implies `candle` |
//! | `testing` | no | `backend::fake`, a deterministic backend for tests of your program |
//! | `demo-model` | no | the models `demo` and `demo-vision`, small models inside the crate; implies `text`. `demo-vision` takes images with `images` |
//!
//! Without `text`, prompts are token ids ([`Request::tokens`]), and a request that uses text fails
//! with [`Error::NoTokenizer`].
//!
//! # Where to find what
//!
//! * [`EngineBuilder`]: all settings with their defaults;
//! * [`Request`] and [`SamplingParams`]: what to generate, and how tokens are sampled;
//! * [`Completion`]: a whole answer, from [`TokenStream::collect_text`] or [`Engine::best_of`];
//! * `Engine::run_tools` and `Engine::with_rules`: answers of a model that may call functions;
//! * [`Engine::embed`]: the embedding of a text;
//! * [`Engine::score`] and [`Engine::rerank`]: labels of texts, and documents in order for a query;
//! * [`ModelSet`]: several models, which are loaded when they are needed;
//! * [`Engine::load_adapter`]: LoRA adapters, which each request may choose;
//! * [`inspect()`](inspect::inspect): what a model is and needs, without loading it;
//! * [`Error`] and [`EngineError`]: every failure, with the expected and the actual value;
//! * [`EngineStats`], [`CacheStats`], [`Cache::events`] and [`Engine::audit`]: observation;
//! * [`CustomTokenizer`] with `EngineBuilder::text_model`: a tokenizer of the program's own;
//! * [`mod@backend`]: running another model or device under the engine. The example
//!   `own_backend.rs` implements a complete backend and a custom [`EvictionOrder`].
//!
//! The OpenAI-compatible HTTP API is in the crate `stolon-http`, as an axum router, and the command
//! `stolon` in `stolon-cli`.
#![forbid(unsafe_code)]
#![doc(test(attr(deny(unused_imports, unused_must_use, deprecated))))]

// The programs of the README and of the book are compiled, and run if they have a `main`, as
// documentation tests. They need features that `cargo test --workspace` enables.
#[cfg(all(doctest, feature = "demo-model"))]
#[doc = include_str!("../README.md")]
mod readme {}
#[cfg(all(doctest, feature = "demo-model"))]
#[doc = include_str!("../docs/src/embedding.md")]
#[doc = include_str!("../docs/src/sessions-and-pins.md")]
#[doc = include_str!("../docs/src/adapters.md")]
mod book {}
#[cfg(all(doctest, feature = "schema"))]
#[doc = include_str!("../docs/src/tools.md")]
mod book_tools {}
#[cfg(all(doctest, feature = "images"))]
#[doc = include_str!("../docs/src/images.md")]
mod book_images {}

mod adapters;
mod after;
mod best;
mod builder;
mod cache_miss;
mod completion;
#[cfg(feature = "candle")]
mod device;
#[cfg(not(feature = "candle"))]
#[path = "device/absent.rs"]
mod device;
mod drafting;
mod embedding;
mod engine;
mod error;
mod estimate;
#[cfg(feature = "images")]
mod images;
#[cfg(not(feature = "images"))]
#[path = "images/absent.rs"]
mod images;
mod long_work;
mod marks;
mod min_tokens;
mod model_info;
mod models;
mod next_turn;
mod prompt;
mod repetition;
mod request;
mod skills;
mod stream;
mod suppressed;
#[cfg(feature = "text")]
mod text;
#[cfg(not(feature = "text"))]
#[path = "text/absent.rs"]
mod text;
#[cfg(feature = "tiers")]
mod tiers;
#[cfg(not(feature = "tiers"))]
#[path = "tiers/absent.rs"]
mod tiers;
#[cfg(feature = "text")]
mod tools;
#[cfg(feature = "schema")]
mod typed;

/// What the built-in demo models can be asked about (feature `demo-model`): a handbook for `demo`,
/// and a picture for `demo-vision`.
#[cfg(feature = "demo-model")]
pub mod demo {
    pub use stolon_checkpoint::demo::{Handbook, Picture, Question, handbook, picture};
    /// A decoded picture, to show it, and the limits of decoding.
    #[cfg(feature = "images")]
    pub use stolon_vision::{Picture as Pixels, PictureLimits};
}

/// Everything that an implementation of [`Backend`] needs. `examples/own_backend.rs` is a complete
/// one.
pub mod backend {
    #[cfg(feature = "testing")]
    pub use stolon_backend::fake;
    pub use stolon_backend::{
        Adapter, AdapterLoadError, AdapterLoader, Backend, BackendError, BackendSpec, BatchChecker,
        DraftError, DraftOutput, DraftTask, Draw, ImageEmbeddings, ImageInput, KvFormat, LogitRows,
        SequenceSlice, SliceImage, SliceState, StateCheckpoint, StateSpec, StepBatch, StepOutput,
        WithDraft, check_read, check_write, rotary_len,
    };
    pub use stolon_kvcache::BlockId;
}

pub use adapters::{AdapterError, AdapterInfo};
pub use best::BestOf;
pub use builder::{EngineBuilder, ModelArg};
pub use cache_miss::{CacheMiss, LoggedMiss, MissCount, MissMessage, MissReason};
pub use completion::Completion;
pub use drafting::Drafting;
pub use embedding::{Embedding, EmbeddingInfo};
pub use engine::{Cache, Engine, LabelScores, Ranked, Scores, SessionOptions, Sessions};
pub use error::Error;
pub use estimate::Estimate;
pub use marks::CacheMark;
pub use model_info::ModelInfo;
pub use models::{
    ModelLease, ModelRecipe, ModelSet, ModelSetBuilder, ModelSetError, ModelState, ModelStatus,
};
pub use request::{Prompt, PromptPart, Request};
pub use skills::{BoundingBox, CaptionLength, Grounding, Point, Reasoning, Skill, SpatialRef};
pub use stream::TokenStream;
#[cfg(feature = "text")]
pub use tools::{AnswerRules, FormatChoice, Tool, ToolChoice, ToolOutput, ToolRun, ToolSpec};

pub use futures::{Stream, StreamExt};
#[cfg(feature = "schema")]
pub use schemars;
pub use stolon_actors::{CacheEvents, Pin, PinOptions};
pub use stolon_backend::{
    Backend, LogitsProcessor, Pooling, RegionBins, RegionLogits, RegionToken, SamplingError,
    SamplingParams, SharedProcessor, TokenLogprob,
};
pub use stolon_checkpoint::inspect;
#[cfg(feature = "hub")]
pub use stolon_checkpoint::{DownloadProgress, HubOptions};
pub use stolon_checkpoint::{
    EmbeddingConfig, EmbeddingSizes, KernelError, KvBudget, KvStoreError, KvType, ModelError,
    ModelSource, ScoreActivation, ScoreConfig, TextPrompts, WeightType, WindowKv,
};
pub use stolon_cpu::Machine;
#[cfg(feature = "candle")]
pub use stolon_cuda::DeviceChoice;
pub use stolon_kvcache::{
    CacheEvent, CacheSnapshot, CachedPrefix, EvictionCandidate, EvictionOrder, EvictionPolicy,
    EvictionRank, ImageSpan, Namespace, NamespaceBuilder, NodeDump, NumberedEvent, PinError, PinId,
    PositionRun, PrefixMatch, TokenSpan, TreeDump, UnknownEvictionPolicy,
};
pub use stolon_scheduler::{
    AdmissionPolicy, AuditReport, CacheStats, DraftContext, DraftSource, DraftSources, EngineError,
    EngineHealth, EngineHistograms, EngineStats, Event, Finish, FinishReason, HistogramData,
    LengthBound, Pinned, PrefixMark, Quota, SessionError, SessionId, SessionInfo, Speculation,
    Timings, TokenEvent, UnknownPolicy, Usage,
};
pub use stolon_text::{
    Answer, AnswerFormat, AnswerParser, AnswerPart, ReasoningFormat, StopStrings, ToolCall,
    ToolCallFormat,
};
pub use stolon_text::{
    Busy, ChatMessage, ChatTemplateError, CustomTokenizer, FunctionSchema, GgufTokenizer, Grammar,
    GrammarError, Infill, InfillFile, MessageContent, Otherwise, SchemaOptions, TextSource,
    TokenizerError, TokenizerSource, ToolCallGrammar, replace_lone_surrogates,
};
#[cfg(feature = "text")]
pub use stolon_text::{
    ChatError, ChatOptions, ChatTemplate, TextModel, Tokenizer, ToolUse, panics_become_errors,
};
#[cfg(feature = "tiers")]
pub use tiers::{
    DiskError, DiskStats, ExportedPrefix, FormatError, ObjectError, ObjectStats, PrefetchPolicy,
    PrefixImport, TierError, TierMatch, Tiers, WritePolicy,
};
