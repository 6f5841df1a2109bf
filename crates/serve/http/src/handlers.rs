//! The handlers of the routes, and how requests of each API become requests of the engine.
//!
//! A request for answers of the model takes these forms, whichever API it is of:
//!
//! 1. the request of axum. The layer `guard` has checked its key;
//! 2. [`Received`](crate::wire::receive::Received): its body, received within limits;
//! 3. a JSON value, in which old messages get an acceptable form (`wire/history.rs`);
//! 4. the type of its API, such as [`ChatRequest`](crate::api::chat::ChatRequest), in an
//!    [`Incoming`](context::Incoming);
//! 5. [`Dialogue`](dialogue::Dialogue): its conversation, in one form for all APIs of chat;
//! 6. [`Call`](options::Call): its checked options and its prompts, in one form for all APIs;
//! 7. one [`Request`](stolon::Request) of the engine for each prompt.
//!
//! [`Call::chat`](options::Call::chat) and [`Call::respond`](options::Call::respond) do the last
//! two steps (`generate.rs`). The reply goes the other way: events of the engine, which
//! `wire/reply.rs` passes to the [`Dialect`](crate::wire::reply::Dialect) of the API.

pub(crate) mod adapters;
pub(crate) mod admin;
pub(crate) mod app;
pub(crate) mod cache;
pub(crate) mod cache_events;
pub(crate) mod cache_files;
pub(crate) mod cache_misses;
pub(crate) mod chat;
pub(crate) mod choices;
pub(crate) mod completions;
pub(crate) mod context;
pub(crate) mod dialogue;
pub(crate) mod embeddings;
pub(crate) mod free_text;
pub(crate) mod generate;
pub(crate) mod hints;
pub(crate) mod llama_cpp;
pub(crate) mod logprobs;
pub(crate) mod messages;
pub(crate) mod metrics;
pub(crate) mod ollama;
pub(crate) mod options;
pub(crate) mod outline;
pub(crate) mod parsing;
pub(crate) mod pooled;
pub(crate) mod priority;
pub(crate) mod responses;
pub(crate) mod scores;
pub(crate) mod sessions;
pub(crate) mod several;
pub(crate) mod skills;
pub(crate) mod structured;
pub(crate) mod thinking;
pub(crate) mod token_rules;
pub(crate) mod tokenize;
pub(crate) mod warm_up;
