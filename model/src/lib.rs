//! Models, their KV store and their text: everything the Stolon engine computes with.

pub mod config;
pub mod cpu;
mod decoder;
#[cfg(feature = "demo-model")]
pub mod demo;
pub mod error;
#[cfg(feature = "hub")]
pub mod hub;
pub mod kv_store;
pub mod load;
pub mod random;
pub mod source;
pub mod weights;

pub use config::{Activation, Architecture, DecoderConfig, LayerConfig, Rope, RopeScaling};
pub use cpu::{CpuBackend, CpuOptions, WeightType};
pub use decoder::{Stage, StageTimes};
pub use error::ModelError;
#[cfg(feature = "hub")]
pub use hub::HubOptions;
pub use kv_store::{KvBudget, KvStoreError, KvType};
pub use load::{GenerationDefaults, LoadOptions, LoadedModel, load, read_gguf_tokenizer};
pub use random::random_model;
pub use source::ModelSource;
pub use weights::{Tensor, TensorType, Weights};
