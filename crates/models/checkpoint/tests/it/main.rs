//! The tests of the files of models, in one program: each program that is linked takes seconds.
#![allow(clippy::unwrap_used, reason = "a test's helpers fail by panicking")]

mod support {
    pub(crate) mod adapter_writer;
    pub(crate) mod candle_types;
    pub(crate) mod gguf_model;
    pub(crate) mod gguf_writer;
    #[cfg(feature = "hub")]
    pub(crate) mod hub_server;
    pub(crate) mod model_adapter;
    pub(crate) mod model_dir;
}

mod encoders;
mod hostile;
#[cfg(feature = "hub")]
mod hostile_hub;
#[cfg(feature = "hub")]
mod hub;
mod load_directory;
mod load_gguf;
mod real_vocabularies;
