//! The handlers of the routes, and how requests of each API become requests of the engine.

pub(crate) mod adapters;
pub(crate) mod admin;
pub(crate) mod cache;
pub(crate) mod cache_events;
pub(crate) mod cache_files;
pub(crate) mod chat;
pub(crate) mod choices;
pub(crate) mod completions;
pub(crate) mod dialogue;
pub(crate) mod embeddings;
pub(crate) mod free_text;
pub(crate) mod logprobs;
pub(crate) mod messages;
pub(crate) mod metrics;
pub(crate) mod options;
pub(crate) mod outline;
pub(crate) mod parsing;
pub(crate) mod priority;
pub(crate) mod responses;
pub(crate) mod sessions;
pub(crate) mod skills;
pub(crate) mod structured;
pub(crate) mod thinking;
pub(crate) mod token_rules;
pub(crate) mod tokenize;
