//! Endpoints for operators: `/health`, `/ready`, `/version`, `/admin/stats`, `/admin/audit`, `/admin/tree` and
//! `/admin/pins`.

use serde::{Deserialize, Serialize};
use stolon::{AuditReport, CacheStats, EngineStats, ModelInfo, NodeDump, Pin};

use super::fields::{self, UnknownFields};

/// `GET /health` and `GET /ready`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Health {
    /// What the server is doing. Any other status than `ok` comes with HTTP status 503.
    pub status: Status,
    /// Why the server cannot answer requests; left out if it can.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl Health {
    /// Requests are answered.
    pub(crate) fn ok() -> Self {
        Self { status: Status::Ok, reason: None }
    }

    /// Requests are not answered.
    pub(crate) fn not_ready(status: Status, reason: String) -> Self {
        Self { status, reason: Some(reason) }
    }
}

/// What the server is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It answers requests.
    Ok,
    /// It loads the model.
    Loading,
    /// A part of the engine failed, and the engine starts again.
    Restarting,
    /// The engine does not answer, because its backend hangs.
    Hung,
    /// It finishes running requests and accepts no new ones.
    Stopping,
}

/// `GET /version`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Version {
    /// Version of the server, such as `0.1.0`.
    pub version: &'static str,
}

/// `GET /admin/stats`: the model and the engine's counters.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stats {
    /// The model and the size of its KV cache.
    pub model: ModelInfo,
    /// Counters since the engine started, and gauges of this moment.
    pub stats: EngineStats,
    /// Fraction of prompt tokens that were read from the prefix cache, 0 to 1.
    pub token_hit_rate: f64,
    /// Fraction of requests that found a part of their prompt cached, 0 to 1.
    pub request_hit_rate: f64,
}

/// `GET /admin/audit`: the engine's accounting was verified. A failed check is an error reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Audit {
    /// Always true.
    pub ok: bool,
    /// The numbers that were verified.
    pub audit: AuditReport,
}

/// The query of `GET /admin/tree`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct TreeQuery {
    /// How to show the tree. Default `json`.
    #[serde(default)]
    pub format: TreeFormat,
    /// Whether to show the first tokens of each node, which are parts of prompts. Default false.
    #[serde(default)]
    pub tokens: bool,
}

/// How to show the prefix tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TreeFormat {
    /// Statistics and a list of nodes.
    #[default]
    Json,
    /// A graph in Graphviz's DOT language.
    Dot,
}

/// `GET /admin/tree` as JSON: the prefix tree.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tree {
    /// Version of the tree; it grows with each change.
    pub version: u64,
    /// Statistics of the prefix cache.
    pub stats: CacheStats,
    /// The nodes; parents come before their children.
    pub nodes: Vec<TreeNode>,
}

/// A node of the prefix tree: a run of tokens that some prompts have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TreeNode {
    /// Index of the parent in the list of nodes; `null` for a node at the root.
    pub parent: Option<usize>,
    /// Hash of the cache salt, which itself is not shown.
    pub namespace: String,
    /// KV blocks of the node.
    pub blocks: usize,
    /// Tokens of the node.
    pub tokens: usize,
    /// The node's first token ids, at most eight, if they were requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_tokens: Option<Vec<u32>>,
    /// Running requests and pins that hold the node or one below it. Such a node is not evicted.
    pub locks: u32,
    /// Requests that matched the node.
    pub hits: u32,
    /// When the node was last used, in changes of the cache since its start.
    pub last_use: u64,
}

impl TreeNode {
    /// Describes a node, with its first tokens if `tokens` is true.
    pub(crate) fn new(node: &NodeDump, tokens: bool) -> Self {
        Self {
            parent: node.parent,
            namespace: format!("{:?}", node.namespace),
            blocks: node.block_count,
            tokens: node.position_count,
            first_tokens: tokens.then(|| node.first_positions.clone()),
            locks: node.locks,
            hits: node.hits,
            last_use: node.last_use,
        }
    }
}

/// `POST /admin/pins`: keeps what is cached of a prompt from being evicted.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(expecting = "an object")]
pub struct PinRequest {
    /// The prompt.
    pub prompt: PinPrompt,
    /// The cache salt that requests with this prompt use. Default: none.
    pub cache_salt: Option<String>,
    /// The tenant whose requests the pin is for, on a server that tells tenants apart by their keys
    /// or by a header. Default: none.
    pub tenant: Option<String>,
    /// Seconds after which the pin ends, 1 to 4294967295. Default: it lasts until it is deleted.
    #[serde(default, deserialize_with = "fields::count::<_, 1, { u32::MAX as usize }>")]
    pub ttl_seconds: Option<usize>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The prompt of a pin.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of token ids")]
pub enum PinPrompt {
    /// Text, to be tokenised.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// Reply to `POST /admin/pins`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PinCreated {
    /// Id of the pin.
    pub id: u64,
}

/// Reply to `DELETE /admin/pins/{id}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PinDeleted {
    /// Always true.
    pub deleted: bool,
}

/// `GET /admin/pins`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PinList {
    /// All pins, oldest first.
    pub pins: Vec<PinInfo>,
}

/// A pinned prefix.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PinInfo {
    /// Id of the pin.
    pub id: u64,
    /// Tokens of the prompt that are pinned, from its start: whole blocks.
    pub tokens: usize,
    /// KV blocks that the pin holds.
    pub blocks: usize,
    /// Seconds until the pin ends; `null` if it lasts until it is deleted.
    pub ends_in_seconds: Option<f64>,
}

impl From<&Pin> for PinInfo {
    fn from(pin: &Pin) -> Self {
        Self {
            id: pin.id.0,
            tokens: pin.tokens,
            blocks: pin.blocks,
            ends_in_seconds: pin.ends_in.map(|left| left.as_secs_f64()),
        }
    }
}
