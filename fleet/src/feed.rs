//! [`CacheFeed`]: what an engine's prefix cache contains and how it changes, in batches.

use std::time::Duration;

use futures::FutureExt;
use stolon::{CacheEvent, CacheEvents, Engine, Error};

/// Maximum number of events in a batch, but for those that describe the whole cache.
const BATCH_MAX: usize = 1024;
/// Pause before an engine that restarts is asked again.
const PAUSE: Duration = Duration::from_millis(100);

/// Events that belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheBatch {
    /// Whether the events describe the whole cache: the first one is [`CacheEvent::Cleared`], and
    /// the others build what is cached. If not, they are the changes since the batch before.
    pub is_whole: bool,
    /// The events, at least one. None of them is [`CacheEvent::Reset`].
    pub events: Vec<CacheEvent>,
}

/// The content of an engine's prefix cache, followed by its changes. Where changes were lost,
/// because they came faster than they were read or because the engine restarted, the whole content
/// follows again. A copy of the index that applies all batches is therefore exact.
///
/// The feed keeps the engine alive, as a clone does.
#[derive(Debug)]
pub struct CacheFeed {
    engine: Engine,
    /// Maximum number of events that wait to be read.
    capacity: usize,
    /// The content that was not returned yet.
    whole: Option<Vec<CacheEvent>>,
    live: CacheEvents,
}

impl CacheFeed {
    /// Subscribes to the changes. At most `capacity` events, at least 1, wait to be read; the
    /// engine never waits for the reader.
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
            if let Some(events) = self.whole.take() {
                return Some(CacheBatch { is_whole: true, events });
            }
            if let Some(events) = self.changes().await {
                return Some(CacheBatch { is_whole: false, events });
            }
            match subscribe(&self.engine, self.capacity).await {
                Ok((whole, live)) => (self.whole, self.live) = (Some(whole), live),
                Err(error) if error.is_retryable() => tokio::time::sleep(PAUSE).await,
                Err(_) => return None,
            }
        }
    }

    /// The changes that have queued up, at least one; `None` if some were lost.
    async fn changes(&mut self) -> Option<Vec<CacheEvent>> {
        let mut events = vec![self.live.next().await?.event];
        while events.len() < BATCH_MAX
            && let Some(Some(next)) = self.live.next().now_or_never()
        {
            events.push(next.event);
        }
        let is_complete = !events.iter().any(|event| matches!(event, CacheEvent::Reset { .. }));
        is_complete.then_some(events)
    }
}

/// The events that turn any copy of the index into the index of the engine, and the changes that
/// follow them, in a queue of at most `capacity`.
pub(crate) async fn subscribe(
    engine: &Engine,
    capacity: usize,
) -> Result<(Vec<CacheEvent>, CacheEvents), Error> {
    let mut live = engine.cache().events(capacity).await?;
    let mut whole = vec![CacheEvent::Cleared];
    whole.append(&mut live.take_snapshot().events);
    Ok((whole, live))
}
