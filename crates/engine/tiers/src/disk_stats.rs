//! Statistics of a disk tier.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::shared::Counter;

/// Counters since a disk tier was opened, and the current content of the tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
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

/// The live counters.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    read_tokens: Counter,
    read_bytes: Counter,
    read_micros: Counter,
    refused: Counter,
    written: Counter,
    written_bytes: Counter,
    failed: Counter,
    skipped: Counter,
    evicted: Counter,
}

impl Counters {
    pub(crate) fn read(&self, bytes: u64, tokens: usize, time: Duration) {
        self.read_bytes.add(bytes);
        self.read_tokens.add(tokens as u64);
        self.read_micros.add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    pub(crate) fn refused(&self) {
        self.refused.add(1);
    }

    pub(crate) fn wrote(&self, bytes: u64) {
        self.written.add(1);
        self.written_bytes.add(bytes);
    }

    pub(crate) fn write_failed(&self) {
        self.failed.add(1);
    }

    pub(crate) fn skipped(&self, records: u64) {
        self.skipped.add(records);
    }

    pub(crate) fn evicted(&self) {
        self.evicted.add(1);
    }

    pub(crate) fn stats(&self, records: u64, bytes: u64, budget_bytes: u64) -> DiskStats {
        DiskStats {
            records,
            bytes,
            budget_bytes,
            read_tokens: self.read_tokens.get(),
            read_bytes: self.read_bytes.get(),
            read_micros: self.read_micros.get(),
            records_refused: self.refused.get(),
            records_written: self.written.get(),
            written_bytes: self.written_bytes.get(),
            writes_failed: self.failed.get(),
            writes_skipped: self.skipped.get(),
            records_evicted: self.evicted.get(),
        }
    }
}
