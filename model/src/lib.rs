//! Models, their KV store and their text: everything the Stolon engine computes with.

pub mod backend;
pub mod chat_template;
pub mod config;
pub mod cpu;
mod decoder;
#[cfg(feature = "demo-model")]
pub mod demo;
pub mod detokenizer;
pub mod error;
pub mod fake;
pub mod hub;

pub mod kv_store;
pub mod load;
pub mod random;
pub mod sampling;
pub mod source;
pub mod stop_strings;

pub mod text;
pub mod tokenizer;
pub mod weights;

pub use backend::{
    Backend, BackendError, BackendSpec, LogitRows, SequenceSlice, StepBatch, StepOutput,
};
pub use chat_template::{
    ChatMessage, ChatOptions, ChatTemplate, ChatTemplateError, MessageContent,
};
pub use config::{Activation, Architecture, DecoderConfig, LayerConfig, Rope, RopeScaling};
pub use cpu::{CpuBackend, CpuOptions, WeightType};
pub use decoder::{Stage, StageTimes};
pub use detokenizer::Detokenizer;
pub use error::ModelError;
pub use fake::{FakeBackend, FakeFault, FakeHandle, FakeLatency, FakeOptions};
pub use hub::HubOptions;
pub use kv_store::{KvBudget, KvStoreError, KvType};
pub use load::{
    GenerationDefaults, GgufTokenizer, LoadOptions, LoadedModel, TextSource, TokenizerSource, load,
};
pub use random::random_model;
pub use sampling::{
    Sampled, SamplerState, SamplingError, SamplingParams, TokenLogprob, prompt_logprob,
};
pub use source::ModelSource;
pub use stop_strings::{StopScan, StopStrings};
pub use text::{ChatError, TextModel};
pub use tokenizer::{Tokenizer, TokenizerError};
pub use weights::{Tensor, TensorType, Weights};
