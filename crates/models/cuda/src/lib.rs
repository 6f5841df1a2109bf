//! The GPU backend of the Stolon engine: the decoder of `stolon-cpu`, written against candle's
//! tensors with the device as a parameter.
//!
//! [`CandleBackend`] implements [`Backend`](stolon_backend::Backend) for text. It runs on the CPU
//! without any feature, which is how it is tested; with the feature `cuda` on NVIDIA GPUs, and with
//! `metal` on Apple's. The crate's README says what was tested on which device.
//!
//! * [`CandleOptions`] and [`DeviceChoice`]: where the model runs, and with which types and sizes;
//! * [`CandleBackend`]: the weights, the KV store and the forward pass;
//! * [`DeviceInfo`], [`DeviceChoice::copy_speed`] and [`DeviceChoice::product_speed`]: properties
//!   and speed limits of a device, for reports;
//! * `attention`: candle's flash attention and split-KV attention on CUDA, and attention from
//!   gathered keys and values on every device;
//! * `mixer`: attention, latent attention, convolutions and recurrent layers, a file for each;
//! * `kv_store` and `kv_write`: the paged KV store and the operation that writes to it in place;
//! * `state_store`, `state_inputs` and `recurrence`: the states of recurrent layers, what a step
//!   uploads for them, and the operation that advances them;
//! * `gate`: the gate of an MLP in one pass;
//! * `adapter_weights` and `adapters`: the matrices of LoRA adapters, and the rows of a step that use
//!   them;
//! * `draw`: tokens that are drawn from rows of logits on the device;
//! * `inputs` and `graphs`: what a step uploads, and decode steps as CUDA graphs.
//!
//! A backend is made on the thread that uses it, because a CUDA context belongs to a thread's
//! stream: `EngineBuilder::backend_with` in the crate `stolon` does that.

mod adapter_weights;
mod adapters;
mod attention;
mod backend;
mod bits;
mod decoder;
mod device;
mod draw;
mod dry_run;
mod experts;
mod feed_forward;
mod gate;
mod graphs;
mod inputs;
mod kv_store;
mod kv_write;
mod layer;
mod limits;
mod linear;
mod loader;
mod memory;
mod mixer;
mod mlp;
mod norm;
mod options;
mod pass;
mod per_layer;
mod plan;
mod recurrence;
mod rope;
mod state_inputs;
mod state_store;
mod storage;

pub use backend::{CandleBackend, StepMemory};
pub use device::DeviceChoice;
pub use limits::DeviceInfo;
pub use options::{CandleOptions, ComputeType, OpenError};
