//! The engine's methods that concern its tiers.

use std::sync::Arc;
use std::time::Duration;

use stolon_actors::EngineHandle;
use stolon_kvcache::EvictionPolicy;
use stolon_tiers::{DiskStats, ObjectStats, Place};

use super::Engine;
use super::objects::Objects;
use super::tier_policy::WritePolicy;
use super::tiers::{DiskSettings, TierMatch, Tiers};
use crate::prompt::Prompts;
use crate::{Error, ModelInfo, Request, SamplingParams};

/// How long the engine is kept from ending at most while its pool is written.
const POOL_LIMIT: Duration = Duration::from_secs(60);

impl Engine {
    /// An engine with its disk tier, if it has one, which is opened first.
    pub(crate) async fn with_disk(
        handle: EngineHandle,
        prompts: Prompts,
        recommended_sampling: SamplingParams,
        info: ModelInfo,
        namespace_key: Option<[u8; 32]>,
        disk: Option<(Arc<Tiers>, DiskSettings)>,
    ) -> Result<Engine, Error> {
        let (tiers, settings) = disk.unzip();
        let engine =
            Engine::new(handle, prompts, recommended_sampling, info, namespace_key, tiers.clone());
        if let Some((tiers, settings)) = tiers.zip(settings) {
            let shape = engine.kv_shape()?;
            tiers.open(&engine, settings, shape).await?;
        }
        Ok(engine)
    }

    /// Stores what is in the pool before the engine stops, if the write policy asks for it.
    pub(super) async fn store_before_stop(&self) {
        let stored = self.store_pool();
        let stored = async move { tokio::time::timeout(POOL_LIMIT, stored).await };
        if self.inner.handle.runtime().spawn(stored).await.is_ok_and(|stored| stored.is_err()) {
            tracing::warn!(limit = ?POOL_LIMIT, "not everything in the KV pool was stored in time");
        }
    }

    /// Stores what is in the pool, if the write policy is to do so at some time.
    fn store_pool(&self) -> impl Future<Output = ()> + Send + use<> {
        let (tiers, handle) = (self.inner.tiers.clone(), self.inner.handle.clone());
        async move {
            if let Some(tiers) = tiers.filter(|tiers| tiers.write == WritePolicy::WriteBack) {
                tiers.store_pool(&handle).await;
            }
        }
    }

    /// Ends the disk tier of an engine that has stopped, after everything was written. The object
    /// store is waited for, too, but not for ever.
    pub(super) async fn close_disk(&self) {
        // Both fail only if the runtime has ended.
        let _ = self.flush_writer().await;
        let Some(tiers) = self.inner.tiers.clone() else { return };
        let close = move || tiers.disk.get().map(|disk| disk.tier.close());
        let _ = self.blocking(close).await;
    }

    /// Waits until everything in the queue of writes was written, and uploaded.
    async fn flush_writer(&self) -> Result<(), Error> {
        let Some(tiers) = self.inner.tiers.clone() else { return Ok(()) };
        let own = Arc::clone(&tiers);
        self.blocking(move || own.disk.get().map(|disk| disk.writer.flush())).await?;
        let flush = async move {
            if let Some(objects) = tiers.disk.get().and_then(|disk| disk.objects.as_ref()) {
                objects.flush().await;
            }
        };
        let flushed = self.inner.handle.runtime().spawn(flush).await;
        flushed.map_err(|_| stolon_scheduler::EngineError::Stopped.into())
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
        let namespace = self.namespace(request)?;
        let pool = self.inner.handle.query_match_len(&namespace, &tokens);
        let Some(disk) = self.inner.tiers.as_ref().and_then(|tiers| tiers.disk.get()) else {
            return Ok(TierMatch { pool, disk: 0, object_store: 0 });
        };
        let stored = |place: &Place| {
            let in_store = |objects: &Arc<Objects>| objects.contains(&place.key);
            disk.tier.contains(&place.key) || disk.objects.as_ref().is_some_and(in_store)
        };
        let record = disk.tier.shape().record_positions();
        let places = disk.tier.places(&namespace, &tokens);
        let object_store = places.take_while(stored).count() * record;
        let disk = disk.tier.query_match_len(&namespace, &tokens);
        Ok(TierMatch { pool, disk, object_store })
    }

    /// Removes records from the disk in another order from now on.
    pub(super) fn set_disk_eviction_policy(&self, policy: EvictionPolicy) {
        if let Some(disk) = self.inner.tiers.as_ref().and_then(|tiers| tiers.disk.get()) {
            disk.tier.set_eviction_order(policy.order());
        }
    }

    /// What the disk tier has counted and stores; `None` if there is none.
    pub fn disk_stats(&self) -> Option<DiskStats> {
        Some(self.inner.tiers.as_ref()?.disk.get()?.tier.stats())
    }

    /// What the object tier has counted; `None` if there is none.
    pub fn object_stats(&self) -> Option<ObjectStats> {
        Some(self.inner.tiers.as_ref()?.disk.get()?.objects.as_ref()?.stats())
    }

    /// Removes everything from the disk tier, also what is still to be written of what was computed
    /// before. What is in the pool and in the object store stays. Does nothing without a disk tier.
    ///
    /// # Errors
    /// `Stopped` if the engine's runtime has ended.
    pub async fn clear_disk(&self) -> Result<(), Error> {
        self.flush_disk().await?;
        let Some(tiers) = self.inner.tiers.clone() else { return Ok(()) };
        let clear = move || tiers.disk.get().into_iter().for_each(|disk| disk.tier.clear());
        self.blocking(clear).await
    }

    /// Waits until everything that was computed before is on the disk and in the object store, or
    /// was given up because writing failed or takes too long. With [`WritePolicy::WriteBack`],
    /// everything that is in the pool is written; with [`WritePolicy::WriteThroughSelective`], what
    /// has not been used often enough is not. Does nothing without a disk tier.
    ///
    /// # Errors
    /// `Stopped` if the engine's runtime has ended.
    pub async fn flush_disk(&self) -> Result<(), Error> {
        if self.inner.tiers.is_none() {
            return Ok(());
        }
        // When it is answered, everything that was computed before is claimed. An audit that fails
        // does not concern the disk.
        let _ = self.audit().await;
        // Fails only if the runtime ends.
        let _ = self.inner.handle.runtime().spawn(self.store_pool()).await;
        self.flush_writer().await
    }
}
