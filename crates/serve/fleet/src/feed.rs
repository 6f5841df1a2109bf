//! [`CacheFeed`]: which blocks an engine has in its prefix cache and in its disk tier, and how that
//! changes, in batches.

use std::time::Duration;

use futures::FutureExt;
use stolon::{CacheEvent, CacheEvents, Engine, Error, NumberedEvent};

/// Maximum number of events of each tier in a batch, except in batches that describe everything.
const BATCH_MAX: usize = 1024;
/// Pause before an engine that restarts is asked again.
const PAUSE: Duration = Duration::from_millis(100);

/// Events that belong together. The events of the cache and of the disk tier are independent: a
/// block can be in both, and be removed from one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheBatch {
    /// Whether the events describe everything: the first one of the cache is
    /// [`CacheEvent::Cleared`], for both tiers, and the others build the stored content. If not,
    /// they are the changes since the batch before.
    pub is_whole: bool,
    /// The events of the prefix cache. None of them is [`CacheEvent::Reset`].
    pub events: Vec<CacheEvent>,
    /// The events of the disk tier: [`CacheEvent::Stored`] and [`CacheEvent::Removed`] only. If
    /// there are none, there is at least one of the cache.
    pub disk: Vec<CacheEvent>,
}

/// The content of an engine's prefix cache and disk tier, followed by the changes. Where changes
/// were lost, because they came faster than they were read or because the engine restarted, the
/// whole content follows again. It also does when the disk tier was cleared, and, if there is one,
/// when the cache was. A copy of the index that applies all batches is therefore exact.
///
/// [`Tiers::disk_events`](stolon::Tiers::disk_events) describes what the disk tier reports, and
/// what it does not report. The feed keeps the engine alive, as a clone does.
#[derive(Debug)]
pub struct CacheFeed {
    engine: Engine,
    /// Maximum number of events of each tier that wait to be read.
    capacity: usize,
    /// The content that was not returned yet.
    whole: Option<CacheBatch>,
    live: Live,
}

/// The changes that follow a content.
#[derive(Debug)]
pub(crate) struct Live {
    cache: CacheEvents,
    /// `None` without a disk tier.
    disk: Option<CacheEvents>,
}

impl CacheFeed {
    /// Subscribes to the changes. At most `capacity` events of each tier, at least 1, wait to be
    /// read; the engine never waits for the reader.
    ///
    /// # Errors
    /// If the engine does not run.
    pub async fn open(engine: &Engine, capacity: usize) -> Result<Self, Error> {
        let (whole, live) = subscribe(engine, capacity).await?;
        Ok(Self { engine: engine.clone(), capacity, whole: Some(whole), live })
    }

    /// The next batch; `None` when the engine has stopped.
    ///
    /// Cancel safe: if the future is dropped before it completes, no batch is lost.
    pub async fn next(&mut self) -> Option<CacheBatch> {
        loop {
            if let Some(whole) = self.whole.take() {
                return Some(whole);
            }
            if let Some(changes) = self.live.changes().await {
                return Some(changes);
            }
            match subscribe(&self.engine, self.capacity).await {
                Ok((whole, live)) => (self.whole, self.live) = (Some(whole), live),
                Err(error) if error.is_retryable() => tokio::time::sleep(PAUSE).await,
                Err(_) => return None,
            }
        }
    }
}

impl Live {
    /// The changes that have queued up, at least one; `None` if some were lost, or if the content
    /// has to be described again.
    async fn changes(&mut self) -> Option<CacheBatch> {
        let Live { cache, disk } = self;
        let mut batch = CacheBatch::default();
        // Nothing is taken out of a queue before the future is ready, so none is lost if it is
        // dropped.
        tokio::select! {
            next = cache.next() => batch.events.push(next?.event),
            // The disk tier is closed when the engine stops.
            next = next_of(disk) => batch.disk.push(next?.event),
        }
        take_more(&mut batch.events, || cache.next().now_or_never().flatten());
        take_more(&mut batch.disk, || next_of(disk).now_or_never().flatten());
        let is_known = |event: &CacheEvent| match event {
            CacheEvent::Stored { .. } | CacheEvent::Removed { .. } => true,
            // A router forgets the disk tier, too, when the cache is cleared.
            CacheEvent::Cleared => disk.is_none(),
            CacheEvent::Reset { .. } => false,
        };
        batch.events.iter().chain(&batch.disk).all(is_known).then_some(batch)
    }
}

/// The next change of a tier. Waits forever if there is no such tier.
async fn next_of(tier: &mut Option<CacheEvents>) -> Option<NumberedEvent> {
    match tier {
        Some(events) => events.next().await,
        None => std::future::pending().await,
    }
}

/// Adds what `next` returns, as far as there is room in a batch.
fn take_more(events: &mut Vec<CacheEvent>, mut next: impl FnMut() -> Option<NumberedEvent>) {
    while events.len() < BATCH_MAX
        && let Some(next) = next()
    {
        events.push(next.event);
    }
}

/// The events that turn any copy of the index into the index of the engine, and the changes that
/// follow them, in queues of at most `capacity`.
pub(crate) async fn subscribe(
    engine: &Engine,
    capacity: usize,
) -> Result<(CacheBatch, Live), Error> {
    let mut cache = engine.cache().events(capacity).await?;
    let mut disk = engine.tiers().disk_events(capacity)?;
    let mut events = vec![CacheEvent::Cleared];
    events.append(&mut cache.take_snapshot().events);
    let of_disk = disk.as_mut().map(|disk| disk.take_snapshot().events);
    let whole = CacheBatch { is_whole: true, events, disk: of_disk.unwrap_or_default() };
    Ok((whole, Live { cache, disk }))
}
