//! Text for a language model: tokenizers, chat templates, streaming detokenization, stop strings.
//!
//! The engine below this crate works on token ids only. A program that sends and receives ids does
//! not need it; the feature `tokenizer`, which is on by default, brings the tokenizer and template
//! libraries. Without the feature only the plain data types, [`StopStrings`] and [`AnswerParser`]
//! are left.
//!
//! * [`TextSource`]: the tokenizer and templates in a model's files, as a loader has read it;
//! * `TextModel`: tokenizer, chat templates and end-of-sequence ids of one model;
//! * `Tokenizer`, `Detokenizer`: from text to token ids, and back while tokens arrive;
//! * [`CustomTokenizer`]: a tokenizer that the program brings itself;
//! * `ChatTemplate`: from [`ChatMessage`]s to the text that the model was trained on;
//! * [`Infill`]: a gap in a text; `InfillTokens` makes the prompt that a model fills it for;
//! * `PairPrompts`: the prompts of a reranker with a decoder;
//! * [`AnswerParser`]: takes an answer apart into reasoning, text and tool calls;
//! * [`Grammar`]: the form that an answer has to follow; with the feature `grammar`,
//!   `GrammarCompiler` computes which tokens may come next;
//! * [`StopStrings`]: ends a streamed text where a stop string is complete.
#![forbid(unsafe_code)]

// The examples of the README are documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

mod answer;
#[cfg(feature = "tokenizer")]
mod bounded;
#[cfg(feature = "tokenizer")]
mod chat_template;
mod custom;
#[cfg(feature = "tokenizer")]
mod detokenizer;
mod error;
mod grammar;
mod infill;
mod json;
mod message;
#[cfg(feature = "tokenizer")]
mod pair;
#[cfg(feature = "tokenizer")]
mod processor_time;
#[cfg(feature = "tokenizer")]
mod replace;
mod source;
#[cfg(feature = "tokenizer")]
mod spellings;
mod stop_strings;
#[cfg(feature = "tokenizer")]
mod text_model;
#[cfg(feature = "tokenizer")]
mod tokenizer;

pub use answer::{
    Answer, AnswerFormat, AnswerParser, AnswerPart, ReasoningFormat, ToolCall, ToolCallFormat,
};
#[cfg(feature = "tokenizer")]
pub use bounded::panics_become_errors;
#[cfg(feature = "tokenizer")]
pub use chat_template::{ChatOptions, ChatTemplate, RenderedChat, ToolUse};
pub use custom::CustomTokenizer;
#[cfg(feature = "tokenizer")]
pub use detokenizer::Detokenizer;
pub use error::{Busy, ChatTemplateError, StopStringsError, TokenizerError};
#[cfg(feature = "grammar")]
pub use grammar::{CompiledGrammar, GrammarCompiler, GrammarState, TokenMask};
pub use grammar::{
    FunctionSchema, Grammar, GrammarError, GrammarFailure, Otherwise, SchemaOptions,
    ToolCallGrammar,
};
#[cfg(feature = "tokenizer")]
pub use infill::InfillTokens;
pub use infill::{Infill, InfillFile};
pub use json::replace_lone_surrogates;
pub use message::{ChatMessage, MessageContent};
#[cfg(feature = "tokenizer")]
pub use pair::PairPrompts;
#[cfg(feature = "tokenizer")]
pub use replace::replace_in_order;
pub use source::{GgufTokenizer, TextSource, TokenizerSource};
pub use stop_strings::{MAX_STOP_BYTES, MAX_STOP_STRINGS, StopScan, StopStrings};
#[cfg(feature = "tokenizer")]
pub use text_model::{ChatError, TextModel};
#[cfg(feature = "tokenizer")]
pub use tokenizer::Tokenizer;
