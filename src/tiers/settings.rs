//! The settings of the tiers.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

use stolon_actors::EngineHandle;
use stolon_kvcache::EvictionOrder;
use stolon_scheduler::EngineConfig;
use stolon_tiers::{PrefetchPolicy, TierSettings, WritePolicy};

use super::{EngineTiers, Opened, blocking, record_shape};
use crate::{EngineBuilder, Error};

/// Maximum ratio of the disk tier's size to the size of the KV pool.
const MAX_RATIO: f64 = 1000.0;

/// Maximum memory for KV that was read, unless it is set: as much as fits into the KV pool, within
/// these bounds.
const READ_MEMORY: RangeInclusive<u64> = 64 << 20..=1 << 30;

/// The settings of the tiers, as set in the builder.
#[derive(Default)]
pub(crate) struct TierOptions {
    /// The directory and its maximum size in bytes.
    disk: Option<(PathBuf, u64)>,
    /// The directory and its maximum size as a multiple of the KV pool's size.
    disk_ratio: Option<(PathBuf, f64)>,
    write: Option<WritePolicy>,
    prefetch: Option<PrefetchPolicy>,
    /// Maximum memory in bytes for KV that was read.
    read_memory: Option<u64>,
    /// URL of the object store behind the directory.
    object_store: Option<String>,
}

/// Maximum size of the disk tier.
#[derive(Clone, Copy, Debug)]
enum DiskSize {
    Bytes(u64),
    /// A multiple of the KV pool's size, which is known when the engine has started.
    Ratio(f64),
}

impl DiskSize {
    /// The size in bytes, with a KV pool of `pool_bytes` bytes.
    fn bytes(self, pool_bytes: u64) -> u64 {
        match self {
            DiskSize::Bytes(bytes) => bytes,
            DiskSize::Ratio(ratio) => (pool_bytes as f64 * ratio) as u64,
        }
    }
}

/// Tiers that are opened when the engine has started.
pub(crate) struct PreparedTiers(Option<Prepared>);

struct Prepared {
    tiers: Arc<stolon_tiers::Tiers>,
    directory: PathBuf,
    size: DiskSize,
    eviction: Box<dyn EvictionOrder>,
    read_memory: Option<u64>,
    object_store: Option<String>,
}

impl TierOptions {
    /// Makes the tiers, and sets them as the engine's sink and source of KV.
    pub(crate) fn prepare(self, config: &mut EngineConfig) -> Result<PreparedTiers, Error> {
        let Some((directory, size)) = self.disk()? else {
            let needs_directory = [
                ("kv_object_store", self.object_store.is_some()),
                ("write_policy", self.write.is_some()),
                ("prefetch_policy", self.prefetch.is_some()),
                ("kv_read_memory", self.read_memory.is_some()),
            ];
            return match needs_directory.into_iter().find(|(_, is_set)| *is_set) {
                Some((name, _)) => {
                    let expected = "a directory with `kv_cache_dir`";
                    Err(Error::invalid(name, expected, "no directory"))
                }
                None => Ok(PreparedTiers(None)),
            };
        };
        let (eviction, object_store) = (config.new_eviction_order(), self.object_store);
        let (write, prefetch) = (self.write.unwrap_or_default(), self.prefetch.unwrap_or_default());
        let tiers = Arc::new(stolon_tiers::Tiers::new(write, prefetch));
        config.kv_sink = Some(Arc::clone(&tiers) as _);
        config.kv_source = Some(Arc::clone(&tiers) as _);
        let read_memory = self.read_memory;
        let prepared = Prepared { tiers, directory, size, eviction, read_memory, object_store };
        Ok(PreparedTiers(Some(prepared)))
    }

    /// The directory of the disk tier and its maximum size, if there is one.
    fn disk(&self) -> Result<Option<(PathBuf, DiskSize)>, Error> {
        match (&self.disk, &self.disk_ratio) {
            (None, None) => Ok(None),
            (Some((directory, bytes)), None) => {
                Ok(Some((directory.clone(), DiskSize::Bytes(*bytes))))
            }
            (None, Some((directory, ratio))) if *ratio > 0.0 && *ratio <= MAX_RATIO => {
                Ok(Some((directory.clone(), DiskSize::Ratio(*ratio))))
            }
            (None, Some((_, ratio))) => {
                let expected = format!("a ratio above 0 and at most {MAX_RATIO}");
                Err(Error::invalid("kv_cache_dir_ratio", expected, ratio))
            }
            (Some(_), Some(_)) => {
                let expected = "either `kv_cache_dir` or `kv_cache_dir_ratio`";
                Err(Error::invalid("kv_cache_dir_ratio", expected, "both"))
            }
        }
    }
}

impl PreparedTiers {
    /// Opens the tiers of an engine that has started.
    pub(crate) async fn open(self, handle: &EngineHandle) -> Result<EngineTiers, Error> {
        let Some(prepared) = self.0 else { return Ok(EngineTiers(None)) };
        let Prepared { tiers, directory, size, eviction, read_memory, object_store } = prepared;
        let spec = &handle.context().spec;
        if spec.state.is_some() && tiers.write_policy() == WritePolicy::WriteBack {
            let expected = "`write_through` or `write_through_selective`, because what is evicted \
                            from the pool has no state of a model with a recurrent state, or with \
                            windows in states";
            return Err(Error::invalid("write_policy", expected, "write_back"));
        }
        let pool_bytes = (spec.block_count as u64).saturating_mul(spec.block_bytes as u64);
        let budget_bytes = size.bytes(pool_bytes);
        let shape = record_shape(handle).await?;
        let read_memory = read_memory
            .unwrap_or_else(|| pool_bytes.clamp(*READ_MEMORY.start(), *READ_MEMORY.end()));
        let read_memory = usize::try_from(read_memory).unwrap_or(usize::MAX);
        let own_directory = directory.as_path().into();
        let settings =
            TierSettings { directory, budget_bytes, eviction, read_memory, object_store };
        let opened = Arc::clone(&tiers);
        let spans = Arc::clone(handle.context().spans());
        blocking(handle, move || opened.open(settings, shape, spans)).await??;
        Ok(EngineTiers(Some(Opened { tiers, directory: own_directory })))
    }
}

impl EngineBuilder {
    /// Stores the KV of prompts and answers in a directory, at most `budget_bytes` bytes of it, and
    /// reads it back if that is faster than computing it: after it was evicted from the KV cache,
    /// and after a restart of the program. Default: nothing is stored.
    ///
    /// The directory is made if it does not exist. One engine can use it at a time; others are
    /// refused by [`build`](Self::build) with [`TierError::Disk`](crate::TierError::Disk).
    /// Different models may use it one after another: KV of another model, or with other options,
    /// is not used, and is removed when room is needed. If files are lost or damaged, requests
    /// compute what cannot be read.
    ///
    /// On Unix, a limit on the size of files (`ulimit -f`) ends a program that exceeds it by the
    /// signal `SIGXFSZ`. A program that may run with such a limit installs a handler of the signal,
    /// which may do nothing, or ignores it; the write then fails, and KV that could not be stored
    /// is computed again. The engine leaves that to the program, to which its signals belong.
    ///
    /// The [history](Self::history_bytes) of answers is stored there, too, in at most twice the memory
    /// that it takes, so that the next turn of a conversation begins with the tokens that were sampled
    /// before a restart.
    ///
    /// The files contain prompts and answers as token ids, and answers as text. On Unix, only the
    /// user can read a directory that was made here. A program that can write to it can change what
    /// the model answers.
    pub fn kv_cache_dir(mut self, directory: impl Into<PathBuf>, budget_bytes: u64) -> Self {
        let directory = directory.into();
        self.tiers.disk = Some((directory, budget_bytes));
        self
    }

    /// As [`kv_cache_dir`](Self::kv_cache_dir), with a maximum size that is given as a multiple of
    /// the size of the KV pool, which often is known only when the engine has started: above 0 and
    /// at most 1,000. With 4.0, the directory holds at most four times as many bytes as the pool.
    /// [`build`](Self::build) refuses other numbers, and a builder with both sizes.
    pub fn kv_cache_dir_ratio(mut self, directory: impl Into<PathBuf>, ratio: f64) -> Self {
        self.tiers.disk_ratio = Some((directory.into(), ratio));
        self
    }

    /// When KV is written to the directory of [`kv_cache_dir`](Self::kv_cache_dir), which must be
    /// set. Default: as soon as it is computed.
    pub fn write_policy(mut self, policy: WritePolicy) -> Self {
        self.tiers.write = Some(policy);
        self
    }

    /// How long a request waits for KV that is read from the directory of
    /// [`kv_cache_dir`](Self::kv_cache_dir), which must be set, or fetched from the object store.
    /// Default: as long as that is expected to be faster than computing.
    pub fn prefetch_policy(mut self, policy: PrefetchPolicy) -> Self {
        self.tiers.prefetch = Some(policy);
        self
    }

    /// Maximum memory in bytes for KV that was read from the directory of
    /// [`kv_cache_dir`](Self::kv_cache_dir), which must be set, or fetched from the object store,
    /// and is not in the KV pool yet. If a prompt needs more, its beginning is read and the rest is
    /// computed; while all of it is in use, prompts are computed. Default: the size of the KV pool,
    /// at least 64 MiB and at most 1 GiB. It is memory in addition to the KV pool, and is occupied
    /// only while KV is read and requests wait with it.
    pub fn kv_read_memory(mut self, bytes: u64) -> Self {
        self.tiers.read_memory = Some(bytes);
        self
    }

    /// Also stores the KV in the directory of [`kv_cache_dir`](Self::kv_cache_dir), which must be
    /// set, in an object store, and fetches KV from there that the directory does not have, if that
    /// is faster than computing it. Engines with the same model share what they have computed.
    ///
    /// `url` is `s3://bucket/folder`, `gs://...`, `az://...`, or `file:///...` for a directory that
    /// several machines have mounted. Credentials, regions and endpoints are taken from the
    /// environment variables that the tools of the store use, such as `AWS_ACCESS_KEY_ID`,
    /// `AWS_REGION`, `AWS_ENDPOINT` and `AWS_ALLOW_HTTP`. Nothing is removed: set a rule for old
    /// objects in the store. A program that can write to it can change what the model answers.
    /// [`build`](Self::build) fails with [`TierError::ObjectStore`](crate::TierError::ObjectStore)
    /// if the store does not answer, or in a build without the feature `object-store`. When it
    /// fails later, requests continue, and compute the KV that cannot be fetched.
    pub fn kv_object_store(mut self, url: impl Into<String>) -> Self {
        self.tiers.object_store = Some(url.into());
        self
    }
}
