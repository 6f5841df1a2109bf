//! The operations of the API: what each takes, what it replies, and who may use it.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use crate::api::admin::{Audit, Health, Stats, Version};
use crate::api::cache::{
    CacheRequest, CacheResults, CacheStatsReply, EventData, EventsQuery, Evicted, FlushQuery,
    Flushed, Imported, PinCreated, PinDeleted, PinList, PinRequest, Policy, PolicyRequest,
    TiersReply, TokensQuery, Tree, TreeQuery, UnpinRequest,
};
use crate::api::chat::{ChatCompletion, ChatCompletionChunk, ChatRequest};
use crate::api::completions::{Completion, CompletionRequest};
use crate::api::embeddings::{Embeddings, EmbeddingsRequest};
use crate::api::error::ErrorReply;
use crate::api::messages::MessagesRequest;
use crate::api::models::{Model, ModelList};
use crate::api::outline::{Outline, OutlineQuery, Prefix, PrefixQuery};
use crate::api::responses::ResponsesRequest;
use crate::api::sessions::{
    ForkSession, OpenSession, RewindSession, Session, SessionClosed, SessionList,
    SglangCloseSession, SglangOpenSession,
};
use crate::api::tokenize::{DetokenizeRequest, Detokenized, TokenizeRequest, Tokenized};

/// Makes a schema.
type Make = fn(&mut SchemaGenerator) -> Schema;

/// The groups of operations.
pub(super) const TAGS: [(&str, &str); 5] = [
    ("Generation", "OpenAI's and Anthropic's APIs."),
    ("Models and tokens", "The served model and its tokenizer."),
    ("Prefix cache", "What is cached, for operators."),
    ("Operation", "Health, metrics and this description."),
    ("Sessions", "Conversations whose prefix stays cached between their turns."),
];

/// Routes that are not part of the API: pages, and older names of described ones.
#[cfg(test)]
pub(super) const UNDESCRIBED: [&str; 5] =
    ["/", "/docs", "/admin/tree", "/admin/pins", "/admin/pins/{id}"];

/// The media type of files.
pub(super) const FILE: &str = "application/octet-stream";

/// Who may use an operation.
#[derive(Clone, Copy)]
pub(super) enum Access {
    Everybody,
    /// Clients with an API key, if there are any keys.
    Client,
    /// The operator.
    Operator,
}

/// The content of a reply.
#[derive(Clone, Copy)]
pub(super) enum Body {
    Json(Make),
    /// Text of this media type.
    Text(&'static str),
    /// Server-sent events whose data has this schema.
    Events(Make),
}

/// One operation.
#[derive(Clone, Copy)]
pub(super) struct Operation {
    /// The HTTP method, in lower case.
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    /// JSON type of the parameter in the path, if there is one.
    pub(super) path_type: &'static str,
    pub(super) tag: &'static str,
    /// A name that is unique in the description.
    pub(super) id: &'static str,
    pub(super) summary: &'static str,
    pub(super) access: Access,
    pub(super) query: Option<Make>,
    pub(super) request: Option<Make>,
    /// Whether the request is a file instead of JSON.
    pub(super) takes_file: bool,
    pub(super) replies: &'static [Body],
    pub(super) error: Make,
    /// Whether the model computes something.
    pub(super) generates: bool,
    /// Statuses of errors that are its own.
    own_errors: &'static [u16],
}

impl Operation {
    /// Whether clients may say when they want the answer.
    pub(super) fn has_deadline(&self) -> bool {
        self.generates && matches!(self.access, Access::Client)
    }

    /// Statuses of its errors, in ascending order.
    pub(super) fn errors(&self) -> Vec<u16> {
        let mut errors = self.own_errors.to_vec();
        match self.access {
            Access::Everybody => {}
            Access::Client => errors.push(401),
            Access::Operator => errors.extend([401, 403]),
        }
        if self.request.is_some() {
            errors.extend([400, 408, 413, 415]);
        }
        if self.query.is_some() {
            errors.push(400);
        }
        if self.generates {
            errors.extend([429, 504]);
        }
        if !matches!(self.access, Access::Everybody) {
            errors.extend([500, 503]);
        }
        errors.sort_unstable();
        errors.dedup();
        errors
    }
}

/// What the status of an error means, and whether it comes with `Retry-After`.
pub(super) fn meaning(status: u16) -> (&'static str, bool) {
    match status {
        400 => ("The request is wrong; `param` names the member at fault", false),
        401 => ("A key is missing or wrong", false),
        403 => ("The route may not be used from there", false),
        404 => ("There is no such model, pin or session", false),
        408 => ("The body did not arrive in time", false),
        409 => ("The prompt cannot be pinned, or is not cached, or the session is in use", false),
        413 => ("The body is too large", false),
        415 => ("The body is not of the expected type", false),
        429 => ("The queue, or what the key may use, is full", true),
        501 => ("The backend cannot copy KV blocks", false),
        503 => ("The server cannot answer now", true),
        504 => ("The time for the answer has passed", false),
        _ => ("A defect of the server", false),
    }
}

fn of<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}

/// The schema itself instead of a reference to it.
fn inline<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    T::json_schema(generator)
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

/// An event that has a name of its own and is an object with its `type`.
fn typed_event(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object", "required": ["type"], "properties": {"type": {"type": "string"}},
    })
}

/// Anthropic's form of an error.
fn message_error(_: &mut SchemaGenerator) -> Schema {
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

fn any_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object"})
}

/// An operation for operators without a body.
const OPERATOR: Operation = Operation {
    method: "get",
    path: "",
    path_type: "string",
    tag: TAGS[2].0,
    id: "",
    summary: "",
    access: Access::Operator,
    query: None,
    request: None,
    takes_file: false,
    replies: &[],
    error: of::<ErrorReply>,
    generates: false,
    own_errors: &[],
};

/// An operation for clients with a body.
const CLIENT: Operation =
    Operation { method: "post", tag: TAGS[0].0, access: Access::Client, ..OPERATOR };

/// An operation for everybody.
const PUBLIC: Operation = Operation { tag: TAGS[3].0, access: Access::Everybody, ..OPERATOR };

/// All operations, in the order in which they are shown.
pub(super) fn all() -> Vec<Operation> {
    [generation(), sessions(), models(), cache(), operation()].concat()
}

fn generation() -> Vec<Operation> {
    let generating = Operation { generates: true, own_errors: &[404, 409], ..CLIENT };
    vec![
        Operation {
            path: "/v1/chat/completions",
            id: "createChatCompletion",
            summary: "Answer a conversation",
            request: Some(of::<ChatRequest>),
            replies: &[Body::Json(of::<ChatCompletion>), Body::Events(of::<ChatCompletionChunk>)],
            ..generating
        },
        Operation {
            path: "/v1/completions",
            id: "createCompletion",
            summary: "Continue prompts",
            request: Some(of::<CompletionRequest>),
            replies: &[Body::Json(of::<Completion>), Body::Events(of::<Completion>)],
            ..generating
        },
        Operation {
            path: "/v1/responses",
            id: "createResponse",
            summary: "Answer a conversation; responses are not stored",
            request: Some(of::<ResponsesRequest>),
            replies: &[Body::Json(response), Body::Events(typed_event)],
            ..generating
        },
        Operation {
            path: "/v1/embeddings",
            id: "createEmbedding",
            summary: "The vectors of texts, if the model is meant for embeddings",
            request: Some(of::<EmbeddingsRequest>),
            replies: &[Body::Json(of::<Embeddings>)],
            ..generating
        },
        Operation {
            path: "/v1/messages",
            id: "createMessage",
            summary: "Answer a conversation, in Anthropic's form",
            request: Some(of::<MessagesRequest>),
            replies: &[Body::Json(message), Body::Events(typed_event)],
            error: message_error,
            ..generating
        },
        Operation {
            path: "/v1/messages/count_tokens",
            id: "countMessageTokens",
            summary: "Count the tokens of a conversation, in Anthropic's form",
            request: Some(of::<MessagesRequest>),
            replies: &[Body::Json(token_count)],
            error: message_error,
            own_errors: &[404],
            ..CLIENT
        },
    ]
}

fn sessions() -> Vec<Operation> {
    let client = Operation { tag: TAGS[4].0, ..CLIENT };
    let one = Operation { path: "/v1/sessions/{id}", own_errors: &[404], ..client };
    vec![
        Operation {
            path: "/v1/sessions",
            id: "openSession",
            summary: "Open a session",
            request: Some(of::<OpenSession>),
            replies: &[Body::Json(of::<Session>)],
            own_errors: &[409, 429],
            ..client
        },
        Operation {
            method: "get",
            path: "/v1/sessions",
            id: "listSessions",
            summary: "The client's sessions, on a server with API keys or tenants",
            replies: &[Body::Json(of::<SessionList>)],
            own_errors: &[403],
            ..client
        },
        Operation {
            method: "get",
            id: "retrieveSession",
            summary: "A session, and what it holds",
            replies: &[Body::Json(of::<Session>)],
            ..one
        },
        Operation {
            method: "delete",
            id: "closeSession",
            summary: "Close a session and free what it holds",
            replies: &[Body::Json(of::<SessionClosed>)],
            ..one
        },
        Operation {
            path: "/v1/sessions/{id}/fork",
            id: "forkSession",
            summary: "Open a session that continues where this one is, or earlier",
            request: Some(of::<ForkSession>),
            replies: &[Body::Json(of::<Session>)],
            own_errors: &[404, 409, 429],
            ..client
        },
        Operation {
            path: "/v1/sessions/{id}/rewind",
            id: "rewindSession",
            summary: "Take a session back to a prefix of its conversation",
            request: Some(of::<RewindSession>),
            replies: &[Body::Json(of::<Session>)],
            own_errors: &[404, 409],
            ..client
        },
        Operation {
            path: "/open_session",
            id: "openSglangSession",
            summary: "Open a session, in SGLang's form; the reply is its id",
            request: Some(of::<SglangOpenSession>),
            replies: &[Body::Json(of::<String>)],
            own_errors: &[409, 429],
            ..client
        },
        Operation {
            path: "/close_session",
            id: "closeSglangSession",
            summary: "Close a session, in SGLang's form",
            request: Some(of::<SglangCloseSession>),
            replies: &[Body::Json(of::<SessionClosed>)],
            own_errors: &[404],
            ..client
        },
    ]
}

fn models() -> Vec<Operation> {
    let client = Operation { tag: TAGS[1].0, ..CLIENT };
    vec![
        Operation {
            method: "get",
            path: "/v1/models",
            id: "listModels",
            summary: "The names under which the model is served",
            replies: &[Body::Json(of::<ModelList>)],
            ..client
        },
        Operation {
            method: "get",
            path: "/v1/models/{id}",
            id: "retrieveModel",
            summary: "The model under one of its names, which may contain slashes",
            replies: &[Body::Json(of::<Model>)],
            own_errors: &[400, 404],
            ..client
        },
        Operation {
            path: "/tokenize",
            id: "tokenize",
            summary: "The token ids of a text or of a conversation",
            request: Some(of::<TokenizeRequest>),
            replies: &[Body::Json(of::<Tokenized>)],
            own_errors: &[404],
            ..client
        },
        Operation {
            path: "/detokenize",
            id: "detokenize",
            summary: "The text of token ids",
            request: Some(of::<DetokenizeRequest>),
            replies: &[Body::Json(of::<Detokenized>)],
            own_errors: &[404],
            ..client
        },
    ]
}

fn cache() -> Vec<Operation> {
    let post = Operation { method: "post", ..OPERATOR };
    let mut operations = cache_reads();
    operations.extend([
        Operation {
            path: "/v1/cache/query",
            id: "queryCache",
            summary: "How much of each prompt is cached; nothing is computed",
            request: Some(of::<CacheRequest>),
            replies: &[Body::Json(of::<CacheResults>)],
            ..post
        },
        Operation {
            path: "/v1/cache/warm",
            id: "warmCache",
            summary: "Compute what is not cached of each prompt",
            request: Some(of::<CacheRequest>),
            replies: &[Body::Json(of::<CacheResults>)],
            generates: true,
            ..post
        },
        Operation {
            path: "/v1/cache/pin",
            id: "pinPrompt",
            summary: "Keep a prompt from being evicted",
            request: Some(of::<PinRequest>),
            replies: &[Body::Json(of::<PinCreated>)],
            generates: true,
            own_errors: &[409],
            ..post
        },
        Operation {
            path: "/v1/cache/unpin",
            id: "unpinPrompt",
            summary: "End a pin",
            request: Some(of::<UnpinRequest>),
            replies: &[Body::Json(of::<PinDeleted>)],
            own_errors: &[404],
            ..post
        },
        Operation {
            path: "/v1/cache/evict",
            id: "evictPrompts",
            summary: "Remove prompts, or everything of a cache salt or tenant",
            request: Some(of::<CacheRequest>),
            replies: &[Body::Json(of::<Evicted>)],
            ..post
        },
        Operation {
            path: "/v1/cache/flush",
            id: "flushCache",
            summary: "Remove everything that no request uses, and end all pins",
            query: Some(inline::<FlushQuery>),
            replies: &[Body::Json(of::<Flushed>)],
            ..post
        },
        Operation {
            path: "/v1/cache/export",
            id: "exportPrompt",
            summary: "Compute what is not cached of a prompt and send its KV as a file",
            request: Some(of::<CacheRequest>),
            replies: &[Body::Text(FILE)],
            generates: true,
            own_errors: &[409, 501],
            ..post
        },
        Operation {
            path: "/v1/cache/import",
            id: "importPrompt",
            summary: "Add the file of an exported prompt to the cache",
            takes_file: true,
            replies: &[Body::Json(of::<Imported>)],
            generates: true,
            own_errors: &[400, 408, 409, 415, 501],
            ..post
        },
        Operation {
            path: "/v1/cache/policy",
            id: "setCachePolicy",
            summary: "Change the policies of eviction and admission",
            request: Some(of::<PolicyRequest>),
            replies: &[Body::Json(of::<Policy>)],
            ..post
        },
    ]);
    operations
}

fn cache_reads() -> Vec<Operation> {
    vec![
        Operation {
            path: "/v1/cache/tiers",
            id: "cacheTiers",
            summary: "What is stored besides the KV pool, and what it has saved",
            replies: &[Body::Json(of::<TiersReply>)],
            ..OPERATOR
        },
        Operation {
            path: "/v1/cache/stats",
            id: "cacheStats",
            summary: "Blocks, hits and evictions",
            replies: &[Body::Json(of::<CacheStatsReply>)],
            ..OPERATOR
        },
        Operation {
            path: "/v1/cache/tree",
            id: "cacheTree",
            summary: "The prefix tree",
            query: Some(inline::<TreeQuery>),
            replies: &[Body::Json(of::<Tree>), Body::Text("text/vnd.graphviz")],
            ..OPERATOR
        },
        Operation {
            path: "/v1/cache/outline",
            id: "cacheOutline",
            summary: "The most important nodes of the prefix tree",
            query: Some(inline::<OutlineQuery>),
            replies: &[Body::Json(of::<Outline>)],
            own_errors: &[400, 404],
            ..OPERATOR
        },
        Operation {
            path: "/v1/cache/prefix/{id}",
            id: "cachedPrefix",
            summary: "The prefix that ends with a node of the tree",
            query: Some(inline::<PrefixQuery>),
            replies: &[Body::Json(of::<Prefix>)],
            own_errors: &[400, 404],
            ..OPERATOR
        },
        Operation {
            path: "/v1/cache/pins",
            id: "listPins",
            summary: "All pins, and what they hold",
            query: Some(inline::<TokensQuery>),
            replies: &[Body::Json(of::<PinList>)],
            ..OPERATOR
        },
        Operation {
            path: "/v1/cache/sessions",
            id: "listAllSessions",
            summary: "The sessions of all clients",
            replies: &[Body::Json(of::<SessionList>)],
            ..OPERATOR
        },
        Operation {
            path: "/v1/cache/audit",
            id: "auditCache",
            summary: "Verify the accounting of KV blocks",
            replies: &[Body::Json(of::<Audit>)],
            ..OPERATOR
        },
        Operation {
            path: "/v1/cache/policy",
            id: "cachePolicy",
            summary: "The policies of eviction and admission",
            replies: &[Body::Json(of::<Policy>)],
            ..OPERATOR
        },
        Operation {
            path: "/v1/cache/events",
            id: "cacheEvents",
            summary: "A snapshot of the cache, then every change, as server-sent events",
            query: Some(inline::<EventsQuery>),
            replies: &[Body::Events(of::<EventData>)],
            ..OPERATOR
        },
    ]
}

fn operation() -> Vec<Operation> {
    let unready = Operation {
        error: of::<Health>,
        own_errors: &[503],
        replies: &[Body::Json(of::<Health>)],
        ..PUBLIC
    };
    let operator = Operation { tag: TAGS[3].0, ..OPERATOR };
    vec![
        Operation {
            path: "/health",
            id: "health",
            summary: "Whether requests are answered; nothing is generated",
            ..unready
        },
        Operation { path: "/ready", id: "ready", summary: "As /health", ..unready },
        Operation {
            path: "/version",
            id: "version",
            summary: "The server's version",
            replies: &[Body::Json(of::<Version>)],
            ..PUBLIC
        },
        Operation {
            path: "/metrics",
            id: "metrics",
            summary: "Counters and distributions for Prometheus",
            replies: &[Body::Text("application/openmetrics-text")],
            ..operator
        },
        Operation {
            path: "/admin/stats",
            id: "stats",
            summary: "The model and the engine's counters",
            replies: &[Body::Json(of::<Stats>)],
            ..operator
        },
        Operation {
            path: "/admin/audit",
            id: "audit",
            summary: "As /v1/cache/audit",
            replies: &[Body::Json(of::<Audit>)],
            ..operator
        },
        Operation {
            path: "/openapi.json",
            id: "description",
            summary: "This description",
            replies: &[Body::Json(any_object)],
            ..PUBLIC
        },
    ]
}
