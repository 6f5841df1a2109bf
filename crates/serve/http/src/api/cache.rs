//! `/v1/cache`: the prefix cache for operators.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use stolon::{CacheStats, DiskStats, EngineStats, ObjectStats};

use super::chat::{MAX_MESSAGES, Message};
use super::completions::PromptInput;
use super::fields::{self, UnknownFields};

mod miss;
mod policy;
mod tree;

pub use miss::{ClientMiss, Explanation, Explanations, MISS_HEADER, Miss, Misses, ReasonCount};
pub use policy::{Policy, PolicyRequest};
pub(crate) use tree::span_label;
pub use tree::{FirstToken, Tree, TreeFormat, TreeNode, TreeQuery};

/// Maximum number of prompts of one request.
pub const MAX_PROMPTS: usize = 128;

/// Maximum length of the reason and of the description of a pin, in bytes.
pub const MAX_PIN_TEXT: usize = 512;

/// The prompts of a request, and the salt and tenant of their cache.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub struct CachePrompt {
    /// A text, a list of texts, the token ids of one prompt, or a list of such lists; at most
    /// [`MAX_PROMPTS`].
    pub prompt: Option<PromptInput>,
    /// Instead of `prompt`: a conversation, which is rendered as for a chat request.
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_MESSAGES>")]
    #[schemars(length(min = 1, max = MAX_MESSAGES))]
    pub messages: Option<Vec<Message>>,
    /// Instead of `prompt`, for Moondream: a question, as for `/v1/query`.
    pub question: Option<String>,
    /// The image that the question is about, as for `/v1/query`. Allowed only with `question`.
    pub image_url: Option<String>,
    /// Variables of the chat template. Allowed only with `messages`.
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Whether a conversation ends with the start of the model's answer. Default true. Allowed only
    /// with `messages`.
    pub add_generation_prompt: Option<bool>,
    /// The cache salt that requests with these prompts use. Default: none.
    pub cache_salt: Option<String>,
    /// The model of requests with these prompts, if it is a LoRA adapter. Default: none.
    pub model: Option<String>,
    /// The tenant to which the prompts belong, on a server that separates tenants by their keys or
    /// by a header. Default: none.
    pub tenant: Option<String>,
}

/// The body of `POST /v1/cache/query`, `/v1/cache/warm`, `/v1/cache/evict` and `/v1/cache/export`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct CacheRequest {
    /// The prompts.
    #[serde(flatten)]
    pub prompts: CachePrompt,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The reply to `POST /v1/cache/query` and `/v1/cache/warm`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CacheResults {
    /// One entry for each prompt, in their order.
    pub results: Vec<CacheResult>,
}

/// How much of a prompt is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CacheResult {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Number of them that are cached, from its start: whole blocks.
    pub cached_tokens: usize,
    /// How many of them a request would not compute: the cached ones, or, for a model with a
    /// recurrent state, those up to the last checkpoint of its state.
    pub resume_tokens: usize,
    /// Number of them that are on the disk, from its start: whole records, of 64 tokens or of one
    /// block if blocks are larger. Absent without a disk tier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_tokens: Option<usize>,
    /// Number of them that are on the disk or, as far as is known, in the object store. Absent
    /// without an object store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object_store_tokens: Option<usize>,
}

/// The reply to `POST /v1/cache/evict`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Evicted {
    /// KV blocks that were freed.
    pub blocks: usize,
}

/// The reply to `POST /v1/cache/import`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Imported {
    /// Tokens of the imported prefix, which are cached now.
    pub tokens: usize,
}

/// The query of `POST /v1/cache/flush`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FlushQuery {
    /// Whether to remove the KV that is stored on the disk, too. Default false. An object store
    /// keeps its KV.
    #[serde(default)]
    pub disk: bool,
}

/// The reply to `POST /v1/cache/flush`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Flushed {
    /// Always true.
    pub flushed: bool,
}

/// `GET /v1/cache/stats`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CacheStatsReply {
    /// Statistics of the prefix tree.
    #[schemars(schema_with = "super::schemas::counters::<CacheStats>")]
    pub cache: CacheStats,
    /// The engine's counters and gauges.
    #[schemars(schema_with = "super::schemas::counters::<EngineStats>")]
    pub stats: EngineStats,
    /// Size of the KV pool, in bytes.
    pub kv_bytes: usize,
    /// KV in the prefix cache, in bytes: its blocks of the pool.
    pub cached_kv_bytes: usize,
    /// Fraction of prompt tokens that were read from the prefix cache, 0 to 1.
    pub token_hit_rate: f64,
    /// Fraction of requests that found a part of their prompt cached, 0 to 1.
    pub request_hit_rate: f64,
}

/// `GET /v1/cache/tiers`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TiersReply {
    /// Prompt tokens whose KV was loaded into the pool instead of being computed.
    pub loaded_tokens: u64,
    /// Seconds that computing them would have taken at the recent speed.
    pub compute_seconds_saved: f64,
    /// The disk tier (`--kv-cache-dir`); `null` if there is none.
    #[schemars(schema_with = "super::schemas::optional_counters::<DiskStats>")]
    pub disk: Option<DiskStats>,
    /// The object store behind it (`--kv-object-store`); `null` if there is none.
    #[schemars(schema_with = "super::schemas::optional_counters::<ObjectStats>")]
    pub object_store: Option<ObjectStats>,
}

/// The query of `GET /v1/cache/events`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
pub struct EventsQuery {
    /// Whether to show token ids, which are parts of prompts. Default false.
    #[serde(default)]
    pub tokens: bool,
    /// Whether the events begin with a snapshot of the cache. Default true.
    #[serde(default = "with_snapshot")]
    pub snapshot: bool,
}

fn with_snapshot() -> bool {
    true
}

/// The query of `GET /v1/cache/pins`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
pub struct TokensQuery {
    /// Whether to show token ids, which are parts of prompts. Default false.
    #[serde(default)]
    pub tokens: bool,
}

/// `POST /v1/cache/pin`: keeps a prompt from being evicted.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct PinRequest {
    /// The prompt: one.
    #[serde(flatten)]
    pub prompts: CachePrompt,
    /// Whether to compute the part that is not cached. Default true. With false, only the cached
    /// part is pinned.
    pub compute: Option<bool>,
    /// Seconds after which the pin ends, 1 to 4294967295. Default: it lasts until it is unpinned.
    #[serde(default, deserialize_with = "fields::count::<_, 1, { u32::MAX as usize }>")]
    #[schemars(range(min = 1, max = u32::MAX as usize))]
    pub ttl_seconds: Option<usize>,
    /// Whether requests that use the prompt prolong the life of the pin, so that it ends
    /// `ttl_seconds` after its last use. Default false. Allowed only with `ttl_seconds`.
    pub refresh_on_hit: Option<bool>,
    /// Reason of the pin, at most [`MAX_PIN_TEXT`] bytes.
    pub reason: Option<String>,
    /// Description of the prompt, at most [`MAX_PIN_TEXT`] bytes.
    pub description: Option<String>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// `POST /v1/cache/unpin`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct UnpinRequest {
    /// Id of the pin. Either this or the prompts must be given.
    pub id: Option<u64>,
    /// The prompts whose pins end.
    #[serde(flatten)]
    pub prompts: CachePrompt,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// Reply to `POST /v1/cache/pin`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PinCreated {
    /// Id of the pin.
    pub id: u64,
    /// Tokens of the prompt that are pinned, from its start: whole blocks.
    pub tokens: usize,
}

/// Reply to `POST /v1/cache/unpin`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PinDeleted {
    /// Always true.
    pub deleted: bool,
    /// Number of pins that have ended.
    pub pins: usize,
}

/// `GET /v1/cache/pins`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PinList {
    /// All pins, oldest first.
    pub pins: Vec<PinInfo>,
}

/// A pinned prefix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PinInfo {
    /// Id of the pin.
    pub id: u64,
    /// Hash of the cache salt, which itself is not shown.
    pub namespace: String,
    /// Tokens of the prompt that are pinned, from its start: whole blocks.
    pub tokens: usize,
    /// KV blocks of the pinned tokens.
    pub blocks: usize,
    /// Whether blocks of the prompt were evicted, because running requests needed all others. Its
    /// next use reads them from the disk tier, or computes them. Without a disk tier, true only for
    /// marks.
    pub demoted: bool,
    /// Whether a request has made it, by `cache_control` for example. Such a mark takes no block from
    /// running requests: it lets its prompt be evicted after everything else.
    pub is_mark: bool,
    /// Seconds until the pin ends, unless its prompt is used before that and `refresh_on_hit` is
    /// true; `null` if it lasts until it is unpinned.
    pub ends_in_seconds: Option<f64>,
    /// Whether use prolongs its life.
    pub refresh_on_hit: bool,
    /// Reason of the pin.
    pub reason: Option<String>,
    /// Description of the prompt.
    pub description: Option<String>,
    /// The pinned token ids, if they were requested. Positions of images are numbers from 2^31 on,
    /// which have a meaning in this process only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// The first [`MAX_PIN_TEXT`] bytes of their text, if token ids were requested. An image is
    /// shown as `[image, 64 positions]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// The data of one event of `GET /v1/cache/events`. Hashes are 16 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum EventData {
    /// The first event. It is followed by `runs` events of type `stored` with this number, which
    /// contain all cached blocks, or by none with `snapshot=false` in the query.
    Snapshot {
        /// Number of the last event that the snapshot includes.
        number: u64,
        /// Events of the snapshot that follow.
        runs: usize,
    },
    /// Blocks were added.
    Stored {
        /// Number of the event. Numbers have no gaps.
        number: u64,
        /// Hash of the cache salt, which itself is not shown.
        namespace: String,
        /// Hash of the block before the first one; `null` at the start of a prompt.
        parent: Option<String>,
        /// Hashes of the blocks.
        hashes: Vec<String>,
        /// Token ids of the blocks, if they were requested. Positions of images are numbers from
        /// 2^31 on, which have a meaning in this process only.
        #[serde(skip_serializing_if = "Option::is_none")]
        token_ids: Option<Vec<u32>>,
    },
    /// Blocks were removed.
    Removed {
        /// Number of the event.
        number: u64,
        /// Hashes of the blocks.
        hashes: Vec<String>,
    },
    /// All blocks were removed.
    Cleared {
        /// Number of the event.
        number: u64,
    },
    /// The client was too slow, and events were dropped. This is the last event: connect again for
    /// a new snapshot.
    Reset {
        /// Number of the last event that was dropped.
        number: u64,
        /// Events that were dropped.
        missed: u64,
    },
}
