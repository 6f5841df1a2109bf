//! Parses bodies outside of requests, for fuzzing and for programs that check what they send.

use crate::api::chat::ChatRequest;
use crate::api::completions::CompletionRequest;
use crate::api::embeddings::EmbeddingsRequest;
use crate::api::error::ErrorReply;
use crate::api::llama_cpp::InfillRequest;
use crate::api::messages::MessagesRequest;
use crate::api::ollama::OllamaChat;
use crate::api::responses::ResponsesRequest;
use crate::wire::advice::Ignored;
use crate::wire::body::{RequestBody, parse};

/// Parses the body of a completion request as the server does, with a limit on JSON values. For
/// fuzzing, and for programs that check requests before they send them.
///
/// # Errors
/// The body of the server's reply.
pub fn parse_completion(body: &[u8], max_values: usize) -> Result<CompletionRequest, ErrorReply> {
    parse_alone(body, max_values)
}

/// Parses the body of a chat request as the server does, with a limit on JSON values.
///
/// # Errors
/// The body of the server's reply.
pub fn parse_chat(body: &[u8], max_values: usize) -> Result<ChatRequest, ErrorReply> {
    parse_alone(body, max_values)
}

/// Parses the body of a request to `/v1/responses` as the server does, with a limit on JSON values.
///
/// # Errors
/// The body of the server's reply.
pub fn parse_responses(body: &[u8], max_values: usize) -> Result<ResponsesRequest, ErrorReply> {
    parse_alone(body, max_values)
}

/// Parses the body of a request to `/v1/messages` as the server does, with a limit on JSON values.
///
/// # Errors
/// The body of the server's reply, in OpenAI's form.
pub fn parse_messages(body: &[u8], max_values: usize) -> Result<MessagesRequest, ErrorReply> {
    parse_alone(body, max_values)
}

/// Parses the body of a request to `/infill` as the server does, with a limit on JSON values.
///
/// # Errors
/// The body of the server's reply.
pub fn parse_infill(body: &[u8], max_values: usize) -> Result<InfillRequest, ErrorReply> {
    parse_alone(body, max_values)
}

/// Parses the body of a request to `/api/chat` as the server does, with a limit on JSON values.
///
/// # Errors
/// The body of the server's reply, in OpenAI's form.
pub fn parse_ollama_chat(body: &[u8], max_values: usize) -> Result<OllamaChat, ErrorReply> {
    parse_alone(body, max_values)
}

/// Parses the body of a request for embeddings as the server does, with a limit on JSON values.
///
/// # Errors
/// The body of the server's reply.
pub fn parse_embeddings(body: &[u8], max_values: usize) -> Result<EmbeddingsRequest, ErrorReply> {
    parse_alone(body, max_values)
}

/// Parses a body outside of a request. Ignored parameters are not reported.
fn parse_alone<T: RequestBody>(body: &[u8], max_values: usize) -> Result<T, ErrorReply> {
    parse(body, max_values, &Ignored::default()).map_err(|error| error.reply())
}
