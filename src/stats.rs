//! Numbers about an engine, taken at one moment without disturbing it.

use serde::Serialize;
use stolon_actors::{CoreAudit, CoreStats};

/// What a running engine is and how large.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelInfo {
    /// The model's name: hub id, or the directory's or file's name.
    pub id: String,
    /// Token ids are below it.
    pub vocab_size: usize,
    /// Most positions (prompt and generated tokens) one request may have.
    pub max_positions: usize,
    /// Positions a KV block holds.
    pub block_size: usize,
    /// KV blocks there are.
    pub num_blocks: usize,
    /// Bytes the KV blocks take together.
    pub kv_bytes: usize,
    /// Tokens that end a generation.
    pub eos_token_ids: Vec<u32>,
    /// Whether the model brings a chat template.
    pub has_chat_template: bool,
    /// Whether finished prompts are kept and shared.
    pub prefix_caching: bool,
}

/// Counts since the engine started, and gauges of this moment. Read without a lock, so that
/// values of one instant may be a step apart from each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct EngineStats {
    /// Requests let through the door.
    pub requests: u64,
    /// Requests that ended well.
    pub finished: u64,
    /// Requests cancelled by dropping their stream, or ended by a stop string.
    pub cancelled: u64,
    /// Requests that ended with an error after they were let in.
    pub failed: u64,
    /// Requests turned away at the door because the engine was full.
    pub rejected: u64,
    /// Uncached prompt tokens of later requests that were admitted before an earlier one, at most.
    pub most_overtaken_tokens: usize,
    /// Requests being computed now.
    pub running: usize,
    /// Requests waiting now.
    pub waiting: usize,
    /// Prompt tokens of requests that began to run.
    pub prompt_tokens: u64,
    /// Those of them that were found in the cache.
    pub cached_tokens: u64,
    /// Requests whose first token came from a kept row of logits, without a forward pass.
    pub first_tokens_kept: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Positions computed: prompts, generated tokens, and those computed again after a preemption.
    pub computed_tokens: u64,
    /// Requests that began to run and found some of their prompt cached.
    pub requests_hit: u64,
    /// Requests that began to run (a preempted one counts once).
    pub requests_started: u64,
    /// Forward passes.
    pub steps: u64,
    /// Times a waiting request waited for a running one that was computing the same prefix.
    pub follows: u64,
    /// Running requests that had to give up their blocks and start again.
    pub preemptions: u64,
    /// Blocks taken from the cache for other use.
    pub evictions: u64,
    /// Times a part of the engine failed and was started again.
    pub restarts: u64,
    /// KV blocks there are.
    pub blocks_total: usize,
    /// KV blocks nobody uses.
    pub blocks_free: usize,
    /// KV blocks private to running requests.
    pub blocks_reserved: usize,
    /// KV blocks the prefix cache holds.
    pub blocks_cached: usize,
    /// Cached blocks that no running request uses.
    pub blocks_evictable: usize,
}

impl EngineStats {
    /// Share of prompt tokens that were read from the cache, 0 to 1.
    pub fn token_hit_rate(&self) -> f64 {
        ratio(self.cached_tokens, self.prompt_tokens)
    }

    /// Share of started requests that found some of their prompt cached, 0 to 1.
    pub fn request_hit_rate(&self) -> f64 {
        ratio(self.requests_hit, self.requests_started)
    }
}

impl From<CoreStats> for EngineStats {
    fn from(core: CoreStats) -> EngineStats {
        EngineStats {
            requests: core.requests,
            finished: core.finished,
            cancelled: core.cancelled,
            failed: core.failed,
            rejected: core.rejected,
            most_overtaken_tokens: core.most_overtaken_tokens,
            running: core.running,
            waiting: core.waiting,
            prompt_tokens: core.prompt_tokens,
            cached_tokens: core.cached_tokens,
            first_tokens_kept: core.first_tokens_kept,
            completion_tokens: core.completion_tokens,
            computed_tokens: core.computed_tokens,
            requests_hit: core.hits,
            requests_started: core.started,
            steps: core.steps,
            follows: core.follows,
            preemptions: core.preemptions,
            evictions: core.evictions,
            restarts: core.restarts,
            blocks_total: core.blocks_total,
            blocks_free: core.blocks_free,
            blocks_reserved: core.blocks_reserved,
            blocks_cached: core.blocks_cached,
            blocks_evictable: core.blocks_evictable,
        }
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// What a full check of the engine's bookkeeping found: only a clean one is returned, so this
/// says how much was checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct AuditReport {
    /// KV blocks there are; always `free + reserved + committed`.
    pub blocks_total: usize,
    /// Blocks nobody uses.
    pub blocks_free: usize,
    /// Blocks private to running requests; 0 when none runs.
    pub blocks_reserved: usize,
    /// Blocks the prefix cache owns.
    pub blocks_committed: usize,
    /// Cached blocks that no request holds.
    pub blocks_evictable: usize,
    /// Requests running at the time.
    pub running: usize,
    /// Requests waiting at the time.
    pub waiting: usize,
}

impl From<CoreAudit> for AuditReport {
    fn from(core: CoreAudit) -> AuditReport {
        AuditReport {
            blocks_total: core.blocks_total,
            blocks_free: core.blocks_free,
            blocks_reserved: core.blocks_reserved,
            blocks_committed: core.blocks_committed,
            blocks_evictable: core.blocks_evictable,
            running: core.running,
            waiting: core.waiting,
        }
    }
}
