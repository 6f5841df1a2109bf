//! Why prompts were not cached.

use axum::http::HeaderName;
use serde::{Deserialize, Serialize};
use stolon::{CacheMiss, LoggedMiss, MissCount};

use schemars::JsonSchema;

/// The header of a reply that says why tokens of its prompt were not cached, as a dictionary of
/// structured fields: `reason`, `lost`, `cached` and `prompt`, and the index of the `message` if the
/// reason is about one.
pub const MISS_HEADER: HeaderName = HeaderName::from_static("x-stolon-cache");

/// The reply to `POST /v1/cache/explain`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Explanations {
    /// One entry for each prompt, in their order.
    pub results: Vec<Explanation>,
}

/// How much of a prompt is cached, and why not more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Explanation {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// How many of them a request would not compute, because they are cached.
    pub cached_tokens: usize,
    /// Why no more are cached; `null` if all are that can be, and if the server remembers no earlier
    /// requests.
    pub miss: Option<Miss>,
}

/// Why a part of a prompt is not cached, compared with the nearest earlier request of the same
/// client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Miss {
    /// `new`, `other_salt`, `other_adapter`, `evicted`, `not_computed`, `no_checkpoint`,
    /// `tools_changed`, `options_changed`, `message_changed`, `message_removed`,
    /// `message_inserted`, `answer_changed`, `reasoning_changed`, `template_changed`,
    /// `other_tokens` or `text_changed`.
    pub reason: String,
    /// Further tokens that would be cached without the reason, in whole blocks: at most as many as
    /// the earlier request has.
    pub lost_tokens: usize,
    /// Seconds to compute them at the recent speed of prompts; `null` before anything was computed.
    pub lost_seconds: Option<f64>,
    /// Tokens that the beginnings of both requests have in common.
    pub common_tokens: usize,
    /// Index of the message that the reason is about, from 0.
    pub message: Option<usize>,
    /// The role of this message.
    pub role: Option<String>,
    /// The beginning of what follows the common tokens in the prompt.
    pub prompt_text: String,
    /// The beginning of what follows them in the earlier request and its answer.
    pub earlier_text: String,
}

impl From<&CacheMiss> for Miss {
    fn from(miss: &CacheMiss) -> Self {
        Self {
            reason: miss.reason.as_str().to_owned(),
            lost_tokens: miss.lost_tokens,
            lost_seconds: miss.lost_time.map(|time| time.as_secs_f64()),
            common_tokens: miss.common_tokens,
            message: miss.message.as_ref().map(|message| message.index),
            role: miss.message.as_ref().map(|message| message.role.clone()),
            prompt_text: miss.prompt_text.clone(),
            earlier_text: miss.earlier_text.clone(),
        }
    }
}

/// The reply to `GET /v1/cache/misses`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Misses {
    /// The number of requests and lost tokens for each reason, since the server was started.
    pub reasons: Vec<ReasonCount>,
    /// The most expensive ones of the last 256 requests that have lost tokens, the most expensive
    /// first.
    pub misses: Vec<ClientMiss>,
}

/// How often a reason was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReasonCount {
    /// The reason.
    pub reason: String,
    /// Requests with this reason.
    pub requests: u64,
    /// Tokens that they have lost.
    pub lost_tokens: u64,
}

impl From<MissCount> for ReasonCount {
    fn from(count: MissCount) -> Self {
        let reason = count.reason.as_str().to_owned();
        Self { reason, requests: count.requests, lost_tokens: count.lost_tokens }
    }
}

/// The miss of a client's request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ClientMiss {
    /// When the request was submitted, in seconds since 1970.
    pub created: u64,
    /// The client: its tenant, the name of its key, or its address.
    pub client: Option<String>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Number of them that were cached.
    pub cached_tokens: usize,
    /// The reason, and what it costs.
    #[serde(flatten)]
    pub miss: Miss,
}

impl From<&LoggedMiss> for ClientMiss {
    fn from(logged: &LoggedMiss) -> Self {
        let created = logged.at.duration_since(std::time::UNIX_EPOCH);
        Self {
            created: created.map_or(0, |since| since.as_secs()),
            client: logged.tenant.as_deref().map(str::to_owned),
            prompt_tokens: logged.miss.prompt_tokens,
            cached_tokens: logged.miss.cached_tokens,
            miss: Miss::from(&*logged.miss),
        }
    }
}
