//! The disk tier of an engine: what is computed is stored, and stored KV is read while a request
//! waits to be submitted.
//!
//! Storing: the scheduler offers what it has added to the prefix tree ([`KvSink`]), copies what is
//! not on the disk yet out of the pool, and a thread of its own writes it.
//!
//! Loading: before a request is submitted, [`Tiers::load`] looks up how much of its prompt is on the
//! disk beyond what is in the pool. If reading that is expected to be faster than computing it, it
//! is read and verified on a blocking thread, and the request is submitted with the result. A read
//! that takes much longer than expected is not waited for.

use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::Shared;
use stolon_actors::EngineHandle;
use stolon_kvcache::Namespace;
use stolon_scheduler::{KvSink, StoredKv};
use stolon_tiers::{ChainKey, DiskStats, DiskTier, DiskWrite, DiskWriter, KvShape};
use tokio::sync::{Semaphore, oneshot};

use super::Engine;
use crate::prompt::Prompts;
use crate::{Error, ModelInfo, Request, SamplingParams};

/// Maximum memory of KV that was read and is not in the pool yet, in units of [`UNIT_BYTES`]. While
/// it is used up, prompts are computed.
const MEMORY_UNITS: usize = 1024;
const UNIT_BYTES: usize = 1 << 20;
/// A load must be expected to take at most this share of the time of computing.
const WORTH_SHARE: f64 = 0.8;
/// A load is waited for this many times as long as expected, and [`GRACE`] longer.
const PATIENCE: u32 = 2;
const GRACE: Duration = Duration::from_millis(20);
/// How long a load is waited for at most while the speed of computing is not known.
const UNMEASURED_LIMIT: Duration = Duration::from_secs(10);

/// Where KV is stored besides the pool.
#[derive(Clone, Debug)]
pub(crate) struct DiskSettings {
    pub(crate) directory: PathBuf,
    pub(crate) budget_bytes: u64,
}

/// A read that several requests may wait for.
type Load = Shared<oneshot::Receiver<Option<StoredKv>>>;

/// The tiers of an engine.
#[derive(Debug)]
pub(crate) struct Tiers {
    /// Set when the backend is known. Nothing is stored or loaded before.
    disk: OnceLock<Disk>,
    /// Reads in progress, by the end of what is read and the position where it begins.
    loads: Mutex<HashMap<(ChainKey, usize), Load>>,
    memory: Arc<Semaphore>,
}

#[derive(Debug)]
struct Disk {
    tier: Arc<DiskTier>,
    writer: DiskWriter,
}

/// How much of a prompt is where. Each number counts from the start of the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierMatch {
    /// Tokens whose KV is in the pool: [`Engine::query_match_len`].
    pub pool: usize,
    /// Tokens whose KV is on the disk.
    pub disk: usize,
}

impl Tiers {
    pub(crate) fn new() -> Arc<Tiers> {
        Arc::new(Tiers {
            disk: OnceLock::new(),
            loads: Mutex::default(),
            memory: Arc::new(Semaphore::new(MEMORY_UNITS)),
        })
    }

    /// Opens the directory. Blocks.
    pub(crate) fn open(&self, settings: &DiskSettings, shape: KvShape) -> Result<(), Error> {
        let opened = DiskTier::open(&settings.directory, settings.budget_bytes, shape);
        let tier = Arc::new(opened.map_err(|error| Error::Disk(Arc::new(error)))?);
        let writer = DiskWriter::start(Arc::clone(&tier)).map_err(|error| Error::File {
            path: settings.directory.clone(),
            error: Arc::new(error),
        })?;
        let stats = tier.stats();
        tracing::info!(
            directory = %settings.directory.display(),
            records = stats.records,
            bytes = stats.bytes,
            budget_bytes = stats.budget_bytes,
            "KV is stored on disk"
        );
        // It is opened once.
        let _ = self.disk.set(Disk { tier, writer });
        Ok(())
    }

    /// Waits until everything was written, and gives the directory back. Blocks.
    fn close(&self) {
        if let Some(disk) = self.disk.get() {
            disk.writer.flush();
            disk.tier.close();
        }
    }

    /// Stored KV of a prompt, if reading it is worth it.
    pub(crate) async fn load(
        self: &Arc<Self>,
        handle: &EngineHandle,
        namespace: Namespace,
        tokens: &Arc<Vec<u32>>,
    ) -> Option<StoredKv> {
        let tier = &self.disk.get()?.tier;
        let matched = handle.query_match_len(&namespace, tokens);
        let record = tier.shape().record_positions();
        // Without a whole record beyond what is cached, there is nothing to gain.
        if tokens.len() < (matched / record + 1) * record {
            return None;
        }
        let end = tier.query_match_len(&namespace, tokens);
        if end <= matched {
            return None;
        }
        let start = matched / record * record;
        let expected = tier.read_time(end - start);
        let limit = match handle.prefill_time(end - matched) {
            Some(compute) if expected > compute.mul_f64(WORTH_SHARE) => return None,
            Some(_) => expected * PATIENCE + GRACE,
            None => UNMEASURED_LIMIT,
        };
        let load = self.begin(handle, namespace, tokens, start..end)?;
        // The timer needs the engine's runtime; the caller may have another one.
        let wait = async move { tokio::time::timeout(limit, load).await };
        handle.runtime().spawn(wait).await.ok()?.ok()?.ok()?
    }

    /// Begins to read these positions of a prompt, or joins a read that has begun. `None` if there
    /// is no memory for it now.
    fn begin(
        self: &Arc<Self>,
        handle: &EngineHandle,
        namespace: Namespace,
        tokens: &Arc<Vec<u32>>,
        positions: Range<usize>,
    ) -> Option<Load> {
        let disk = self.disk.get()?;
        let key = (disk.tier.key(&namespace, tokens, positions.end), positions.start);
        let mut loads = self.loads();
        if let Some(load) = loads.get(&key) {
            return Some(load.clone());
        }
        let bytes = disk.tier.shape().record_bytes(positions.len()).unwrap_or(usize::MAX);
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX);
        let permit = Arc::clone(&self.memory).try_acquire_many_owned(units).ok()?;
        let (sender, receiver) = oneshot::channel();
        let load = receiver.shared();
        loads.insert(key, load.clone());
        drop(loads);
        let (tiers, tier, tokens) = (Arc::clone(self), Arc::clone(&disk.tier), Arc::clone(tokens));
        // If the runtime ends, the sender is dropped, and nothing is loaded any more.
        handle.runtime().spawn_blocking(move || {
            let blocks = tier.read(&namespace, &tokens, positions.start, positions.end);
            let block_size = tier.shape().block_size;
            let loaded = (!blocks.is_empty()).then(|| {
                let first_block = positions.start / block_size;
                StoredKv::new(block_size, first_block, blocks).holding(permit)
            });
            tiers.loads().remove(&key);
            // Fails only if nobody waits for it any more.
            let _ = sender.send(loaded);
        });
        Some(load)
    }

    fn loads(&self) -> MutexGuard<'_, HashMap<(ChainKey, usize), Load>> {
        self.loads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KvSink for Tiers {
    fn wanted(
        &self,
        namespace: &Namespace,
        tokens: &[u32],
        committed: Range<usize>,
    ) -> Option<Range<usize>> {
        let disk = self.disk.get()?;
        let shape = disk.tier.shape();
        let blocks_per_record = shape.record_positions() / shape.block_size;
        let record = |block: usize| block / blocks_per_record;
        if record(committed.start) == record(committed.end) || !disk.writer.has_room() {
            return None;
        }
        let end = record(committed.end) * blocks_per_record;
        let first = disk.tier.first_missing(namespace, &tokens[..end * shape.block_size])?;
        Some(first / shape.block_size..end)
    }

    fn store(
        &self,
        namespace: Namespace,
        tokens: Arc<Vec<u32>>,
        first_block: usize,
        bytes: Vec<u8>,
    ) {
        let Some(disk) = self.disk.get() else { return };
        let first = first_block * disk.tier.shape().block_size;
        disk.writer.push(DiskWrite { namespace, tokens, first, blocks: bytes });
    }
}

impl Engine {
    /// An engine with its disk tier, if it has one, which is opened first.
    pub(crate) async fn with_disk(
        handle: EngineHandle,
        prompts: Prompts,
        recommended_sampling: SamplingParams,
        info: ModelInfo,
        disk: Option<(Arc<Tiers>, DiskSettings)>,
    ) -> Result<Engine, Error> {
        let (tiers, settings) = disk.unzip();
        let engine = Engine::new(handle, prompts, recommended_sampling, info, tiers.clone());
        if let Some((tiers, settings)) = tiers.zip(settings) {
            let shape = engine.kv_shape()?;
            engine.blocking(move || tiers.open(&settings, shape)).await??;
        }
        Ok(engine)
    }

    /// Ends the disk tier of an engine that has stopped.
    pub(super) async fn close_disk(&self) {
        if let Some(tiers) = self.inner.tiers.clone() {
            // Fails only if the runtime has ended.
            let _ = self.blocking(move || tiers.close()).await;
        }
    }

    /// How much of the request's prompt is in each tier now. Does no I/O and has no side effects;
    /// the answer may change before a request runs.
    ///
    /// A prompt that is not token ids yet is rendered and tokenised on the calling thread.
    ///
    /// # Errors
    /// Those of rendering and tokenising the prompt.
    pub fn query_tiers(&self, request: &Request) -> Result<TierMatch, Error> {
        let tokens = self.inner.prompts.tokens_here(&request.source)?;
        let namespace = request.namespace()?;
        let pool = self.inner.handle.query_match_len(&namespace, &tokens);
        let disk = self.inner.tiers.as_ref().and_then(|tiers| tiers.disk.get());
        let disk = disk.map_or(0, |disk| disk.tier.query_match_len(&namespace, &tokens));
        Ok(TierMatch { pool, disk })
    }

    /// What the disk tier has counted and stores; `None` if there is none.
    pub fn disk_stats(&self) -> Option<DiskStats> {
        Some(self.inner.tiers.as_ref()?.disk.get()?.tier.stats())
    }

    /// Waits until everything that was computed before is on the disk, or was given up because
    /// writing failed. Does nothing without a disk tier.
    ///
    /// # Errors
    /// `Stopped` if the engine's runtime has ended.
    pub async fn flush_disk(&self) -> Result<(), Error> {
        let Some(tiers) = self.inner.tiers.clone() else { return Ok(()) };
        // An audit runs after the copies of the steps before it, so they are in the queue then.
        // One that fails does not concern the disk.
        let _ = self.audit().await;
        let flush = move || tiers.disk.get().map(|disk| disk.writer.flush());
        self.blocking(flush).await.map(drop)
    }
}
