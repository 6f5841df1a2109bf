//! Replies of Ollama's API. Times are in nanoseconds.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::api::chat::Role;

/// The reply to `POST /api/chat`, whole or one piece of a streamed one.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChatReply {
    /// The model's name as the request gave it, or its id.
    pub model: String,
    /// When this reply or piece was made (RFC 3339).
    pub created_at: String,
    /// The answer, or the addition to it.
    pub message: ReplyMessage,
    /// Whether this is the whole reply, or the last piece.
    pub done: bool,
    /// The members of a whole reply and of the last piece.
    #[serde(flatten)]
    pub end: Option<ReplyEnd>,
}

/// The model's answer, or the addition to it.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ReplyMessage {
    /// Always `assistant`.
    pub role: Role,
    /// The text.
    pub content: String,
    /// The reasoning before the text.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub thinking: String,
    /// The functions that the model calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ReplyCall>,
}

/// A complete call.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ReplyCall {
    /// A new id.
    pub id: String,
    /// The called function.
    pub function: ReplyFunction,
}

/// A function with its arguments.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ReplyFunction {
    /// Number of the call in the answer, from 0.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// The arguments.
    pub arguments: Map<String, Value>,
}

/// The reply to `POST /api/generate`, whole or one piece of a streamed one.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct GenerateReply {
    /// The model's name as the request gave it, or its id.
    pub model: String,
    /// When this reply or piece was made (RFC 3339).
    pub created_at: String,
    /// The text, or the addition to it.
    pub response: String,
    /// The reasoning before the text.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub thinking: String,
    /// Whether this is the whole reply, or the last piece.
    pub done: bool,
    /// The members of a whole reply and of the last piece.
    #[serde(flatten)]
    pub end: Option<ReplyEnd>,
}

/// How an answer ended, and what it took. A reply for which nothing was generated has no numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ReplyEnd {
    /// `stop`, `length`, or `load` if nothing was generated.
    pub done_reason: &'static str,
    /// The time from the request's submission to the end, its wait in the queue included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_duration: Option<u64>,
    /// Always 0: the model is loaded when the server starts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load_duration: Option<u64>,
    /// Tokens of the prompt, cached ones included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_eval_count: Option<usize>,
    /// The time from the end of the wait in the queue to the first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_eval_duration: Option<u64>,
    /// Generated tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_count: Option<usize>,
    /// The time after the first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_duration: Option<u64>,
}

/// A line of a streamed reply.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum OllamaEvent {
    /// A piece of a reply to `/api/chat`.
    Chat(ChatReply),
    /// A piece of a reply to `/api/generate`.
    Generate(GenerateReply),
    /// The error that ends the reply early.
    Failed(OllamaError),
}

/// An error in Ollama's form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct OllamaError {
    /// What happened, for people.
    pub error: String,
}

/// The reply to `POST /api/embed`.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Embedded {
    /// The model's name as the request gave it, or its id.
    pub model: String,
    /// One vector per text, in their order.
    pub embeddings: Vec<Vec<f32>>,
    /// The time from the request's body to the reply.
    pub total_duration: u64,
    /// Always 0: the model is loaded when the server starts.
    pub load_duration: u64,
    /// Tokens of all texts together, cached ones included.
    pub prompt_eval_count: usize,
}

/// The reply to `POST /api/embeddings`.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Embeddings {
    /// The vector.
    pub embedding: Vec<f32>,
}

/// The reply to `GET /api/tags`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Tags {
    /// The names under which the model is served, and its LoRA adapters.
    pub models: Vec<ModelEntry>,
}

/// The model under one of its names, or an adapter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ModelEntry {
    /// The name to use as `model` in requests, with the tag `latest` if it has none.
    pub name: String,
    /// The same.
    pub model: String,
    /// When the server started (RFC 3339).
    pub modified_at: String,
    /// Always 0: the size of the files is not known.
    pub size: u64,
    /// 64 hexadecimal digits that identify the model and what it can do: clients remember by them
    /// what they have asked. All names of a model have the same.
    pub digest: String,
    /// What is known of the model.
    pub details: Details,
}

/// What is known of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Details {
    /// Of an adapter, the name of the model that it changes; otherwise empty.
    pub parent_model: String,
    /// Always empty.
    pub format: &'static str,
    /// Always `stolon`.
    pub family: &'static str,
    /// Always `stolon` alone.
    pub families: [&'static str; 1],
    /// Always empty.
    pub parameter_size: &'static str,
    /// Always empty.
    pub quantization_level: &'static str,
}

/// The reply to `GET /api/ps`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Running {
    /// The served model, which stays in memory.
    pub models: Vec<RunningEntry>,
}

/// A model in memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct RunningEntry {
    /// The model.
    #[serde(flatten)]
    pub model: ModelEntry,
    /// When the model is unloaded if no request comes: a time far in the future, unless the server
    /// has several models and unloads those that are idle.
    pub expires_at: String,
    /// Always 0.
    pub size_vram: u64,
    /// Context length in tokens: prompt and generated tokens together.
    pub context_length: usize,
}

/// The reply to `POST /api/show`.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Shown {
    /// Names the model.
    pub modelfile: String,
    /// One line with the context length: `num_ctx`.
    pub parameters: String,
    /// The chat template, in Jinja; empty if the model has none. Of a model that fills in the
    /// middle, it ends with a comment that has the word `.Suffix`, by which clients recognize such
    /// a model.
    pub template: String,
    /// What is known of the model.
    pub details: Details,
    /// `general.architecture`, always `stolon`, and `stolon.context_length`, in tokens. Of a model
    /// for embeddings also `stolon.embedding_length`.
    pub model_info: Map<String, Value>,
    /// What the model can do: `completion`, `tools`, `vision`, `thinking`, `insert` (fill in the
    /// middle) and `embedding`.
    pub capabilities: Vec<&'static str>,
    /// When the server started (RFC 3339).
    pub modified_at: String,
}

/// The reply to `POST /api/pull` for a model that is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Status {
    /// Always `success`.
    pub status: &'static str,
}

/// The reply to `GET /api/version`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Version {
    /// The version of Ollama whose API this is, which clients compare. Stolon's own is at
    /// `/version`.
    pub version: &'static str,
}
