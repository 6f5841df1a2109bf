//! Tests through the public API: tokenizers, streaming detokenization, chat templates.

mod chat;
mod gguf;
#[cfg(feature = "grammar")]
mod grammar;
mod hostile_templates;
mod hostile_tokenizers;
mod text_model;
mod tokenizer;
mod vocabularies;
