//! [`Tier`] and [`RemoteTier`]: the interfaces of the places where records are stored.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use stolon_kvcache::Namespace;

use crate::key::ChainKey;
use crate::object_stats::ObjectStats;
use crate::place::Place;
use crate::tokens::NamedTokens;

/// A place where records are stored.
pub trait Tier: fmt::Debug + Send + Sync {
    /// Whether it has a record, as far as is known, and can be read now. Does no I/O.
    fn contains(&self, key: &ChainKey) -> bool;

    /// The time that reading one record takes, by the speed of recent reads.
    fn record_time(&self) -> Duration;

    /// Whether the caller should read something only to measure the speed. True for at most one
    /// caller every 30 seconds, and for none while there are other reads.
    fn speed_is_due(&self) -> bool;

    /// Reads consecutive records of a prompt and verifies them. Returns the bytes of each block, up
    /// to the first record that is missing or wrong. Blocks.
    fn read(&self, namespace: &Namespace, tokens: &NamedTokens, places: &[Place]) -> Vec<Bytes>;
}

/// A tier behind the disk, which several engines share.
pub trait RemoteTier: Tier {
    /// Whether it may have a record that it is not known to have, because another engine can have
    /// stored it a short time ago, and can be asked now. Does no I/O.
    fn may_contain(&self, key: &ChainKey) -> bool;

    /// The time until it says that it does not have a record, by recent answers.
    fn look_time(&self) -> Duration;

    /// Reads consecutive records that it may have, as [`Tier::read`] does. It is asked for the first
    /// one alone, and has `limit` for its answer. Blocks.
    fn look(
        &self,
        namespace: &Namespace,
        tokens: &NamedTokens,
        places: &[Place],
        limit: Duration,
    ) -> Vec<Bytes>;

    /// Offers records that were written to the disk. Does not block.
    fn offer(&self, keys: &[ChainKey]);

    /// Waits until all records that were offered before were stored or given up, for a limited
    /// time. Blocks.
    fn flush(&self);

    /// Counters, and the number of records that the tier is known to have.
    fn stats(&self) -> ObjectStats;
}
