//! Tests through the public API: tokenizers, streaming detokenization, chat templates.

mod chat;
mod custom;
mod gguf;
#[cfg(feature = "grammar")]
mod grammar;
mod history;
mod hostile_templates;
mod hostile_tokenizers;
mod infill;
mod pair;
mod real_templates;
mod text_model;
mod tokenizer;
mod vocabularies;
