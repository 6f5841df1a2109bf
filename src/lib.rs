//! Stolon: an LLM inference engine for async Rust programs, centred on a shared prefix cache.
//!
//! The KV of every prompt prefix that was computed once is kept in blocks, indexed by a radix
//! tree, and shared by all later requests that start the same way. Any task can ask, without a
//! lock and without a side effect, how much of a prompt is cached; admission goes by what a
//! request will really cost.
//!
//! ```no_run
//! # async fn embed() -> Result<(), stolon::Error> {
//! use stolon::{Engine, Event, Request};
//!
//! let engine = Engine::builder().model("Qwen/Qwen3-0.6B").kv_memory(512 << 20).build().await?;
//! let request = Request::text("A stolon is").max_tokens(64).stop(["\n"]);
//! println!("cached: {} tokens", engine.query_match_len(&request)?);
//! let mut stream = engine.generate(request)?; // owned and 'static; dropping it cancels
//! while let Some(event) = stream.next().await {
//!     if let Event::Token(token) = event? {
//!         print!("{}", token.text);
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! [`Engine`] is `Clone + Send + Sync + 'static`: keep it in your web framework's state, call it
//! from any task. [`EngineBuilder`] has the settings, [`Request`] what can be asked for,
//! [`TokenStream`] what comes back, [`EngineStats`] and [`Engine::audit`] what goes on inside.
#![forbid(unsafe_code)]
#![doc(test(attr(deny(unused_imports, unused_must_use, deprecated))))]

// The README's program is compiled and run as a documentation test. It needs the demo model, which
// `cargo test --workspace` enables.
#[cfg(all(doctest, feature = "demo-model"))]
#[doc = include_str!("../README.md")]
mod readme {}

mod best;
mod builder;
mod completion;
mod engine;
mod error;
mod model_info;
mod request;
mod stream;
#[cfg(feature = "text")]
mod text;
#[cfg(not(feature = "text"))]
#[path = "text/absent.rs"]
mod text;

/// A handbook, and questions about it, for the model that ships with the crate.
#[cfg(feature = "demo-model")]
pub mod demo {
    pub use stolon_model::demo::{Handbook, Question, handbook};
}

/// Everything that an implementation of [`Backend`] needs.
pub mod backend {
    pub use stolon_backend::{
        Backend, BackendError, BackendSpec, BatchChecker, LogitRows, SequenceSlice, StepBatch,
        StepOutput,
    };
    pub use stolon_kvcache::BlockId;
}

pub use best::BestOf;
pub use builder::{EngineBuilder, ModelArg};
pub use completion::Completion;
pub use engine::Engine;
pub use error::Error;
pub use model_info::ModelInfo;
pub use request::{Prompt, Request};
pub use stream::TokenStream;

pub use futures::{Stream, StreamExt};
pub use stolon_actors::{CacheEvents, Pin};
pub use stolon_backend::{Backend, SamplingError, SamplingParams, TokenLogprob};
pub use stolon_kvcache::{
    CacheEvent, CacheSnapshot, EvictionCandidate, EvictionOrder, EvictionPolicy, EvictionRank,
    Namespace, NodeDump, NumberedEvent, PinError, PinId, TreeDump, UnknownEvictionPolicy,
};
pub use stolon_model::{KvBudget, KvStoreError, KvType, ModelError, ModelSource, WeightType};
pub use stolon_scheduler::{
    AdmissionPolicy, AuditReport, CacheStats, EngineError, EngineStats, Event, Finish,
    FinishReason, LengthBound, Timings, TokenEvent, UnknownPolicy, Usage,
};
pub use stolon_text::{
    ChatMessage, ChatTemplateError, MessageContent, TextSource, TokenizerError, TokenizerSource,
};
#[cfg(feature = "text")]
pub use stolon_text::{TextModel, Tokenizer};
