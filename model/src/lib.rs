//! Models, their KV store and their text: everything the Stolon engine computes with.

pub mod backend;

pub use backend::{
    Backend, BackendError, BackendSpec, LogitRows, SequenceSlice, StepBatch, StepOutput,
};
