//! Routes that answer with the model.

use schemars::{Schema, SchemaGenerator, json_schema};

use super::Role::Client;
use super::{ErrorForm, Group, Reply, post};
use crate::api::chat::{ChatCompletion, ChatCompletionChunk, ChatRequest};
use crate::api::completions::{Completion, CompletionRequest};
use crate::api::embeddings::{Embeddings, EmbeddingsRequest};
use crate::api::messages::MessagesRequest;
use crate::api::responses::ResponsesRequest;
use crate::{chat, completions, embeddings, messages, responses};

/// The rows.
pub(super) fn group() -> Group {
    let routes = vec![
        post("/v1/chat/completions", Client, chat::create)
            .described("createChatCompletion", "Answer a conversation")
            .takes::<ChatRequest>()
            .replies::<ChatCompletion>()
            .streams::<ChatCompletionChunk>()
            .generates()
            .traced_as("chat")
            .fails(&[404, 409]),
        post("/v1/completions", Client, completions::create)
            .described("createCompletion", "Continue prompts")
            .takes::<CompletionRequest>()
            .replies::<Completion>()
            .streams::<Completion>()
            .generates()
            .traced_as("text_completion")
            .fails(&[404, 409]),
        post("/v1/responses", Client, responses::create)
            .described("createResponse", "Answer a conversation; responses are not stored")
            .takes::<ResponsesRequest>()
            .replies_as(Reply::Json(response))
            .replies_as(Reply::Events(typed_event))
            .generates()
            .traced_as("chat")
            .fails(&[404, 409]),
        post("/v1/embeddings", Client, embeddings::create)
            .described(
                "createEmbedding",
                "The vectors of texts, if the model is meant for embeddings",
            )
            .takes::<EmbeddingsRequest>()
            .replies::<Embeddings>()
            .generates()
            .traced_as("embeddings")
            .fails(&[404, 409]),
        post("/v1/messages", Client, messages::create)
            .described("createMessage", "Answer a conversation, in Anthropic's form")
            .takes::<MessagesRequest>()
            .replies_as(Reply::Json(message))
            .replies_as(Reply::Events(typed_event))
            .generates()
            .traced_as("chat")
            .fails(&[404, 409])
            .fails_as(ErrorForm::Anthropic),
        post("/v1/messages/count_tokens", Client, messages::count_tokens)
            .described(
                "countMessageTokens",
                "Count the tokens of a conversation, in Anthropic's form",
            )
            .takes::<MessagesRequest>()
            .replies_as(Reply::Json(token_count))
            .fails(&[404])
            .fails_as(ErrorForm::Anthropic),
    ];
    Group { name: "Generation", description: "OpenAI's and Anthropic's APIs.", routes }
}

/// The reply of `/v1/responses`, as far as it does not repeat the request.
fn response(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "required": ["id", "object", "created_at", "status", "model", "output", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": "response"},
            "created_at": {"type": "integer"},
            "status": {"enum": ["completed", "incomplete"]},
            "incomplete_details": {"type": ["object", "null"]},
            "model": {"type": "string"},
            "output": {
                "description": "Items: messages, function calls and reasoning.",
                "type": "array",
                "items": {
                    "type": "object", "required": ["type", "id", "status"],
                    "properties": {"type": {"enum": ["message", "function_call", "reasoning"]}},
                },
            },
            "usage": {
                "type": "object",
                "required": ["input_tokens", "output_tokens", "total_tokens"],
            },
        },
    })
}

/// The reply of `/v1/messages`.
fn message(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "required": ["id", "type", "role", "model", "content", "stop_reason", "usage"],
        "properties": {
            "id": {"type": "string"},
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": {"type": "string"},
            "content": {
                "description": "Blocks of text, reasoning and calls.",
                "type": "array",
                "items": {
                    "type": "object", "required": ["type"],
                    "properties": {"type": {"enum": ["text", "thinking", "tool_use"]}},
                },
            },
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": {"type": ["string", "null"]},
            "usage": {"type": "object", "required": ["input_tokens", "output_tokens"]},
        },
    })
}

/// The reply of `/v1/messages/count_tokens`.
fn token_count(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object", "required": ["input_tokens"],
        "properties": {"input_tokens": {"type": "integer", "minimum": 0}},
    })
}

/// A named event: an object whose `type` is the name.
fn typed_event(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object", "required": ["type"], "properties": {"type": {"type": "string"}},
    })
}

/// Anthropic's form of an error.
pub(super) fn message_error(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object", "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object", "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    })
}
