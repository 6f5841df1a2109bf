//! The tiers of an engine besides the pool: what is computed is stored on disk, and stored KV is
//! read while a request waits to be submitted. Behind the disk there may be an object store
//! ([`super::objects`]).
//!
//! Storing ([`super::store`]): the scheduler offers what it has added to the prefix tree, or what
//! was evicted from it, copies what the [`WritePolicy`] wants and is not on the disk yet out of the
//! pool, and a thread of its own writes it.
//!
//! Loading: before a request is submitted, [`Tiers::load`] looks up how much of its prompt is on
//! the disk, and then in the object store, beyond what is in the pool. If reading that is expected
//! to be faster than computing it, it is read and verified, and the request is submitted with the
//! result. What takes much longer than expected is not waited for; [`PrefetchPolicy`] changes both.
//! What was fetched from the object store is on the disk afterwards.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::Shared;
use stolon_actors::EngineHandle;
use stolon_kvcache::{EvictionOrder, Namespace};
use stolon_scheduler::StoredKv;
use stolon_tiers::{ChainKey, DiskTier, DiskWriter, KvShape, Place};
use tokio::sync::{Semaphore, oneshot};

use super::Engine;
use super::objects::Objects;
use super::tier_policy::{PrefetchPolicy, Uses, WritePolicy};
use crate::Error;

/// Maximum memory of KV that was read and is not in the pool yet, in units of [`UNIT_BYTES`]. Of
/// prompts that need more, the beginning is read; while all of it is used, prompts are computed.
const MEMORY_UNITS: usize = 1024;
const UNIT_BYTES: usize = 1 << 20;
/// A load must be expected to take at most this share of the time of computing.
const WORTH_SHARE: f64 = 0.8;
/// A load is waited for this many times as long as expected and [`GRACE`] longer, or this share of
/// the time of computing if that is longer: where computing takes seconds, a load that is late
/// because the cores are busy is still worth it.
const PATIENCE: u32 = 2;
const GRACE: Duration = Duration::from_millis(20);
const PATIENCE_SHARE: f64 = 0.5;
/// Number of records that are read in the background to measure the speed.
const MEASURED_RECORDS: usize = 4;
/// How long a load is waited for at most while the speed of computing is not known.
const UNMEASURED_LIMIT: Duration = Duration::from_secs(10);

/// Where KV is stored besides the pool.
#[derive(Debug)]
pub(crate) struct DiskSettings {
    pub(crate) directory: PathBuf,
    pub(crate) budget_bytes: u64,
    pub(crate) eviction: Box<dyn EvictionOrder>,
    /// URL of the object store behind it.
    pub(crate) object_store: Option<String>,
}

/// A read that several requests may wait for.
type Load = Shared<oneshot::Receiver<Option<StoredKv>>>;

/// The tiers of an engine.
#[derive(Debug)]
pub(crate) struct Tiers {
    /// Set when the backend is known. Nothing is stored or loaded before.
    pub(super) disk: OnceLock<Disk>,
    /// Reads in progress, by the end of what is read and the position where it begins.
    loads: Mutex<HashMap<(ChainKey, usize), Load>>,
    memory: Arc<Semaphore>,
    pub(super) write: WritePolicy,
    prefetch: PrefetchPolicy,
    /// What requests have begun with, if the write policy asks for it.
    pub(super) uses: Mutex<Uses>,
}

/// A disk tier, and what is behind it.
#[derive(Debug)]
pub(super) struct Disk {
    pub(super) tier: Arc<DiskTier>,
    pub(super) writer: DiskWriter,
    /// The object store.
    pub(super) objects: Option<Arc<Objects>>,
}

/// A prompt, and what is known of it before anything is read.
#[derive(Debug)]
pub(super) struct Lookup {
    pub(super) namespace: Namespace,
    pub(super) tokens: Arc<Vec<u32>>,
    /// Its full records, stored or not.
    pub(super) places: Vec<Place>,
    /// Number of leading tokens whose KV is in the pool.
    pub(super) cached: usize,
    /// The request's priority.
    pub(super) priority: i32,
}

/// What of a prompt is read, and how long it is waited for.
#[derive(Debug)]
struct Plan {
    /// The first position that is read: the beginning of a record.
    start: usize,
    /// The prompt's records on the disk, from its start on.
    disk: Vec<Place>,
    /// The records in the object store that follow.
    objects: Vec<Place>,
    limit: Duration,
}

/// How much of a prompt is where. Each number counts from the start of the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierMatch {
    /// Tokens whose KV is in the pool: [`Engine::query_match_len`].
    pub pool: usize,
    /// Tokens whose KV is on the disk.
    pub disk: usize,
    /// Tokens whose KV is on the disk or, as far as is known, in the object store.
    pub object_store: usize,
}

impl Tiers {
    pub(crate) fn new(write: WritePolicy, prefetch: PrefetchPolicy) -> Arc<Tiers> {
        Arc::new(Tiers {
            disk: OnceLock::new(),
            loads: Mutex::default(),
            memory: Arc::new(Semaphore::new(MEMORY_UNITS)),
            write,
            prefetch,
            uses: Mutex::default(),
        })
    }

    /// Opens the directory, and the object store behind it.
    pub(super) async fn open(
        &self,
        engine: &Engine,
        settings: DiskSettings,
        shape: KvShape,
    ) -> Result<(), Error> {
        let DiskSettings { directory, budget_bytes, eviction, object_store } = settings;
        let path = directory.clone();
        let open = move || DiskTier::open(&path, budget_bytes, shape, eviction);
        let opened = engine.blocking(open).await?;
        let tier = Arc::new(opened.map_err(|error| Error::Disk(Arc::new(error)))?);
        let objects = match object_store {
            Some(url) => {
                let opened = Objects::open(url, Arc::clone(&tier));
                let opened = engine.inner.handle.runtime().spawn(opened).await;
                Some(Arc::new(opened.map_err(|_| stolon_scheduler::EngineError::Stopped)??))
            }
            None => None,
        };
        let uploads = objects.clone();
        let on_written =
            move |keys: Vec<_>| uploads.iter().for_each(|objects| objects.offer(&keys));
        let writer = DiskWriter::start(Arc::clone(&tier), on_written);
        let writer = writer
            .map_err(|error| Error::File { path: directory.clone(), error: Arc::new(error) })?;
        let stats = tier.stats();
        tracing::info!(
            directory = %directory.display(),
            records = stats.records,
            bytes = stats.bytes,
            budget_bytes = stats.budget_bytes,
            "KV is stored on disk"
        );
        // It is opened once.
        let _ = self.disk.set(Disk { tier, writer, objects });
        Ok(())
    }

    /// The key of namespaces of the directory.
    pub(super) fn namespace_key(&self) -> Option<[u8; 32]> {
        Some(self.disk.get()?.tier.namespace_key())
    }

    /// Stored KV of a prompt, if reading it is worth it.
    pub(crate) async fn load(
        self: &Arc<Self>,
        handle: &EngineHandle,
        namespace: Namespace,
        tokens: &Arc<Vec<u32>>,
        priority: i32,
    ) -> Option<StoredKv> {
        let disk = self.disk.get()?;
        // Nothing is read for a request that is going to be refused.
        let cached = handle.query_match_len(&namespace, tokens);
        if handle.queue_is_full(tokens.len() - cached) {
            return None;
        }
        let places = disk.tier.places(&namespace, tokens).collect();
        let lookup = Lookup { namespace, tokens: Arc::clone(tokens), places, cached, priority };
        self.note_use(disk, handle, &lookup);
        let room = self.memory.available_permits() * UNIT_BYTES;
        let plan = disk.plan(handle, self.prefetch, &lookup, room)?;
        let limit = plan.limit;
        let load = self.begin(handle, &lookup, plan)?;
        // The timer needs the engine's runtime; the caller may have another one.
        let wait = async move { tokio::time::timeout(limit, load).await };
        let loaded = handle.runtime().spawn(wait).await.ok()?;
        if loaded.is_err() {
            tracing::debug!(?limit, "stored KV was not read in time; it is computed");
        }
        loaded.ok()?.ok()?
    }

    /// Begins to read a part of a prompt, or joins a read that has begun. `None` if there is no
    /// memory for it now.
    fn begin(self: &Arc<Self>, handle: &EngineHandle, lookup: &Lookup, plan: Plan) -> Option<Load> {
        let tier = &self.disk.get()?.tier;
        let (start, last) = (plan.start, *plan.objects.last().or(plan.disk.last())?);
        let end = last.first + tier.shape().record_positions();
        let key = (last.key, start);
        let mut loads = self.loads();
        if let Some(load) = loads.get(&key) {
            return Some(load.clone());
        }
        let bytes = tier.shape().record_bytes(end - start).unwrap_or(usize::MAX);
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX);
        let permit = Arc::clone(&self.memory).try_acquire_many_owned(units).ok()?;
        let (sender, receiver) = oneshot::channel();
        let load = receiver.shared();
        loads.insert(key, load.clone());
        drop(loads);
        let (namespace, priority) = (lookup.namespace, lookup.priority);
        let (tiers, tokens) = (Arc::clone(self), Arc::clone(&lookup.tokens));
        let (tier, used) = (Arc::clone(tier), plan.disk.clone());
        let block_size = tier.shape().block_size;
        // If the runtime ends, the sender is dropped, and nothing is loaded any more.
        handle.runtime().spawn(async move {
            let blocks = tiers.read(namespace, tokens, plan).await;
            let loaded = (!blocks.is_empty())
                .then(|| StoredKv::new(block_size, start / block_size, blocks).holding(permit));
            tiers.loads().remove(&key);
            // Fails only if all callers have gone.
            let _ = sender.send(loaded);
            // It concerns what is evicted from the disk. Fails only if the runtime ends.
            let _ = tokio::task::spawn_blocking(move || tier.touch(&used, priority)).await;
        });
        Some(load)
    }

    /// Reads blocks, fewer than planned if something cannot be read. What comes from the object
    /// store is written to the disk.
    async fn read(&self, namespace: Namespace, tokens: Arc<Vec<u32>>, plan: Plan) -> Vec<Bytes> {
        let Some(disk) = self.disk.get() else { return Vec::new() };
        let Plan { start, disk: on_disk, objects: places, .. } = plan;
        let record = disk.tier.shape().record_positions();
        let end = on_disk.len() * record;
        let expected = (end - start) / disk.tier.shape().block_size;
        let (tier, own_tokens) = (Arc::clone(&disk.tier), Arc::clone(&tokens));
        let read = move || tier.read(&namespace, &own_tokens, &on_disk, start);
        // Fails only if the runtime ends.
        let mut blocks = match expected {
            0 => Vec::new(),
            _ => tokio::task::spawn_blocking(read).await.unwrap_or_default(),
        };
        if let (Some(objects), Some(last), true) =
            (&disk.objects, places.last(), blocks.len() == expected)
        {
            let claim = disk.writer.claim(namespace, &tokens, 0..last.first + record);
            let fetched = objects.fetch(namespace, tokens, places).await;
            // A claim that begins elsewhere has found other records to be written.
            if let Some(claim) = claim.filter(|claim| claim.positions().start == end) {
                claim.write(fetched.concat());
            }
            blocks.extend(fetched);
        }
        blocks
    }

    pub(super) fn uses(&self) -> MutexGuard<'_, Uses> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn loads(&self) -> MutexGuard<'_, HashMap<(ChainKey, usize), Load>> {
        self.loads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Disk {
    /// What of a prompt is worth to be read, beyond what is in the pool: at most `room` bytes.
    fn plan(
        &self,
        handle: &EngineHandle,
        policy: PrefetchPolicy,
        lookup: &Lookup,
        room: usize,
    ) -> Option<Plan> {
        let matched = lookup.cached;
        let record = self.tier.shape().record_positions();
        let record_bytes = self.tier.shape().record_bytes(record)?;
        let most = match policy {
            PrefetchPolicy::Timeout(most) => most,
            PrefetchPolicy::BestEffort | PrefetchPolicy::WaitComplete => Duration::MAX,
        };
        // Without a whole record beyond what is cached, there is nothing to gain.
        if lookup.places.len() <= matched / record || most.is_zero() {
            return None;
        }
        let start = matched / record * record;
        let count = start / record + room / record_bytes;
        let mut places = lookup.places.iter().copied().take(count).peekable();
        // What is before `start` is not read.
        let stored = |place: &Place| place.first < start || self.tier.contains(&place.key);
        let disk: Vec<Place> = std::iter::from_fn(|| places.next_if(stored)).collect();
        let mut objects: Vec<Place> = match &self.objects {
            Some(objects) => places.take_while(|place| objects.contains(&place.key)).collect(),
            None => Vec::new(),
        };
        loop {
            let end = (disk.len() + objects.len()) * record;
            if end <= matched {
                return None;
            }
            let fetch_time = |source: &Arc<Objects>| source.fetch_time(objects.len());
            let fetch = self.objects.as_ref().map(fetch_time).unwrap_or_default();
            let expected = self.tier.read_time(disk.len() * record - start) + fetch;
            let limit = match handle.prefill_time(end - matched) {
                _ if policy == PrefetchPolicy::WaitComplete => Some(Duration::MAX),
                Some(compute) if expected > compute.mul_f64(WORTH_SHARE) => {
                    tracing::debug!(?expected, ?compute, "stored KV is not worth to be read");
                    None
                }
                Some(compute) => {
                    let patience = expected * PATIENCE + GRACE;
                    Some(patience.max(compute.mul_f64(PATIENCE_SHARE)))
                }
                None => Some(UNMEASURED_LIMIT),
            };
            match limit.map(|limit| limit.min(most)) {
                Some(limit) => return Some(Plan { start, disk, objects, limit }),
                None if objects.is_empty() => {
                    self.measure_disk(handle, lookup, disk, start);
                    return None;
                }
                None => {
                    objects.truncate(MEASURED_RECORDS);
                    self.measure_store(handle, lookup, objects);
                    // The disk alone may be worth it.
                    objects = Vec::new();
                }
            }
        }
    }

    /// Reads some of the records from position `start` on in the background if the speed was not
    /// measured for a while. Otherwise, what was too slow once would not be tried again.
    fn measure_disk(
        &self,
        handle: &EngineHandle,
        lookup: &Lookup,
        mut places: Vec<Place>,
        start: usize,
    ) {
        places.retain(|place| place.first >= start);
        places.truncate(MEASURED_RECORDS);
        if !places.is_empty() && self.tier.speed_is_due() {
            let (tier, tokens) = (Arc::clone(&self.tier), Arc::clone(&lookup.tokens));
            let namespace = lookup.namespace;
            let read = move || drop(tier.read(&namespace, &tokens, &places, start));
            handle.runtime().spawn_blocking(read);
        }
    }

    /// As [`Disk::measure_disk`], for records in the object store.
    fn measure_store(&self, handle: &EngineHandle, lookup: &Lookup, places: Vec<Place>) {
        let Some(objects) = self.objects.clone().filter(|objects| objects.speed_is_due()) else {
            return;
        };
        let (namespace, tokens) = (lookup.namespace, Arc::clone(&lookup.tokens));
        handle.runtime().spawn(async move { drop(objects.fetch(namespace, tokens, places).await) });
    }
}

#[cfg(test)]
mod tests {
    use stolon_backend::fake::{FakeBackend, FakeLatency, FakeOptions};

    use super::*;
    use crate::Request;

    /// Goal: of a prompt that needs more memory than there is for loads, the beginning is read.
    #[tokio::test]
    async fn large_prompts_are_read_in_part() {
        let directory = tempfile::tempdir().expect("a directory");
        let engine = || {
            let per_prefill_token = Duration::from_millis(1);
            let latency = FakeLatency { per_prefill_token, ..FakeLatency::default() };
            let options = FakeOptions { vocab_size: 256, latency, ..FakeOptions::default() };
            let builder = Engine::builder().backend("fake", Box::new(FakeBackend::new(options)));
            builder.kv_cache_dir(directory.path(), 1 << 30).build()
        };
        let prompt: Arc<Vec<u32>> = Arc::new((0..330).map(|n| n * 7 % 256).collect());
        let request = || Request::tokens(prompt.to_vec()).max_tokens(1);
        let first = engine().await.expect("an engine");
        first.complete(request()).await.expect("an answer");
        first.flush_disk().await.expect("it runs");
        first.shutdown().await;
        let engine = engine().await.expect("an engine");
        let disk = engine.inner.tiers.as_ref().and_then(|tiers| tiers.disk.get()).expect("a disk");
        let record = disk.tier.shape().record_bytes(64).expect("a size");
        let plan = |room| {
            let (namespace, tokens) = (Namespace::default(), Arc::clone(&prompt));
            let places = disk.tier.places(&namespace, &tokens).collect();
            let cached = engine.inner.handle.query_match_len(&namespace, &tokens);
            let lookup = Lookup { namespace, tokens, places, cached, priority: 0 };
            disk.plan(&engine.inner.handle, PrefetchPolicy::default(), &lookup, room)
        };
        for (room, records) in
            [(record - 1, None), (2 * record + 1, Some(2)), (9 * record, Some(5))]
        {
            assert_eq!(plan(room).map(|plan| plan.disk.len()), records);
        }
        engine.complete(request()).await.expect("an answer");
        let all = plan(9 * record);
        assert!(all.is_none(), "it is in the pool: {all:?}");
        engine.shutdown().await;
    }
}
