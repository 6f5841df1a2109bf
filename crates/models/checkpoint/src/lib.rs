//! Describes models and reads their files.
//!
//! * [`ModelSource`] and [`load()`] read and check a model from a Hugging Face directory, a GGUF
//!   file, the Hugging Face hub, or a preset with random weights;
//! * [`DecoderConfig`] is one description that all supported architectures fit into, and lists the
//!   tensors that it needs;
//! * [`Weights`] has the tensors of the files, by name. They are read in place;
//! * [`adapter`] has LoRA adapters for the projections of a model;
//! * [`kv`] has the sizes and element types of stored keys and values;
//! * [`inspect()`] describes the files of a model without loading its weights.
//!
//! This crate computes nothing. `stolon-cpu` and `stolon-cuda` run the models that it describes.

pub mod adapter;
pub mod config;
#[cfg(feature = "demo-model")]
pub mod demo;
pub mod encoder;
pub mod error;
mod files;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
mod gguf;
#[cfg(feature = "hub")]
pub mod hub;
pub mod inspect;
pub mod kv;
pub mod load;
pub mod memory;
mod mmap;
pub mod random;
pub mod source;
mod weight_type;
pub mod weights;

pub use config::{
    Activation, Architecture, AttentionConfig, DecoderConfig, DeltaNetConfig, DeltaNetKind,
    ExpertsConfig, FeedForwardConfig, GateFunction, LatentConfig, LayerConfig, Mamba2Config,
    MixerConfig, MlpConfig, PatchPositions, ProjectorConfig, QueryScaling, RegionConfig, Rope,
    RopeScaling, ShortContext, TowerConfig, VisionConfig,
};
pub use encoder::{EncoderConfig, HeadConfig, ScoreActivation, ScoreConfig};
pub use error::{KvStoreError, ModelError};
#[cfg(feature = "hub")]
pub use hub::{DownloadProgress, HubOptions, ProgressCallback};
pub use inspect::{InspectOptions, Inspection, inspect};
pub use kv::{KvBudget, KvType, WindowKv};
pub use load::{
    AnyModel, DraftHead, EmbeddingConfig, EmbeddingSizes, EncoderTask, GenerationDefaults,
    ImageModel, LoadOptions, LoadedEncoder, LoadedModel, LoadedScores, PairForm, PromptParts,
    ReasoningTokens, ScoreTokens, SkillPrompts, SuppressedTokens, TextPrompts, fetched, load,
    load_any, load_draft_head, read_gguf_tokenizer,
};
pub use random::random_model;
pub use source::ModelSource;
// It is a payload of `ModelError`.
pub use stolon_kernels::KernelError;
pub use weight_type::WeightType;
pub use weights::{Contents, Tensor, TensorType, Weights};
