//! Reading from a disk tier.

use std::io::Read;
use std::num::NonZero;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use stolon_kvcache::Namespace;

use super::DiskTier;
use crate::files::{self, Links};
use crate::key::ChainKey;
use crate::place::Place;
use crate::record::Record;
use crate::tier::Tier;
use crate::tokens::NamedTokens;

/// Maximum number of threads that read one prompt.
const READ_THREADS_MAX: usize = 4;

impl Tier for DiskTier {
    fn contains(&self, key: &ChainKey) -> bool {
        self.index().contains(key)
    }

    fn record_time(&self) -> Duration {
        self.speed.time_of(self.shape.full_record_bytes())
    }

    fn speed_is_due(&self) -> bool {
        self.speed.is_due()
    }

    /// Wrong records are removed. Uses a few threads, because verifying takes as long as reading.
    fn read(&self, namespace: &Namespace, tokens: &NamedTokens, places: &[Place]) -> Vec<Bytes> {
        let begun = Instant::now();
        let mut records = self.read_records(namespace, tokens, places);
        let complete = records.iter().take_while(|record| record.is_some()).count();
        // If the whole directory is gone, the records after the first missing one are gone too.
        // While they are in the index, they are not written again.
        for place in &places[complete..] {
            if !self.directory.record(&place.key).exists() {
                self.index().remove(&place.key);
            }
        }
        self.announce(namespace, tokens, places[..complete].iter());
        let time = begun.elapsed();
        let read = records.drain(..complete).flatten();
        let (mut blocks, mut bytes) = (Vec::new(), 0);
        for record in read {
            bytes += record.header.record_bytes as u64;
            blocks.extend(record.blocks);
        }
        if bytes > 0 {
            self.counters.read(bytes, blocks.len() * self.shape.block_size, time);
            self.speed.note(bytes, time);
        }
        blocks
    }
}

impl DiskTier {
    /// Reads records in parallel, up to the first one that is missing or wrong. The results have
    /// the order of `places`.
    fn read_records(
        &self,
        namespace: &Namespace,
        tokens: &NamedTokens,
        places: &[Place],
    ) -> Vec<Option<Record>> {
        let records: Vec<OnceLock<Record>> = places.iter().map(|_| OnceLock::new()).collect();
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = || {
            while !failed.load(Ordering::Relaxed) {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(place) = places.get(index) else { return };
                match self.read_record(namespace, tokens, place) {
                    // Each index is read once.
                    Some(record) => drop(records[index].set(record)),
                    None => failed.store(true, Ordering::Relaxed),
                }
            }
        };
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let threads = places.len().min(cores).min(READ_THREADS_MAX);
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // If no thread can be started, this one reads everything.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        records.into_iter().map(OnceLock::into_inner).collect()
    }

    /// Reads and verifies one record. If that fails although the index has the record, the failure
    /// is counted and logged, and the record is removed.
    fn read_record(
        &self,
        namespace: &Namespace,
        tokens: &NamedTokens,
        place: &Place,
    ) -> Option<Record> {
        if !self.index().contains(&place.key) {
            return None;
        }
        let path = self.directory.record(&place.key);
        let expected = place.bytes(&self.shape);
        let read = || -> Result<Record, String> {
            let file = files::open(&path, Links::Refuse).map_err(|error| error.to_string())?;
            let size = file.metadata().map_err(|error| error.to_string())?.len();
            if size != expected as u64 {
                return Err(format!("expected {expected} bytes, got {size}"));
            }
            let mut bytes = Vec::with_capacity(expected);
            let limited = file.take(expected as u64 + 1).read_to_end(&mut bytes);
            limited.map_err(|error| error.to_string())?;
            place.verify(&self.shape, namespace, tokens, &bytes.into())
        };
        match read() {
            Ok(record) => Some(record),
            Err(reason) => {
                self.counters.refused();
                tracing::warn!(path = %path.display(), reason, "stored KV cannot be used");
                self.remove(&place.key);
                None
            }
        }
    }
}
