//! What a disk tier counts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;

/// Counters since a disk tier was opened, and what it stores now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DiskStats {
    /// Records that are stored.
    pub records: u64,
    /// Their size in bytes.
    pub bytes: u64,
    /// Maximum size in bytes.
    pub budget_bytes: u64,
    /// Prompt positions that were read.
    pub read_tokens: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Time of all reads, with verification, in microseconds.
    pub read_micros: u64,
    /// Records that were refused when they were read: missing, damaged, or of another key.
    pub records_refused: u64,
    /// Records that were written.
    pub records_written: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
    /// Writes that failed.
    pub writes_failed: u64,
    /// Records that were not written because a write had failed a short time before, or because
    /// too much was waiting to be written.
    pub writes_skipped: u64,
    /// Records that were removed to keep the budget.
    pub records_evicted: u64,
}

/// The live counters. They guard no other memory, so all accesses are relaxed.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    read_tokens: AtomicU64,
    read_bytes: AtomicU64,
    read_micros: AtomicU64,
    refused: AtomicU64,
    written: AtomicU64,
    written_bytes: AtomicU64,
    failed: AtomicU64,
    skipped: AtomicU64,
    evicted: AtomicU64,
}

impl Counters {
    pub(crate) fn read(&self, bytes: u64, tokens: usize, time: Duration) {
        add(&self.read_bytes, bytes);
        add(&self.read_tokens, tokens as u64);
        add(&self.read_micros, u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    pub(crate) fn refused(&self) {
        add(&self.refused, 1);
    }

    pub(crate) fn wrote(&self, bytes: u64) {
        add(&self.written, 1);
        add(&self.written_bytes, bytes);
    }

    pub(crate) fn write_failed(&self) {
        add(&self.failed, 1);
    }

    pub(crate) fn skipped(&self, records: u64) {
        add(&self.skipped, records);
    }

    pub(crate) fn evicted(&self) {
        add(&self.evicted, 1);
    }

    pub(crate) fn stats(&self, records: u64, bytes: u64, budget_bytes: u64) -> DiskStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DiskStats {
            records,
            bytes,
            budget_bytes,
            read_tokens: get(&self.read_tokens),
            read_bytes: get(&self.read_bytes),
            read_micros: get(&self.read_micros),
            records_refused: get(&self.refused),
            records_written: get(&self.written),
            written_bytes: get(&self.written_bytes),
            writes_failed: get(&self.failed),
            writes_skipped: get(&self.skipped),
            records_evicted: get(&self.evicted),
        }
    }
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}
