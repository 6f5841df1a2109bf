//! The tiers of an engine besides its KV pool. All decisions are made by [`stolon_tiers::Tiers`],
//! which the engine is given as a sink and a source of KV. This module has its settings, opens and
//! closes it, and gives callers access to it.

mod prefix_file;
mod settings;

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use stolon_actors::{CacheEvents, EngineHandle};
use stolon_kvcache::{EvictionPolicy, Namespace};
use stolon_scheduler::EngineError;
use stolon_tiers::RecordShape;

use crate::text::Text;
use crate::{Engine, Error, Request};

pub use prefix_file::PrefixImport;
pub(crate) use settings::TierOptions;
pub use stolon_tiers::{
    DiskError, DiskStats, ExportedPrefix, FormatError, ObjectError, ObjectStats, PrefetchPolicy,
    TierError, TierMatch, WritePolicy,
};

/// Maximum time that writing the pool delays the end of the engine.
const POOL_LIMIT: Duration = Duration::from_secs(60);

/// The tiers of an engine; `None` without a directory.
#[derive(Clone, Debug, Default)]
pub(crate) struct EngineTiers(Option<Opened>);

#[derive(Clone, Debug)]
struct Opened {
    tiers: Arc<stolon_tiers::Tiers>,
    directory: Arc<Path>,
}

impl EngineTiers {
    fn tiers(&self) -> Option<&Arc<stolon_tiers::Tiers>> {
        self.0.as_ref().map(|opened| &opened.tiers)
    }

    /// The key of namespaces of the directory.
    pub(crate) fn namespace_key(&self) -> Option<[u8; 32]> {
        self.tiers()?.namespace_key()
    }

    /// The text layer with its history in the directory of the tiers, too.
    pub(crate) async fn with_stored_history(
        &self,
        text: Text,
        handle: &EngineHandle,
    ) -> Result<Text, Error> {
        let Some(opened) = &self.0 else { return Ok(text) };
        let directory = Arc::clone(&opened.directory);
        let fingerprint = record_shape(handle).await?.fingerprint;
        let vocab_size = handle.context().spec.vocab_size;
        let stored = move || text.with_stored_history(&directory, &fingerprint, vocab_size);
        blocking(handle, stored).await
    }

    /// Number of leading tokens of a prompt whose KV is on the disk or in the object store.
    pub(crate) fn stored(&self, namespace: &Namespace, tokens: &Arc<Vec<u32>>) -> usize {
        let Some(tiers) = self.tiers() else { return 0 };
        let TierMatch { disk, object_store, .. } = tiers.query(0, namespace, Arc::clone(tokens));
        disk.max(object_store)
    }

    pub(crate) fn set_eviction_policy(&self, policy: EvictionPolicy) {
        self.tiers().iter().for_each(|tiers| tiers.set_eviction_policy(policy));
    }

    /// Before the engine stops and its KV can no longer be read, waits until everything that was
    /// computed is on the disk, with the KV in the pool if the write policy asks for it.
    pub(crate) async fn before_stop(&self, handle: &EngineHandle) {
        let Some(tiers) = self.tiers().cloned() else { return };
        let stored = store_computed(tiers, handle.clone());
        // The timer needs the engine's runtime.
        let stored = async move { tokio::time::timeout(POOL_LIMIT, stored).await };
        if handle.runtime().spawn(stored).await.is_ok_and(|stored| stored.is_err()) {
            tracing::warn!(limit = ?POOL_LIMIT, "not everything in the KV pool was stored in time");
        }
    }

    /// Ends the tiers of an engine that has stopped, after everything was written. The object store
    /// is waited for, too, but not forever.
    pub(crate) async fn after_stop(&self, handle: &EngineHandle, text: &Text) {
        let Some(tiers) = self.tiers().cloned() else { return };
        let text = text.clone();
        let close = move || {
            text.flush_history();
            tiers.flush();
            tiers.close();
        };
        // Fails only if the runtime has ended.
        let _ = blocking(handle, close).await;
    }
}

/// The tiers of an engine besides its KV pool: [`Engine::tiers`].
#[derive(Clone, Copy, Debug)]
pub struct Tiers<'a>(&'a Engine);

impl Engine {
    /// The disk tier, and the object store behind it. Without
    /// [`EngineBuilder::kv_cache_dir`](crate::EngineBuilder::kv_cache_dir), there is nothing in
    /// them.
    pub fn tiers(&self) -> Tiers<'_> {
        Tiers(self)
    }
}

impl Tiers<'_> {
    /// How much of the request's prompt is in each tier now, the KV pool included. Does no I/O and
    /// has no side effects; the answer may change before a request runs.
    ///
    /// A prompt that is not token ids yet is rendered and tokenized on the calling thread.
    ///
    /// # Errors
    /// The errors of rendering and tokenizing the prompt.
    pub fn query(self, request: &Request) -> Result<TierMatch, Error> {
        let inner = &self.0.inner;
        let (namespace, tokens) = self.0.lookup(request)?;
        let pool = inner.handle.query_match_len(&namespace, &tokens);
        Ok(match inner.tiers.tiers() {
            Some(tiers) => tiers.query(pool, &namespace, Arc::new(tokens)),
            None => TierMatch::pool(pool),
        })
    }

    /// Statistics of the disk tier; `None` if there is none.
    pub fn disk_stats(self) -> Option<DiskStats> {
        self.0.inner.tiers.tiers()?.disk_stats()
    }

    /// Statistics of the object tier; `None` if there is none.
    pub fn object_stats(self) -> Option<ObjectStats> {
        self.0.inner.tiers.tiers()?.object_stats()
    }

    /// The blocks that the disk tier has, and every change from now on, in a queue of at most
    /// `capacity` events. They have the hashes of [`Cache::events`](crate::Cache::events), and the
    /// engine never waits for the reader. `None` without a disk tier.
    ///
    /// KV is stored and read in records of 64 tokens, or of one block if blocks are larger. So if a
    /// prompt diverges from a stored one within a record, up to 63 tokens fewer can be read than
    /// the events say. Not in the events are prompts from their first image on, checkpoints of a
    /// recurrent state, more than 131,072 records, and KV that is in the object store only. Records
    /// that were on the disk when the engine was started become known after the first call, while
    /// they are read in the background.
    ///
    /// # Errors
    /// `InvalidParameter` if `capacity` is 0, `Interrupted` and `Stopped`.
    pub fn disk_events(self, capacity: usize) -> Result<Option<CacheEvents>, Error> {
        let inner = &self.0.inner;
        if capacity == 0 {
            return Err(Error::invalid("capacity", "at least 1 event", capacity));
        }
        let Some(tiers) = inner.tiers.tiers() else { return Ok(None) };
        let subscription = tiers.disk_events(inner.handle.block_hasher()?, capacity);
        Ok(subscription.map(|(snapshot, receiver)| CacheEvents::new(snapshot, receiver)))
    }

    /// Removes everything from the disk tier, with the stored history, also KV that was computed
    /// before and is still to be written. KV in the pool and in the object store stays. Does
    /// nothing without a disk tier.
    ///
    /// # Errors
    /// `Stopped` if the engine's runtime has ended.
    pub async fn clear_disk(self) -> Result<(), Error> {
        self.flush().await?;
        let Some(tiers) = self.0.inner.tiers.tiers().cloned() else { return Ok(()) };
        let text = self.0.inner.prompts.text.clone();
        let clear = move || {
            tiers.clear();
            text.clear_stored_history();
        };
        blocking(&self.0.inner.handle, clear).await
    }

    /// Waits until everything that was computed before is on the disk and in the object store, or
    /// was given up because writing failed or takes too long. With
    /// [`WritePolicy::WriteBack`](crate::WritePolicy::WriteBack), everything that is in the pool is
    /// written; with [`WriteThroughSelective`](crate::WritePolicy::WriteThroughSelective), KV that
    /// was not used often enough is not written. Does nothing without a disk tier.
    ///
    /// # Errors
    /// `Stopped` if the engine's runtime has ended.
    pub async fn flush(self) -> Result<(), Error> {
        let inner = &self.0.inner;
        let Some(tiers) = inner.tiers.tiers().cloned() else { return Ok(()) };
        let stored = store_computed(Arc::clone(&tiers), inner.handle.clone());
        // Fails only if the runtime ends.
        let _ = inner.handle.runtime().spawn(stored).await;
        let text = inner.prompts.text.clone();
        let flush = move || {
            text.flush_history();
            tiers.flush();
        };
        blocking(&inner.handle, flush).await
    }
}

/// Writes everything that was computed before to the disk, and what is in the pool if the write
/// policy stores the pool before it is lost. Must run on the engine's runtime.
async fn store_computed(tiers: Arc<stolon_tiers::Tiers>, handle: EngineHandle) {
    // When the audit is answered, everything that was computed before is claimed. Whether it passes
    // does not matter for the disk.
    let _ = handle.audit().await;
    store_pool(&tiers, handle).await;
    // Fails only if the runtime ends.
    let _ = tokio::task::spawn_blocking(move || tiers.flush_disk()).await;
}

/// Stores everything that is in the pool, if the write policy stores the pool before it is lost.
/// Must run on the engine's runtime.
async fn store_pool(tiers: &Arc<stolon_tiers::Tiers>, handle: EngineHandle) {
    let (true, Ok(tree)) = (tiers.stores_pool(), handle.dump()) else { return };
    let inner: HashSet<usize> = tree.nodes.iter().filter_map(|node| node.parent).collect();
    let leaves = tree.nodes.iter().enumerate().filter(|(index, _)| !inner.contains(index));
    for (_, leaf) in leaves {
        // It may have been evicted in between.
        let Ok(Some(prefix)) = handle.cached_prefix(leaf.last_hash) else { continue };
        for claim in tiers.claims(prefix.namespace, prefix.positions) {
            let (namespace, tokens) = (claim.namespace(), Arc::clone(claim.tokens()));
            if let Ok(Some(bytes)) = handle.save_blocks(namespace, tokens, claim.blocks()).await {
                claim.write(bytes);
            }
            let own = Arc::clone(tiers);
            // Fails only if the runtime ends.
            let _ = tokio::task::spawn_blocking(move || own.flush_disk()).await;
        }
    }
}

/// The format of an engine's KV. The first call reads all weights.
async fn record_shape(handle: &EngineHandle) -> Result<RecordShape, Error> {
    let format = handle.kv_format().ok_or(TierError::NoKvCopies)?.clone();
    let fingerprint = blocking(handle, move || format.fingerprint()).await?;
    let fingerprint = fingerprint.map_err(|reason| TierError::KvFormat(reason.into()))?;
    let spec = &handle.context().spec;
    let (block_size, block_bytes) = (spec.block_size, spec.block_bytes);
    Ok(RecordShape { fingerprint, block_size, block_bytes })
}

/// Runs work that may block, on a blocking thread of the engine's runtime.
async fn blocking<T: Send + 'static>(
    handle: &EngineHandle,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let job = handle.runtime().spawn_blocking(work);
    job.await.map_err(|_| EngineError::Stopped.into())
}
