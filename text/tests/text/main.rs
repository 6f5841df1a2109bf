//! Tests through the public API: tokenizers, streaming detokenization, chat templates.

mod chat;
mod gguf;
mod text_model;
mod tokenizer;
mod vocabularies;
