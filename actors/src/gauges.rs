//! Counts and gauges of the core, written by the actors and read by anybody without waiting.
//!
//! Every value stands for itself and guards no other memory, so all accesses are relaxed.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The live numbers.
#[derive(Debug, Default)]
pub(crate) struct Gauges {
    pub(crate) requests: Counter,
    pub(crate) finished: Counter,
    pub(crate) cancelled: Counter,
    pub(crate) failed: Counter,
    pub(crate) rejected: Counter,
    pub(crate) started: Counter,
    pub(crate) hits: Counter,
    pub(crate) prompt_tokens: Counter,
    pub(crate) cached_tokens: Counter,
    pub(crate) completion_tokens: Counter,
    pub(crate) computed_tokens: Counter,
    pub(crate) steps: Counter,
    pub(crate) preemptions: Counter,
    pub(crate) evictions: Counter,
    pub(crate) restarts: Counter,
    pub(crate) follows: Counter,
    pub(crate) first_tokens_kept: Counter,
    pub(crate) most_overtaken: Gauge,
    pub(crate) running: Gauge,
    /// Preempted sequences that wait to run again; they passed the door long ago.
    pub(crate) preempted: Gauge,
    pub(crate) blocks_free: Gauge,
    pub(crate) blocks_reserved: Gauge,
    pub(crate) blocks_cached: Gauge,
    pub(crate) blocks_evictable: Gauge,
}

/// A number that only grows.
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

/// A number that comes and goes.
#[derive(Debug, Default)]
pub(crate) struct Gauge(AtomicUsize);

impl Gauge {
    pub(crate) fn set(&self, n: usize) {
        self.0.store(n, Ordering::Relaxed);
    }

    /// Sets it to `n` if it is less.
    pub(crate) fn raise(&self, n: usize) {
        self.0.fetch_max(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// Counts since the core started, and gauges of this moment; those of one instant may be a step
/// apart from each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoreStats {
    /// Requests let through the door.
    pub requests: u64,
    /// Requests that ended well.
    pub finished: u64,
    /// Requests whose stream was dropped before its end.
    pub cancelled: u64,
    /// Requests that ended with an error after they were let in.
    pub failed: u64,
    /// Requests turned away because too much was waiting.
    pub rejected: u64,
    /// Requests that began to run; a preempted one counts once.
    pub started: u64,
    /// Started requests that found some of their prompt cached.
    pub hits: u64,
    /// Prompt tokens of started requests.
    pub prompt_tokens: u64,
    /// Those of them that were cached.
    pub cached_tokens: u64,
    /// Requests whose first token came from a kept row of logits, without a forward pass.
    pub first_tokens_kept: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Positions computed, those after a preemption included.
    pub computed_tokens: u64,
    /// Forward passes.
    pub steps: u64,
    /// Running sequences that had to give up their blocks.
    pub preemptions: u64,
    /// Blocks taken from the cache for other use.
    pub evictions: u64,
    /// Times the core started again after a failure.
    pub restarts: u64,
    /// Times a waiting request waited for a running one's blocks instead of computing its own.
    pub follows: u64,
    /// Uncached prompt tokens of later requests that were admitted before an earlier one, at most.
    pub most_overtaken_tokens: usize,
    /// Requests running.
    pub running: usize,
    /// Requests waiting.
    pub waiting: usize,
    /// Blocks there are.
    pub blocks_total: usize,
    /// Blocks nobody uses.
    pub blocks_free: usize,
    /// Blocks private to running sequences.
    pub blocks_reserved: usize,
    /// Blocks the prefix tree owns.
    pub blocks_cached: usize,
    /// Those of them that nobody holds.
    pub blocks_evictable: usize,
}

impl Gauges {
    /// `waiting` is the count at the door.
    pub(crate) fn snapshot(&self, waiting: usize, blocks_total: usize) -> CoreStats {
        CoreStats {
            requests: self.requests.get(),
            finished: self.finished.get(),
            cancelled: self.cancelled.get(),
            failed: self.failed.get(),
            rejected: self.rejected.get(),
            started: self.started.get(),
            hits: self.hits.get(),
            prompt_tokens: self.prompt_tokens.get(),
            cached_tokens: self.cached_tokens.get(),
            first_tokens_kept: self.first_tokens_kept.get(),
            completion_tokens: self.completion_tokens.get(),
            computed_tokens: self.computed_tokens.get(),
            steps: self.steps.get(),
            preemptions: self.preemptions.get(),
            evictions: self.evictions.get(),
            restarts: self.restarts.get(),
            follows: self.follows.get(),
            most_overtaken_tokens: self.most_overtaken.get(),
            running: self.running.get(),
            waiting: waiting + self.preempted.get(),
            blocks_total,
            blocks_free: self.blocks_free.get(),
            blocks_reserved: self.blocks_reserved.get(),
            blocks_cached: self.blocks_cached.get(),
            blocks_evictable: self.blocks_evictable.get(),
        }
    }
}
