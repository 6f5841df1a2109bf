//! Models on the CPU: the decoder, the image encoder, and the stores of KV and of states, and text
//! encoders ([`EncoderBackend`]), behind the engine's [`Backend`](stolon_backend::Backend) trait.
//!
//! `stolon-checkpoint` describes a model and reads its files, and `stolon-kernels` has the
//! arithmetic.
#![forbid(unsafe_code)]

mod backend;
mod decoder;
mod draft_head;
mod encoder;
mod full_kv;
mod head;
mod kv_store;
mod machine;
mod memory;
mod state_store;
mod table;
mod vision;
mod workers;

pub use backend::{CpuBackend, CpuOptions};
pub use decoder::{Stage, StageTimes};
pub use encoder::EncoderBackend;
pub use head::Head;
pub use machine::Machine;
pub use workers::at_low_priority;
