//! A Stolon engine as a worker of NVIDIA Dynamo.
//!
//! Dynamo's frontend has the HTTP API, tokenizes prompts and chooses a worker; [`StolonWorker`]
//! computes. It implements Dynamo's trait `LLMEngine`, so that Dynamo's own runtime registers it,
//! sends it requests as token ids, and stops it. The program `stolon-dynamo` runs one worker.
//!
//! 1. `start` loads the model and reports the sizes of the KV cache.
//! 2. `kv_event_sources` hands every change of the prefix cache to Dynamo's publisher, so that the
//!    router knows which worker holds which prefix. `setup_metrics` reports the load.
//! 3. `generate` answers requests. A request ends when its stream is dropped or its context is
//!    stopped.
//! 4. `cleanup` lets running requests finish and stops the engine.
//!
//! Requests that a worker does not support, such as images and several answers to one prompt, is
//! refused with `InvalidArgument` and a message that names the option.

mod error;
mod events;
mod load;
mod reply;
mod request;
mod worker;

pub use worker::{StartEngine, StolonWorker, WorkerOptions};
