//! Stolon: an LLM inference engine for async Rust programs, centred on a shared prefix cache.

mod builder;
mod engine;
mod error;
mod event;
mod pending;
mod request;
mod stats;
mod stream;

/// A handbook, and questions about it, for the model that ships with the crate.
#[cfg(feature = "demo-model")]
pub mod demo {
    pub use stolon_model::demo::{Handbook, Question, handbook};
}

pub use builder::{EngineBuilder, ModelArg};
pub use engine::Engine;
pub use error::Error;
pub use event::{
    Completion, Event, Finish, FinishReason, Timings, TokenEvent, TokenLogprob, Usage,
};
pub use pending::{ChatMessage, ModelSource, SamplingParams};
pub use request::{Prompt, Request};
pub use stats::{AuditReport, EngineStats, ModelInfo};
pub use stolon_actors::AdmissionPolicy;
pub use stream::TokenStream;
