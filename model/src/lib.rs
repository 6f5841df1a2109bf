//! Models, their KV store and their text: everything the Stolon engine computes with.

pub mod backend;
pub mod config;
pub mod error;
pub mod load;
pub mod sampling;
pub mod source;
pub mod weights;
pub mod fake;

pub use backend::{
    Backend, BackendError, BackendSpec, LogitRows, SequenceSlice, StepBatch, StepOutput,
};
pub use config::{Activation, Architecture, DecoderConfig, LayerConfig, Rope, RopeScaling};
pub use error::ModelError;
pub use load::{GenerationDefaults, GgufTokenizer, LoadedModel, TextSource, TokenizerSource};
pub use source::ModelSource;
pub use weights::{Tensor, TensorType, Weights};
pub use sampling::{
    Sampled, SamplerState, SamplingError, SamplingParams, TokenLogprob, prompt_logprob,
};
pub use fake::{FakeBackend, FakeFault, FakeHandle, FakeLatency, FakeOptions};
