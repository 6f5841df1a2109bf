//! Statistics of an object tier.

use serde::{Deserialize, Serialize};

/// Counters since an object tier was opened, and the number of records that the store is known to
/// have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ObjectStats {
    /// Records of this KV format that the store had when it was listed last, and those stored
    /// since.
    pub records: u64,
    /// Records that were fetched.
    pub records_fetched: u64,
    /// Times that a record was looked for which the store was not known to have.
    pub looks: u64,
    /// Number of `looks` for which the store had the record, and sent it in time.
    pub looks_found: u64,
    /// Bytes that were fetched.
    pub fetched_bytes: u64,
    /// Records that were stored.
    pub records_stored: u64,
    /// Bytes that were stored.
    pub stored_bytes: u64,
    /// Records that were refused after they were fetched: damaged, or of another key.
    pub records_refused: u64,
    /// Requests to the store that failed.
    pub failures: u64,
    /// Records that were not stored because too many were waiting, or because the store had failed
    /// a short time before.
    pub writes_skipped: u64,
}
