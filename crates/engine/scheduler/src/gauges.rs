//! Counters and gauges of a running engine. The actors write them; any thread may read them.
//!
//! The counts of requests by state are read together and always add up (`request_counts.rs`). All
//! others are single atomics. They guard no other memory, so all accesses are relaxed, and values
//! read at the same time may be one step apart from each other.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use stolon_kvcache::{PoolCounts, TreeCounts, TreeStats};

use crate::histogram::{EngineHistograms, Histograms};
use crate::request_counts::{RequestCounts, RequestNumbers};
use crate::session::SessionCounts;
use crate::stats::EngineStats;

/// The live values. [`EngineStats`] documents each of them.
#[derive(Debug, Default)]
pub struct Gauges {
    pub(crate) request_counts: RequestCounts,
    pub(crate) histograms: Histograms,
    pub(crate) rejected_by_requests: Counter,
    pub(crate) rejected_by_tokens: Counter,
    pub(crate) rejected_by_quota: Counter,
    pub(crate) requests_started: Counter,
    pub(crate) requests_hit: Counter,
    pub(crate) prompt_tokens: Counter,
    pub(crate) cached_tokens: Counter,
    pub(crate) completion_tokens: Counter,
    pub(crate) computed_tokens: Counter,
    pub(crate) background_finished: Counter,
    pub(crate) background_dropped: Counter,
    pub(crate) background_tokens: Counter,
    pub(crate) drafts: Counter,
    pub(crate) drafted_tokens: Counter,
    pub(crate) accepted_tokens: Counter,
    pub(crate) model_drafts: Counter,
    pub(crate) model_drafted_tokens: Counter,
    pub(crate) model_accepted_tokens: Counter,
    pub(crate) model_computed_tokens: Counter,
    pub(crate) loaded_tokens: Counter,
    pub(crate) loads_failed: Counter,
    pub(crate) saved_blocks: Counter,
    pub(crate) prefill_rate: Gauge,
    pub(crate) steps: Counter,
    pub(crate) steps_failed: Counter,
    pub(crate) preemptions_for_blocks: Counter,
    pub(crate) preemptions_stalled: Counter,
    pub(crate) preemptions_for_share: Counter,
    pub(crate) preemptions_for_priority: Counter,
    pub(crate) evictions: Counter,
    pub(crate) evictions_for_quota: Counter,
    pub(crate) evictions_requested: Counter,
    pub(crate) restarts: Counter,
    pub(crate) follows: Counter,
    pub(crate) checkpoints: Counter,
    pub(crate) recomputed_tokens: Counter,
    pub(crate) images_encoded: Counter,
    pub(crate) encode_rate: Gauge,
    pub(crate) first_tokens_from_cache: Counter,
    pub(crate) most_overtaken_tokens: Gauge,
    pub(crate) blocks_free: Gauge,
    pub(crate) blocks_reserved: Gauge,
    pub(crate) blocks_cached: Gauge,
    pub(crate) blocks_evictable: Gauge,
    pub(crate) blocks_pinned: Gauge,
}

/// Minimum number of prompt positions in a step from which the speed of prefills is measured.
const PREFILL_POSITIONS: usize = 32;

/// Numbers of blocks that have left a prefix tree since it was created, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct EvictionCounts {
    /// Evicted to make room.
    pub room: u64,
    /// Evicted because their namespace exceeded its quota.
    pub quota: u64,
    /// Removed because an operator asked for it.
    pub requested: u64,
}

impl EvictionCounts {
    /// Reads the counters of a tree.
    pub fn new(stats: &TreeStats) -> EvictionCounts {
        EvictionCounts {
            room: stats.evicted_for_room,
            quota: stats.evicted_for_quota,
            requested: stats.evicted_by_flush
                + stats.evicted_by_namespace
                + stats.evicted_by_prefix,
        }
    }
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

    /// Number of blocks that have left the prefix cache, for any reason.
    pub fn evicted_blocks(&self) -> u64 {
        self.evictions.get() + self.evictions_for_quota.get() + self.evictions_requested.get()
    }

    /// Ready when no request is waiting or running. Otherwise the task of `context` is woken when
    /// that is the case.
    pub fn poll_idle(&self, context: &mut Context<'_>) -> Poll<()> {
        self.request_counts.poll_idle(context)
    }

    /// Number of completed steps since the engine started.
    pub fn steps(&self) -> u64 {
        self.steps.get()
    }

    /// Counts a restart of the engine.
    pub fn count_restart(&self) {
        self.restarts.add(1);
    }

    /// Counts the blocks that have left a prefix tree between two readings of its counters.
    pub fn count_evictions(&self, before: EvictionCounts, now: EvictionCounts) {
        let evicted = |cause: fn(&EvictionCounts) -> u64| {
            usize::try_from(cause(&now).saturating_sub(cause(&before))).unwrap_or(usize::MAX)
        };
        let (room, quota) = (evicted(|counts| counts.room), evicted(|counts| counts.quota));
        if room + quota > 0 {
            tracing::debug!(target: "stolon", room, quota, "cached blocks evicted");
        }
        self.evictions.add(room);
        self.evictions_for_quota.add(quota);
        self.evictions_requested.add(evicted(|counts| counts.requested));
    }

    /// A copy of all distributions.
    pub fn histograms(&self) -> EngineHistograms {
        self.histograms.read()
    }

    /// Sets the gauges of blocks to the values for an empty cache with `blocks` free blocks.
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
        self.blocks_evictable.set(counts.returnable());
        self.blocks_pinned.set(counts.pinned);
    }

    /// Updates the speed of prefills after a step that computed `computed` positions, `prompts` of
    /// them of prompts, in `time`. A step with more decodes is ignored, because they are slower.
    pub(crate) fn note_prefill(&self, prompts: usize, computed: usize, time: Duration) {
        if prompts < PREFILL_POSITIONS || prompts < computed / 2 || time.is_zero() {
            return;
        }
        self.prefill_rate.set_rate(computed, time);
    }

    /// Updates the speed of the encoder after it has spent `time` on an image of `positions`.
    pub(crate) fn note_encoding(&self, positions: usize, time: Duration) {
        self.images_encoded.add(1);
        if !time.is_zero() {
            self.encode_rate.set_rate(positions, time);
        }
    }

    /// Number of positions that are computed in the time in which `positions` of images are encoded;
    /// as many, before both speeds are known.
    pub(crate) fn encoding_cost(&self, positions: usize) -> usize {
        match (self.prefill_rate.get(), self.encode_rate.get()) {
            (0, _) | (_, 0) => positions,
            (prefill, encode) => positions.saturating_mul(prefill).div_ceil(encode),
        }
    }

    /// Number of positions that are computed in `time` at the recent speed; `None` before it is
    /// known.
    pub(crate) fn prefill_positions(&self, time: Duration) -> Option<usize> {
        let rate = self.prefill_rate.get();
        (rate > 0).then_some((rate as f64 * time.as_secs_f64()) as usize)
    }

    /// A copy of all values.
    pub(crate) fn snapshot(
        &self,
        queued_tokens: usize,
        blocks_total: usize,
        sessions: SessionCounts,
    ) -> EngineStats {
        let numbers = self.request_counts.read();
        let RequestNumbers { requests, finished, finished_length, .. } = numbers;
        let RequestNumbers { canceled, failed, running, waiting, .. } = numbers;
        // Sums are made of the values that are reported. A part that is computed as the difference
        // of two counters would fall when one of them is read before the other is increased.
        let rejected_by_requests = self.rejected_by_requests.get();
        let rejected_by_tokens = self.rejected_by_tokens.get();
        let rejected_by_quota = self.rejected_by_quota.get();
        let preemptions_for_blocks = self.preemptions_for_blocks.get();
        let preemptions_stalled = self.preemptions_stalled.get();
        let preemptions_for_share = self.preemptions_for_share.get();
        let preemptions_for_priority = self.preemptions_for_priority.get();
        EngineStats {
            requests,
            finished,
            finished_length,
            canceled,
            failed,
            rejected: rejected_by_requests + rejected_by_tokens + rejected_by_quota,
            rejected_by_tokens,
            rejected_by_quota,
            requests_started: self.requests_started.get(),
            requests_hit: self.requests_hit.get(),
            prompt_tokens: self.prompt_tokens.get(),
            cached_tokens: self.cached_tokens.get(),
            first_tokens_from_cache: self.first_tokens_from_cache.get(),
            completion_tokens: self.completion_tokens.get(),
            computed_tokens: self.computed_tokens.get(),
            background_finished: self.background_finished.get(),
            background_dropped: self.background_dropped.get(),
            background_tokens: self.background_tokens.get(),
            drafts: self.drafts.get(),
            drafted_tokens: self.drafted_tokens.get(),
            accepted_tokens: self.accepted_tokens.get(),
            model_drafts: self.model_drafts.get(),
            model_drafted_tokens: self.model_drafted_tokens.get(),
            model_accepted_tokens: self.model_accepted_tokens.get(),
            model_computed_tokens: self.model_computed_tokens.get(),
            loaded_tokens: self.loaded_tokens.get(),
            loads_failed: self.loads_failed.get(),
            saved_blocks: self.saved_blocks.get(),
            prefill_rate: self.prefill_rate.get(),
            steps: self.steps.get(),
            steps_failed: self.steps_failed.get(),
            preemptions: preemptions_for_blocks
                + preemptions_stalled
                + preemptions_for_share
                + preemptions_for_priority,
            preemptions_stalled,
            preemptions_for_share,
            preemptions_for_priority,
            evictions: self.evictions.get(),
            evictions_for_quota: self.evictions_for_quota.get(),
            evictions_requested: self.evictions_requested.get(),
            sessions: sessions.open,
            session_turns: sessions.turns,
            sessions_expired: sessions.expired,
            sessions_displaced: sessions.displaced,
            session_holds_lost: sessions.holds_lost,
            restarts: self.restarts.get(),
            follows: self.follows.get(),
            checkpoints: self.checkpoints.get(),
            recomputed_tokens: self.recomputed_tokens.get(),
            images_encoded: self.images_encoded.get(),
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

    /// Updates a speed per second, smoothed over measurements, after `positions` were computed in
    /// `time`, which is above 0. Only the scheduler may call it, because it reads before it writes.
    fn set_rate(&self, positions: usize, time: Duration) {
        let now = positions as f64 / time.as_secs_f64();
        let rate = match self.get() {
            0 => now,
            before => 0.7 * before as f64 + 0.3 * now,
        };
        self.set((rate as usize).max(1));
    }

    /// Sets the gauge to `n` if its value is smaller.
    pub(crate) fn raise(&self, n: usize) {
        self.0.fetch_max(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}
