//! Requests and replies of the HTTP API as plain typed data.
//!
//! One file per endpoint: [`completions`], [`chat`], [`responses`], [`messages`], [`embeddings`],
//! [`llama_cpp`], [`ollama`], [`skills`], [`sessions`], [`tokenize`], [`models`], and [`adapters`],
//! [`admin`], [`cache`] and [`outline`] for the operator's endpoints. Shared types have files too:
//! [`options`] (parameters of all APIs for generation), [`structured`] (schemas and grammars of
//! answers), [`reply`] (the object around generated choices), [`logprobs`] and [`error`].
//!
//! Requests implement `Deserialize` and replies implement `Serialize`. The types only fix the
//! shape: whether a value is in the model's range is checked by the engine, and rules that involve
//! two parameters are checked by the handlers.
//!
//! `null` means the same as leaving a parameter out, because OpenAI's clients send it for
//! parameters that were not set. Parameters without a field are collected in
//! [`UnknownFields`](fields::UnknownFields) and refused: a misspelled parameter must not be
//! ignored. Exceptions are values that request nothing, such as `"tools": []`.

pub mod adapters;
pub mod admin;
pub mod cache;
pub mod chat;
pub mod completions;
pub mod embeddings;
pub mod error;
pub mod fields;
pub mod images;
pub mod llama_cpp;
pub mod logprobs;
pub mod messages;
pub mod models;
pub(crate) mod neutral;
pub mod ollama;
pub mod options;
pub mod outline;
pub mod reply;
pub mod responses;
pub(crate) mod schemas;
pub mod scores;
pub mod sessions;
pub mod skills;
pub mod structured;
pub mod tokenize;
