//! Models on the CPU for the Stolon engine: configurations, weight loading, the decoder and the
//! paged KV store.
//!
//! * [`ModelSource`] and [`load()`]: read and check a model from a Hugging Face directory, a GGUF
//!   file, the Hugging Face hub, or a preset with random weights;
//! * [`DecoderConfig`]: one description that all supported architectures fit into;
//! * [`CpuBackend`]: runs the decoder with its KV store and threads behind the engine's
//!   [`Backend`](stolon_backend::Backend) trait.

mod adapter;
pub mod config;
pub mod cpu;
mod decoder;
#[cfg(feature = "demo-model")]
pub mod demo;
pub mod error;
mod files;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
mod gguf;
#[cfg(feature = "hub")]
pub mod hub;
pub mod inspect;
pub mod kv_probe;
pub mod kv_store;
pub mod load;
mod memory;
mod mmap;
pub mod random;
pub mod source;
mod state_store;
mod vision;
mod weight_type;
pub mod weights;
mod workers;

pub use config::{
    Activation, Architecture, DecoderConfig, DeltaNetConfig, DeltaNetKind, ExpertsConfig,
    LayerConfig, Mamba2Config, MixerKind, MlpKind, Multipliers, PatchPositions, ProjectorConfig,
    QueryScaling, RegionConfig, Rope, RopeScaling, ShortContext, TowerConfig, VisionConfig,
};
pub use cpu::{CpuBackend, CpuOptions};
pub use decoder::{Stage, StageTimes};
pub use error::{KvStoreError, ModelError};
#[cfg(feature = "hub")]
pub use hub::{DownloadProgress, HubOptions, ProgressCallback};
pub use inspect::{InspectOptions, Inspection, inspect};
pub use kv_store::{KvBudget, KvType, WindowKv};
pub use load::{
    EmbeddingConfig, EmbeddingSizes, GenerationDefaults, ImageModel, LoadOptions, LoadedModel,
    PromptParts, ReasoningTokens, SkillPrompts, SuppressedTokens, load, read_gguf_tokenizer,
};
pub use random::random_model;
pub use source::ModelSource;
// A payload of `ModelError`.
pub use stolon_kernels::KernelError;
pub use weight_type::WeightType;
pub use weights::{Tensor, TensorType, Weights};
