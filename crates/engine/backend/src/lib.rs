//! The interface between the Stolon engine and the code that computes a model's forward pass.
//!
//! A [`Backend`] owns the device, the weights and the paged KV store. The engine's executor thread
//! hands it one [`StepBatch`] at a time, a ragged batch of prefill chunks and decodes, and gets
//! back rows of logits or hidden states. Everything else (requests, the prefix tree, scheduling,
//! sampling) happens outside of it. To run a model of your own under the engine, implement this one
//! trait; the crate depends on nothing but [`stolon_kvcache`] for
//! [`BlockId`](stolon_kvcache::BlockId), a random number generator and a hash function.
//!
//! * [`batch`](StepBatch): the batch and its parts, the sizes a backend declares, its errors;
//! * [`ImageInput`]: an image of a prompt, and the embeddings that an encoder makes of it;
//! * [`RegionBins`]: coordinates and sizes as tokens, and the logits of their bins;
//! * [`Adapter`]: changes of the weights that a sequence chooses, and how they are loaded;
//! * [`WithDraft`]: a model with a smaller one that guesses its tokens;
//! * [`BatchChecker`]: validates a batch against the contract before anything is written;
//! * [`sampling`]: from rows of logits to token ids, as the executor does it;
//! * [`Pooling`]: from hidden states to embeddings;
//! * [`kv_probe`]: a short prompt that tells whether two machines compute the same KV;
//! * `fake` (feature `testing`): a deterministic backend that detects wrong block tables, for
//!   tests of schedulers and of programs that embed the engine.
#![forbid(unsafe_code)]

// The examples of the README are documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

mod adapter;
mod batch;
mod check;
mod draft;
#[cfg(feature = "testing")]
pub mod fake;
mod image;
mod kv_format;
pub mod kv_probe;
mod pooling;
mod regions;
pub mod sampling;
mod with_draft;

pub use adapter::{Adapter, AdapterLoadError, AdapterLoader};
pub use batch::{
    Backend, BackendError, BackendSpec, LogitRows, SequenceSlice, SliceState, StateCheckpoint,
    StateSpec, StepBatch, StepOutput,
};
pub use check::{BatchChecker, check_read, check_write};
pub use draft::{DraftOutput, DraftTask, check_drafts};
pub use image::{ImageEmbeddings, ImageInput, SliceImage, rotary_len};
pub use kv_format::KvFormat;
pub use pooling::{Pooler, Pooling};
pub use regions::{RegionBins, RegionLogits, RegionToken};
pub use sampling::{
    Draw, LogitsProcessor, Sampled, SamplerState, SamplingError, SamplingParams, SharedProcessor,
    TokenLogprob, prompt_logprob,
};
pub use with_draft::{DraftError, WithDraft};
