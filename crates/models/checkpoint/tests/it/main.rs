//! The tests of the files of models, in one program: each program that is linked takes seconds.

mod support {
    pub mod adapter_writer;
    pub mod candle_types;
    pub mod gguf_model;
    pub mod gguf_writer;
    #[cfg(feature = "hub")]
    pub mod hub_server;
    pub mod model_adapter;
    pub mod model_dir;
}

mod hostile;
#[cfg(feature = "hub")]
mod hostile_hub;
#[cfg(feature = "hub")]
mod hub;
mod load_directory;
mod load_gguf;
mod real_vocabularies;
