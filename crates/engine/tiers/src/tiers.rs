//! [`Tiers`]: the tiers of an engine besides the KV pool. Computed KV is stored on disk, and stored
//! KV is read while a request waits to be submitted or admitted. Behind the disk there may be an
//! object store.
//!
//! Storing (`store.rs`): the scheduler offers what it has added to the prefix tree, or what was
//! evicted from it, and copies blocks out of the pool if the [`WritePolicy`] selects them and they
//! are not on the disk yet. A thread of its own writes it.
//!
//! Loading (`fetch.rs`): before a request is submitted, and if it loses its cached prefix while it
//! waits, the engine asks for stored KV of its prompt, beyond what is in the pool.
//! [`plan()`](crate::plan()) decides what is read, and how long the request waits for it. Records
//! that were fetched from the object store are on the disk afterward.

mod fetch;
mod store;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use stolon_kvcache::{
    BlockHasher, CacheSnapshot, EventReceiver, EvictionOrder, EvictionPolicy, Namespace, TokenSpan,
    TokenSpanInterner,
};

use crate::disk::DiskTier;
use crate::disk_stats::DiskStats;
use crate::error::TierError;
use crate::load::Loads;
use crate::object_stats::ObjectStats;
use crate::place::Place;
use crate::policy::{PrefetchPolicy, WritePolicy};
use crate::record::RecordShape;
use crate::tier::{RemoteTier, Tier};
use crate::tokens::NamedTokens;
use crate::uses::Uses;
use crate::writer::DiskWriter;

/// Where KV is stored besides the pool.
#[derive(Debug)]
pub struct TierSettings {
    /// The directory of the disk tier.
    pub directory: PathBuf,
    /// Its maximum size in bytes.
    pub budget_bytes: u64,
    /// The order in which records are removed from it.
    pub eviction: Box<dyn EvictionOrder>,
    /// Maximum memory in bytes for KV that was read and is not in the pool yet.
    pub read_memory: usize,
    /// URL of the object store behind it.
    pub object_store: Option<String>,
}

/// The tiers of an engine. Nothing is stored or read before [`Tiers::open`].
#[derive(Debug)]
pub struct Tiers {
    /// Set when the backend is known.
    open: OnceLock<Open>,
    write: WritePolicy,
    prefetch: PrefetchPolicy,
    /// The number of requests that have begun with each record, if the write policy needs it.
    uses: Mutex<Uses>,
}

/// The disk tier, and the object store behind it.
#[derive(Clone, Debug)]
struct Open {
    disk: Arc<DiskTier>,
    writer: DiskWriter,
    loads: Arc<Loads>,
    /// The object store.
    remote: Option<Arc<dyn RemoteTier>>,
    /// Knows the images of prompts.
    interner: Arc<TokenSpanInterner>,
}

/// The records of a prompt that are stored.
#[derive(Debug)]
struct Found {
    /// The records of the prompt: the stored ones, and perhaps more after them.
    places: Vec<Place>,
    /// Number of leading records that are on the disk.
    on_disk: usize,
    /// Number of leading records that are there or, after these, in the object store. Their end is
    /// not inside an image.
    stored: usize,
}

/// The number of tokens of a prompt that each tier has. Each number counts from the start of the
/// prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierMatch {
    /// Tokens whose KV is in the pool.
    pub pool: usize,
    /// Tokens whose KV is on the disk.
    pub disk: usize,
    /// Tokens whose KV is on the disk or, after these, as far as is known, in the object store; 0
    /// without an object store.
    pub object_store: usize,
}

impl TierMatch {
    /// A prompt with `tokens` tokens in the pool, and nothing elsewhere.
    #[must_use]
    pub fn pool(tokens: usize) -> TierMatch {
        TierMatch { pool: tokens, disk: 0, object_store: 0 }
    }
}

impl Tiers {
    /// Tiers with these policies.
    #[must_use]
    pub fn new(write: WritePolicy, prefetch: PrefetchPolicy) -> Tiers {
        Tiers { open: OnceLock::new(), write, prefetch, uses: Mutex::default() }
    }

    /// Opens the directory, and the object store behind it, for KV of this format. The images of
    /// prompts are numbered by `interner`. Blocks. With an object store, it must be called on a
    /// thread of a tokio runtime, which the tiers use from then on.
    ///
    /// # Errors
    /// [`TierError::Disk`], [`TierError::ObjectStore`], and [`TierError::File`] if the thread that
    /// writes cannot be started.
    pub fn open(
        &self,
        settings: TierSettings,
        shape: RecordShape,
        interner: Arc<TokenSpanInterner>,
    ) -> Result<(), TierError> {
        let TierSettings { directory, budget_bytes, eviction, read_memory, object_store } =
            settings;
        let disk = DiskTier::open(&directory, budget_bytes, shape, eviction);
        let disk = Arc::new(disk.map_err(|error| TierError::Disk(Arc::new(error)))?);
        let remote = object_store.map(|url| open_remote(&url, Arc::clone(&disk))).transpose();
        let remote = remote.map_err(|error| TierError::ObjectStore(Arc::new(error)))?;
        let uploads = remote.clone();
        let on_written = move |keys: Vec<_>| uploads.iter().for_each(|remote| remote.offer(&keys));
        let writer = DiskWriter::start(Arc::clone(&disk), on_written)
            .map_err(|error| TierError::file(&directory, error))?;
        let stats = disk.stats();
        tracing::info!(
            directory = %directory.display(),
            records = stats.records,
            bytes = stats.bytes,
            budget_bytes = stats.budget_bytes,
            read_memory,
            "KV is stored on disk"
        );
        // It is opened once.
        let loads = Arc::new(Loads::new(read_memory));
        let _ = self.open.set(Open { disk, writer, loads, remote, interner });
        Ok(())
    }

    /// When KV is stored.
    pub fn write_policy(&self) -> WritePolicy {
        self.write
    }

    /// The key of namespaces of the directory.
    pub fn namespace_key(&self) -> Option<[u8; 32]> {
        Some(self.open.get()?.disk.namespace_key())
    }

    /// How much of a prompt is in each tier, `pool` tokens of it in the pool. Does no I/O.
    pub fn query(&self, pool: usize, namespace: &Namespace, tokens: Arc<Vec<u32>>) -> TierMatch {
        let Some(open) = self.open.get() else { return TierMatch::pool(pool) };
        let found = open.find(namespace, &NamedTokens::new(tokens, &open.interner), 0);
        let end = |records: usize| match records.checked_sub(1) {
            Some(last) => found.places[last].end(),
            None => 0,
        };
        let object_store = if open.remote.is_some() { end(found.stored) } else { 0 };
        TierMatch { pool, disk: end(found.on_disk), object_store }
    }

    /// Changes the order in which records are removed from the disk.
    pub fn set_eviction_policy(&self, policy: EvictionPolicy) {
        if let Some(open) = self.open.get() {
            open.disk.set_eviction_order(policy.order());
        }
    }

    /// Statistics of the disk tier.
    pub fn disk_stats(&self) -> Option<DiskStats> {
        Some(self.open.get()?.disk.stats())
    }

    /// Statistics of the object tier; `None` if there is none.
    pub fn object_stats(&self) -> Option<ObjectStats> {
        Some(self.open.get()?.remote.as_ref()?.stats())
    }

    /// The content of the disk tier, and its changes from now on: [`DiskTier::events`]. `None`
    /// before the tiers were opened.
    pub fn disk_events(
        &self,
        hasher: BlockHasher,
        capacity: usize,
    ) -> Option<(CacheSnapshot, EventReceiver)> {
        Some(self.open.get()?.disk.events(hasher, capacity))
    }

    /// Removes everything from the disk. Blocks.
    pub fn clear(&self) {
        if let Some(open) = self.open.get() {
            open.disk.clear();
        }
    }

    /// Waits until everything that was claimed before was written, and uploaded, or given up.
    /// Blocks.
    pub fn flush(&self) {
        self.flush_disk();
        let remote = self.open.get().and_then(|open| open.remote.as_ref());
        remote.iter().for_each(|remote| remote.flush());
    }

    /// Waits until everything that was claimed before was written, or given up. Blocks.
    pub fn flush_disk(&self) {
        self.open.get().iter().for_each(|open| open.writer.flush());
    }

    /// Unlocks the directory, so that another engine can open it. Nothing is read or written any
    /// longer. Blocks.
    pub fn close(&self) {
        if let Some(open) = self.open.get() {
            open.disk.close();
        }
    }
}

impl Open {
    /// The stored records of a prompt. Its first `cached` positions are in the pool and count as
    /// stored.
    fn find(&self, namespace: &Namespace, tokens: &NamedTokens, cached: usize) -> Found {
        let shape = self.disk.shape();
        let record = shape.record_positions();
        let mut places: Vec<Place> = shape.places(namespace, tokens).collect();
        let (on_disk, mut stored) = self.stored(cached / record, &places);
        let is_whole = |end: usize| TokenSpan::may_end_after(tokens.tokens()[end - 1]);
        while stored <= places.len() {
            let before = stored.checked_sub(1).map(|last| places[last]);
            let parent = before.map_or_else(|| shape.root(namespace), |place| place.key);
            let mut tails = shape.tails(parent, stored * record, tokens);
            let on_disk = on_disk.min(stored);
            let tail = tails.find(|tail| tail.end() > cached && self.stored(0, &[*tail]).1 > 0);
            if let Some(tail) = tail {
                let is_on_disk = on_disk == stored && self.disk.contains(&tail.key);
                places.truncate(stored);
                places.push(tail);
                let on_disk = on_disk + usize::from(is_on_disk);
                return Found { places, on_disk, stored: stored + 1 };
            }
            if before.is_none_or(|place| is_whole(place.end())) {
                return Found { places, on_disk, stored };
            }
            stored -= 1;
        }
        Found { on_disk: on_disk.min(stored), places, stored }
    }

    /// Number of leading records that are on the disk, and that are there or, after these, in the
    /// object store. The first `skipped` count as stored.
    fn stored(&self, skipped: usize, places: &[Place]) -> (usize, usize) {
        let count = |from: usize, tier: &dyn Tier| {
            let places = places.iter().skip(from);
            from + places.take_while(|place| tier.contains(&place.key)).count()
        };
        let on_disk = count(skipped, &*self.disk);
        let stored = self.remote.as_ref().map_or(on_disk, |remote| count(on_disk, &**remote));
        (on_disk, stored)
    }
}

#[cfg(feature = "object-store")]
use crate::remote::open as open_remote;

/// Object stores need the feature `object-store`.
#[cfg(not(feature = "object-store"))]
fn open_remote(
    url: &str,
    _: Arc<DiskTier>,
) -> Result<Arc<dyn RemoteTier>, crate::object_error::ObjectError> {
    Err(crate::object_error::ObjectError::Unsupported(url.to_owned()))
}
