//! The text side through its public API: tokenizers, streaming, chat templates.

mod chat;
mod gguf;
mod text_model;
mod tokenizer;
mod vocabularies;
