//! Counters and gauges of a running engine. The actors write them; anybody reads them.
//!
//! The counts of requests by state are read together and always add up (`request_counts.rs`). All
//! others are single atomics. They guard no other memory, so all accesses are relaxed, and values
//! read at the same time may be one step apart from each other.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use stolon_kvcache::{PoolCounts, TreeCounts, TreeStats};

use crate::histogram::{EngineHistograms, Histograms};
use crate::request_counts::{RequestCounts, RequestNumbers};
use crate::session::SessionCounts;

/// The live values. [`EngineStats`] documents each of them.
#[derive(Debug, Default)]
pub struct Gauges {
    pub(crate) request_counts: RequestCounts,
    pub(crate) histograms: Histograms,
    pub(crate) finished_length: Counter,
    pub(crate) rejected: Counter,
    pub(crate) rejected_by_tokens: Counter,
    pub(crate) requests_started: Counter,
    pub(crate) requests_hit: Counter,
    pub(crate) prompt_tokens: Counter,
    pub(crate) cached_tokens: Counter,
    pub(crate) completion_tokens: Counter,
    pub(crate) computed_tokens: Counter,
    pub(crate) loaded_tokens: Counter,
    pub(crate) loads_failed: Counter,
    pub(crate) saved_blocks: Counter,
    pub(crate) prefill_rate: Gauge,
    pub(crate) steps: Counter,
    pub(crate) steps_failed: Counter,
    pub(crate) preemptions: Counter,
    pub(crate) preemptions_stalled: Counter,
    pub(crate) preemptions_for_share: Counter,
    pub(crate) evictions: Counter,
    pub(crate) evictions_requested: Counter,
    pub(crate) restarts: Counter,
    pub(crate) follows: Counter,
    pub(crate) first_tokens_from_cache: Counter,
    pub(crate) most_overtaken_tokens: Gauge,
    pub(crate) blocks_free: Gauge,
    pub(crate) blocks_reserved: Gauge,
    pub(crate) blocks_cached: Gauge,
    pub(crate) blocks_evictable: Gauge,
    pub(crate) blocks_pinned: Gauge,
}

/// Number of prompt positions from which on a step shows how fast prefills are.
const PREFILL_POSITIONS: usize = 32;

impl Gauges {
    /// Notes how long a step has taken that computed `computed` positions, `prompts` of them of
    /// prompts. Decodes are slower, so they must be the smaller part.
    pub(crate) fn note_prefill(&self, prompts: usize, computed: usize, time: Duration) {
        if prompts < PREFILL_POSITIONS || prompts < computed / 2 || time.is_zero() {
            return;
        }
        let now = computed as f64 / time.as_secs_f64();
        // Only the scheduler writes it.
        let rate = match self.prefill_rate.get() {
            0 => now,
            before => 0.7 * before as f64 + 0.3 * now,
        };
        self.prefill_rate.set((rate as usize).max(1));
    }

    /// Number of positions that are computed in `time` at the recent speed; `None` before it is
    /// known.
    pub(crate) fn prefill_positions(&self, time: Duration) -> Option<usize> {
        let rate = self.prefill_rate.get();
        (rate > 0).then_some((rate as f64 * time.as_secs_f64()) as usize)
    }
}

/// A value that only grows.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: usize) {
        self.0.fetch_add(n as u64, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A value that goes up and down.
#[derive(Debug, Default)]
pub(crate) struct Gauge(AtomicUsize);

impl Gauge {
    pub(crate) fn set(&self, n: usize) {
        self.0.store(n, Ordering::Relaxed);
    }

    /// Sets the gauge to `n` if its value is smaller.
    pub(crate) fn raise(&self, n: usize) {
        self.0.fetch_max(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// Counters since the engine started, and gauges of this moment. The counts of requests by state
/// always add up; other values may be one step apart from each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct EngineStats {
    /// Requests that entered the admission queue: always `finished + cancelled + failed + running +
    /// waiting`.
    pub requests: u64,
    /// Requests that completed, also by a stop string.
    pub finished: u64,
    /// Completed requests whose answer ended because `max_tokens`, the context length or the KV
    /// pool was exhausted. The other completed ones ended with an end-of-sequence token, a stop
    /// token or a stop string.
    pub finished_length: u64,
    /// Requests cancelled by dropping their stream.
    pub cancelled: u64,
    /// Requests that ended with an error after they had entered the queue, also because the engine
    /// failed or stopped.
    pub failed: u64,
    /// Requests refused because the admission queue was full.
    pub rejected: u64,
    /// How many of them would have exceeded the limit of uncached tokens in the queue; the others
    /// exceeded the limit of requests.
    pub rejected_by_tokens: u64,
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
    /// Prompt positions whose KV was loaded from outside of the pool instead of being computed.
    pub loaded_tokens: u64,
    /// Loads that failed. The positions were computed instead.
    pub loads_failed: u64,
    /// Blocks that were copied out of the pool, to be stored or exported.
    pub saved_blocks: u64,
    /// Positions that recent steps with a prefill chunk have computed per second; 0 before the
    /// first one.
    pub prefill_rate: usize,
    /// Started requests of which some prompt tokens were found in the prefix cache.
    pub requests_hit: u64,
    /// Requests that left the admission queue. A preempted request counts once.
    pub requests_started: u64,
    /// Forward passes.
    pub steps: u64,
    /// Forward passes for which the backend returned an error. Their requests failed.
    pub steps_failed: u64,
    /// Times that a waiting request waited for a running one that was computing the same prefix.
    pub follows: u64,
    /// Times that a running request was preempted.
    pub preemptions: u64,
    /// How many of them were stalled by a slow consumer and made room for another request.
    pub preemptions_stalled: u64,
    /// How many of them made room for a request of a tenant with fewer running requests. The others
    /// lost their blocks to an older running request.
    pub preemptions_for_share: u64,
    /// Blocks evicted from the prefix cache to make room.
    pub evictions: u64,
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
    /// Times that a session gave up the blocks that it held: for another session, because the
    /// budget was used up, or for a running request.
    pub session_holds_lost: u64,
    /// Restarts of the engine after a failure.
    pub restarts: u64,
    /// Blocks of the KV pool.
    pub blocks_total: usize,
    /// Free blocks.
    pub blocks_free: usize,
    /// Blocks reserved by running requests.
    pub blocks_reserved: usize,
    /// Blocks owned by the prefix cache.
    pub blocks_cached: usize,
    /// Cached blocks that no running request, no pin and no session holds.
    pub blocks_evictable: usize,
    /// Cached blocks that pins hold. A block held by several pins counts once for each.
    pub blocks_pinned: usize,
    /// Cached blocks that sessions hold. A block held by several sessions counts once.
    pub blocks_in_sessions: usize,
}

impl EngineStats {
    /// The share of prompt tokens that were read from the cache, from 0 to 1.
    pub fn token_hit_rate(&self) -> f64 {
        ratio(self.cached_tokens, self.prompt_tokens)
    }

    /// The share of started requests of which something was cached, from 0 to 1.
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
    /// Blocks of the KV pool: always the sum of free, reserved and committed blocks.
    pub blocks_total: usize,
    /// Free blocks.
    pub blocks_free: usize,
    /// Blocks reserved by running requests; 0 if none runs.
    pub blocks_reserved: usize,
    /// Blocks owned by the prefix cache.
    pub blocks_committed: usize,
    /// Committed blocks that no request, no pin and no session holds.
    pub blocks_evictable: usize,
    /// Requests that were running.
    pub running: usize,
    /// Requests that were waiting.
    pub waiting: usize,
}

impl Gauges {
    /// Refuses requests from now on, with [`EngineError::Draining`](crate::EngineError::Draining).
    pub fn close(&self) {
        self.request_counts.close();
    }

    /// Whether new requests are refused.
    pub fn is_closed(&self) -> bool {
        self.request_counts.is_closed()
    }

    /// Ready when no request is waiting or running. Otherwise the task of `context` is woken when
    /// that is the case.
    pub fn poll_idle(&self, context: &mut Context<'_>) -> Poll<()> {
        self.request_counts.poll_idle(context)
    }

    /// Counts a restart of the engine.
    pub fn count_restart(&self) {
        self.restarts.add(1);
    }

    /// Counts blocks evicted to make room.
    pub fn count_evictions(&self, blocks: usize) {
        if blocks > 0 {
            tracing::debug!(target: "stolon", blocks, "cached blocks evicted");
        }
        self.evictions.add(blocks);
    }

    /// Counts blocks removed from the cache because an operator asked for it.
    pub fn count_requested_evictions(&self, blocks: usize) {
        self.evictions_requested.add(blocks);
    }

    /// A copy of all distributions.
    pub fn histograms(&self) -> EngineHistograms {
        self.histograms.read()
    }

    /// Sets the gauges of blocks to those of an empty cache with `blocks` free blocks.
    pub fn reset(&self, blocks: usize) {
        self.blocks_free.set(blocks);
        self.blocks_reserved.set(0);
        self.blocks_cached.set(0);
        self.blocks_evictable.set(0);
        self.blocks_pinned.set(0);
    }

    /// Sets the gauges of the block pool.
    pub fn set_pool(&self, counts: &PoolCounts) {
        self.blocks_free.set(counts.free + counts.fenced);
        self.blocks_reserved.set(counts.reserved);
    }

    /// Sets the gauges of the prefix tree.
    pub fn set_tree(&self, counts: &TreeCounts) {
        self.blocks_cached.set(counts.cached + counts.detached);
        self.blocks_evictable.set(counts.evictable);
        self.blocks_pinned.set(counts.pinned);
    }

    /// A copy of all values.
    pub(crate) fn snapshot(
        &self,
        queued_tokens: usize,
        blocks_total: usize,
        sessions: SessionCounts,
    ) -> EngineStats {
        let RequestNumbers { requests, finished, cancelled, failed, running, waiting } =
            self.request_counts.read();
        EngineStats {
            requests,
            finished,
            finished_length: self.finished_length.get(),
            cancelled,
            failed,
            rejected: self.rejected.get(),
            rejected_by_tokens: self.rejected_by_tokens.get(),
            requests_started: self.requests_started.get(),
            requests_hit: self.requests_hit.get(),
            prompt_tokens: self.prompt_tokens.get(),
            cached_tokens: self.cached_tokens.get(),
            first_tokens_from_cache: self.first_tokens_from_cache.get(),
            completion_tokens: self.completion_tokens.get(),
            computed_tokens: self.computed_tokens.get(),
            loaded_tokens: self.loaded_tokens.get(),
            loads_failed: self.loads_failed.get(),
            saved_blocks: self.saved_blocks.get(),
            prefill_rate: self.prefill_rate.get(),
            steps: self.steps.get(),
            steps_failed: self.steps_failed.get(),
            preemptions: self.preemptions.get(),
            preemptions_stalled: self.preemptions_stalled.get(),
            preemptions_for_share: self.preemptions_for_share.get(),
            evictions: self.evictions.get(),
            evictions_requested: self.evictions_requested.get(),
            sessions: sessions.open,
            session_turns: sessions.turns,
            sessions_expired: sessions.expired,
            sessions_displaced: sessions.displaced,
            session_holds_lost: sessions.holds_lost,
            restarts: self.restarts.get(),
            follows: self.follows.get(),
            most_overtaken_tokens: self.most_overtaken_tokens.get(),
            running,
            waiting,
            queued_tokens,
            blocks_total,
            blocks_free: self.blocks_free.get(),
            blocks_reserved: self.blocks_reserved.get(),
            blocks_cached: self.blocks_cached.get(),
            blocks_evictable: self.blocks_evictable.get(),
            blocks_pinned: self.blocks_pinned.get(),
            blocks_in_sessions: sessions.held_blocks,
        }
    }
}
