//! `/v1/sessions`: conversations whose prefix stays cached between their turns.

use std::borrow::Cow;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use stolon::SessionInfo;

use super::fields::{self, UnknownFields};

/// Longest time to live of a session, in seconds.
pub const MAX_TTL_SECONDS: usize = 24 * 60 * 60;

/// The body of `POST /v1/sessions`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct OpenSession {
    /// The session's id: 1 to 128 letters, digits, `-`, `_`, `.` and `:`, which no other session of
    /// the client has. Default: a random one.
    #[serde(alias = "session_id")]
    pub id: Option<String>,
    /// Seconds without a turn after which the session is closed, 1 to 86400. Default: the server's
    /// `--session-ttl`.
    #[serde(default, deserialize_with = "fields::count::<_, 1, MAX_TTL_SECONDS>")]
    #[schemars(range(min = 1, max = MAX_TTL_SECONDS))]
    pub ttl_seconds: Option<usize>,
    /// The cache salt of all its turns. Default: none.
    pub cache_salt: Option<String>,
    /// The model of all its turns, if it is a LoRA adapter. Default: none.
    pub model: Option<String>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The body of `POST /v1/sessions/{id}/fork`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct ForkSession {
    /// The id of the new session. Default: a random one.
    #[serde(alias = "session_id")]
    pub id: Option<String>,
    /// Number of tokens of the conversation, from its start, with which the new session begins.
    /// Default: all.
    #[serde(default, deserialize_with = "fields::count::<_, 0, { usize::MAX }>")]
    #[schemars(range(min = 0))]
    pub tokens: Option<usize>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The body of `POST /v1/sessions/{id}/rewind`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct RewindSession {
    /// Number of tokens of the conversation that are kept, from its start.
    pub tokens: usize,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// A session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Session {
    /// Its id, for `session_id` in requests.
    pub id: String,
    /// Always `session`.
    #[schemars(schema_with = "super::schemas::session_constant")]
    pub object: Cow<'static, str>,
    /// Tokens of the conversation: prompt and answer of its last complete turn.
    pub tokens: usize,
    /// Number of them that it protects from eviction, from the first one on.
    pub held_tokens: usize,
    /// KV blocks that it holds. Blocks that several sessions share count for each of them.
    pub held_blocks: usize,
    /// Complete turns.
    pub turns: u64,
    /// Prompt tokens of these turns.
    pub prompt_tokens: u64,
    /// Number of them that came from the cache; left out if the server hides it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u64>,
    /// Seconds since it was opened.
    pub age_seconds: f64,
    /// Seconds since its last turn ended or, if it has had none, since it was opened; `null` during
    /// a turn.
    pub idle_seconds: Option<f64>,
    /// Seconds without a turn after which it is closed.
    pub ttl_seconds: f64,
    /// The API key's name or the tenant that it belongs to. For operators.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
}

impl Session {
    /// Describes a session to its client.
    pub(crate) fn new(info: &SessionInfo) -> Self {
        Self {
            id: info.id.name().to_owned(),
            object: "session".into(),
            tokens: info.tokens,
            held_tokens: info.held_tokens,
            held_blocks: info.held_blocks,
            turns: info.turns,
            prompt_tokens: info.prompt_tokens,
            cached_tokens: Some(info.cached_tokens),
            age_seconds: info.age.as_secs_f64(),
            idle_seconds: info.idle.map(|idle| idle.as_secs_f64()),
            ttl_seconds: info.ttl.as_secs_f64(),
            owner: None,
        }
    }
}

/// The reply to `GET /v1/sessions` and `GET /v1/cache/sessions`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SessionList {
    /// Always `list`.
    #[schemars(schema_with = "super::schemas::list_constant")]
    pub object: Cow<'static, str>,
    /// The sessions, the one that has been idle longest first.
    pub data: Vec<Session>,
}

/// The reply to `DELETE /v1/sessions/{id}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct SessionClosed {
    /// The id that the session had.
    pub id: String,
    /// Always true.
    pub deleted: bool,
}

/// The body of `POST /open_session`, in SGLang's form.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct SglangOpenSession {
    /// Ignored: sessions are bounded by the context length.
    #[schemars(with = "Option<u64>")]
    pub capacity_of_str_len: Option<Value>,
    /// The session's id. Default: a random one.
    pub session_id: Option<String>,
    /// Seconds without a turn after which the session is closed, above 0 and at most 86400.
    #[serde(default, deserialize_with = "fields::number")]
    pub timeout: Option<f32>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The body of `POST /close_session`, in SGLang's form.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct SglangCloseSession {
    /// The session's id.
    pub session_id: String,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The session of a request in SGLang's form.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct SessionParams {
    /// The session's id.
    pub id: Option<String>,
    /// Every other member; must be empty, or request nothing.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}
