//! Waits for stored KV: in the caller's task before a request is submitted, and in a task of its own
//! for a request that waits.

use std::sync::Arc;

use ractor::ActorRef;
use stolon_scheduler::{KvSource, PendingKv, RepeatedLookup, StoredKv};
use tokio::time::timeout;

use crate::admission::AdmissionMessage;

/// Waits for stored KV that is being read, for at most the time that its source says. Must run on a
/// runtime with a time driver.
pub(crate) async fn read(load: PendingKv) -> Option<StoredKv> {
    let PendingKv { kv, limit } = load;
    let read = timeout(limit, kv).await;
    read.unwrap_or_else(|_| {
        tracing::debug!(?limit, "stored KV was not read in time; it is computed");
        None
    })
}

/// Looks up stored KV for a waiting request, and sends the KV that was read to the admission actor.
/// If the source panics, the actor gets no message, and the scheduler ends the waiting of the
/// request.
pub(crate) fn look_up(
    source: Arc<dyn KvSource>,
    lookup: RepeatedLookup,
    admission: ActorRef<AdmissionMessage>,
) {
    let RepeatedLookup { id, prompt, limit } = lookup;
    tokio::spawn(async move {
        let kv = match source.prefetch(&prompt).load {
            Some(load) => read(PendingKv { limit: load.limit.min(limit), ..load }).await,
            None => None,
        };
        // Fails only if the actor has stopped, and the request with it.
        let _ = admission.cast(AdmissionMessage::StoredRead(id, kv));
    });
}
