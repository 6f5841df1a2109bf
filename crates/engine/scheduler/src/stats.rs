//! Statistics of a running engine, as plain values. `gauges.rs` has the live ones.

use serde::{Deserialize, Serialize};
use stolon_kvcache::{TreeCounts, TreeStats};

/// Counters since the engine started, and gauges of this moment. The counts of requests by state
/// always add up; other values may be one step apart from each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct EngineStats {
    /// Requests that entered the admission queue: always `finished + canceled + failed + running +
    /// waiting`.
    pub requests: u64,
    /// Requests that completed, also by a stop string.
    pub finished: u64,
    /// Completed requests whose answer ended because `max_tokens`, the context length or the KV
    /// pool was exhausted. The other completed ones ended with an end-of-sequence token, a stop
    /// token or a stop string.
    pub finished_length: u64,
    /// Requests canceled by dropping their stream.
    pub canceled: u64,
    /// Requests that ended with an error after they had entered the queue, also because the engine
    /// failed or stopped.
    pub failed: u64,
    /// Requests refused because the admission queue was full or their quota was used up.
    pub rejected: u64,
    /// Number of them that would have exceeded the limit of uncached tokens in the queue.
    pub rejected_by_tokens: u64,
    /// Number of them that would have exceeded their quota. The others exceeded the limit of
    /// requests in the queue.
    pub rejected_by_quota: u64,
    /// The largest number of uncached prompt tokens of later requests that were admitted before
    /// an earlier one.
    pub most_overtaken_tokens: usize,
    /// Requests being computed now.
    pub running: usize,
    /// Requests in the admission queue now, including preempted ones.
    pub waiting: usize,
    /// Uncached prompt tokens of the requests in the admission queue now, without preempted ones.
    pub queued_tokens: usize,
    /// Prompt tokens of started requests.
    pub prompt_tokens: u64,
    /// Prompt tokens of started requests that were found in the prefix cache.
    pub cached_tokens: u64,
    /// Requests whose first token was sampled from cached logits, without a forward pass.
    pub first_tokens_from_cache: u64,
    /// Generated tokens.
    pub completion_tokens: u64,
    /// Computed positions: prompts, generated tokens, and what was recomputed after preemptions.
    pub computed_tokens: u64,
    /// Prompts that were computed in the background, while there was no request, to the end.
    pub background_finished: u64,
    /// Prompts that were to be computed in the background and ended early: because a request came,
    /// because others did not fit into the queue of such prompts, or because the caller gave up.
    pub background_dropped: u64,
    /// Positions that were computed in the background. They are in no other number of tokens.
    pub background_tokens: u64,
    /// Times that tokens were proposed to follow a sequence in a step (speculative decoding).
    pub drafts: u64,
    /// Tokens that were proposed. Their positions count as computed only if they were accepted.
    pub drafted_tokens: u64,
    /// Proposed tokens that were accepted, because they were the tokens of the answer.
    pub accepted_tokens: u64,
    /// Those of `drafts` that a draft model, or the model's own head, has made.
    pub model_drafts: u64,
    /// Those of `drafted_tokens` that a draft model has guessed.
    pub model_drafted_tokens: u64,
    /// Those of `accepted_tokens` that a draft model has guessed.
    pub model_accepted_tokens: u64,
    /// Tokens of prompts and answers that a draft model has computed before it could guess what
    /// follows. Those in shared prefixes are computed once.
    pub model_computed_tokens: u64,
    /// Prompt positions whose KV was loaded from outside of the pool instead of being computed.
    pub loaded_tokens: u64,
    /// Loads that failed. The positions were computed instead.
    pub loads_failed: u64,
    /// Blocks that were copied out of the pool, to be stored or exported.
    pub saved_blocks: u64,
    /// Positions that recent steps with a prefill chunk have computed per second; 0 before the
    /// first one.
    pub prefill_rate: usize,
    /// Started requests with prompt tokens that were found in the prefix cache.
    pub requests_hit: u64,
    /// Requests that left the admission queue. A preempted request counts once.
    pub requests_started: u64,
    /// Forward passes.
    pub steps: u64,
    /// Forward passes for which the backend returned an error. Their requests failed.
    pub steps_failed: u64,
    /// Times that a waiting request waited for a running one that was computing the same prefix.
    pub follows: u64,
    /// Checkpoints of recurrent states that were taken for the prefix cache; 0 for models without
    /// such states.
    pub checkpoints: u64,
    /// Tokens whose KV was cached and that were computed again nonetheless when their request
    /// started, because the last checkpoint of the recurrent state was before them.
    pub recomputed_tokens: u64,
    /// Images that were encoded. One whose positions are all in the prefix cache is not.
    pub images_encoded: u64,
    /// Times that a running request was preempted.
    pub preemptions: u64,
    /// Number of them that hit a request that was stalled by a slow consumer, for another request.
    pub preemptions_stalled: u64,
    /// Number of them that made room for a request of a tenant with fewer running requests.
    pub preemptions_for_share: u64,
    /// Number of them that made room for a request of the same tenant with a larger priority. The
    /// others freed blocks for an older running request.
    #[serde(default)]
    pub preemptions_for_priority: u64,
    /// Blocks evicted from the prefix cache to make room.
    pub evictions: u64,
    /// Blocks evicted from the prefix cache because their namespace exceeded its quota.
    #[serde(default)]
    pub evictions_for_quota: u64,
    /// Blocks removed from the prefix cache by a flush or by another request of the operator.
    pub evictions_requested: u64,
    /// Open sessions.
    pub sessions: usize,
    /// Complete turns of sessions.
    pub session_turns: u64,
    /// Sessions that were closed because their time to live had passed.
    pub sessions_expired: u64,
    /// Sessions that were closed to make room for another one.
    pub sessions_displaced: u64,
    /// Times that a session lost the blocks that it held: to another session, because the budget
    /// was used up, or to a running request.
    pub session_holds_lost: u64,
    /// Restarts of the engine after a failure.
    pub restarts: u64,
    /// Blocks of the KV pool.
    pub blocks_total: usize,
    /// Free blocks.
    pub blocks_free: usize,
    /// Blocks reserved by running requests, and partial last blocks that sessions hold.
    pub blocks_reserved: usize,
    /// Blocks owned by the prefix cache.
    pub blocks_cached: usize,
    /// Cached blocks that no running request, no pin and no session holds.
    pub blocks_evictable: usize,
    /// Cached blocks that pins hold. A block held by several pins counts once for each.
    pub blocks_pinned: usize,
    /// Blocks that sessions hold, cached and partial ones. A block held by several sessions counts once.
    pub blocks_in_sessions: usize,
}

impl EngineStats {
    /// The share of prompt tokens that were read from the cache, from 0 to 1.
    pub fn token_hit_rate(&self) -> f64 {
        ratio(self.cached_tokens, self.prompt_tokens)
    }

    /// The share of started requests with cached prompt tokens, from 0 to 1.
    pub fn request_hit_rate(&self) -> f64 {
        ratio(self.requests_hit, self.requests_started)
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Statistics of the prefix cache. Counters start when the cache does: with the engine, and again
/// after a restart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct CacheStats {
    /// Blocks in the prefix tree.
    pub blocks: usize,
    /// Blocks in the tree that can be evicted.
    pub blocks_evictable: usize,
    /// Blocks in the tree that running requests, pins or sessions hold.
    pub blocks_locked: usize,
    /// Blocks that pins hold. A block held by several pins counts once for each.
    pub blocks_pinned: usize,
    /// Nodes of the tree.
    pub nodes: usize,
    /// Namespaces (for example, cache salts) with cached blocks, without the default namespace.
    pub namespaces: usize,
    /// Memory used by the tree itself, in bytes.
    pub index_bytes: usize,
    /// Blocks that were added to the tree.
    pub blocks_committed: u64,
    /// Blocks that two requests computed at the same time; one copy was dropped.
    pub blocks_duplicate: u64,
    /// Blocks evicted to make room.
    pub evicted_for_room: u64,
    /// Blocks evicted because their namespace exceeded its quota.
    pub evicted_for_quota: u64,
    /// Blocks removed by flushes.
    pub evicted_by_flush: u64,
    /// Mean number of tokens found in the cache, over all requests that ran.
    pub average_match: f64,
    /// Histogram of how long evicted runs of blocks had been cached: entry `n` counts those with
    /// 2^n to 2^(n+1) - 1 ticks (changes of the cache), entry 0 those with fewer than 2.
    pub lifetime_ticks: [u64; 32],
}

impl CacheStats {
    /// The statistics of a tree with these counts.
    pub fn new(counts: &TreeCounts, stats: &TreeStats, index_bytes: usize) -> CacheStats {
        CacheStats {
            blocks: counts.cached,
            blocks_evictable: counts.evictable,
            blocks_locked: counts.locked,
            blocks_pinned: counts.pinned,
            nodes: counts.nodes,
            namespaces: counts.namespaces,
            index_bytes,
            blocks_committed: stats.blocks_committed,
            blocks_duplicate: stats.blocks_duplicate,
            evicted_for_room: stats.evicted_for_room,
            evicted_for_quota: stats.evicted_for_quota,
            evicted_by_flush: stats.evicted_by_flush,
            average_match: stats.average_match(),
            lifetime_ticks: stats.lifetime_ticks,
        }
    }
}

/// The block counts found by an audit. An audit that finds an inconsistency is an error instead,
/// so the numbers only say how much was checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct AuditReport {
    /// Blocks of the KV pool: always the sum of free, reserved, partial and committed blocks.
    pub blocks_total: usize,
    /// Free blocks.
    pub blocks_free: usize,
    /// Blocks reserved by running requests; 0 if none runs.
    pub blocks_reserved: usize,
    /// Blocks that are not full, in which the last turn of a session has ended.
    pub blocks_partial: usize,
    /// Blocks owned by the prefix cache.
    pub blocks_committed: usize,
    /// Committed blocks that no request, no pin and no session holds.
    pub blocks_evictable: usize,
    /// Requests that were running.
    pub running: usize,
    /// Requests that were waiting.
    pub waiting: usize,
}
