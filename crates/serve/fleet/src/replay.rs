//! [`Kept`]: the last batches, for subscribers that have missed some, and the ROUTER socket that
//! sends them again.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use omq_tokio::{Message, Socket};
use stolon::Engine;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::feed::subscribe;
use crate::publisher::Counters;
use crate::wire;

/// Maximum number of bytes of the batches that are kept.
const KEPT_BYTES_MAX: usize = 64 << 20;
/// The time in which a reply must have been taken.
const REPLY_TIME: Duration = Duration::from_secs(10);
/// Time for which a snapshot is reused, so that many requests cost the engine only one snapshot.
const SNAPSHOT_TIME: Duration = Duration::from_secs(1);
/// Maximum number of clients that are answered at the same time.
const CLIENTS_MAX: usize = 16;
/// Maximum number of requests of a client that wait for the answer to an earlier one.
const WAITING_MAX: usize = 16;
/// The number of the message that ends a reply.
const END: u64 = u64::MAX;

/// The batches that can be sent again.
#[derive(Debug)]
pub(crate) struct Kept {
    batches: Mutex<Batches>,
    /// Maximum number of batches.
    most: usize,
}

#[derive(Debug, Default)]
struct Batches {
    /// The batches with the numbers before `next`, without gaps.
    last: VecDeque<Bytes>,
    bytes: usize,
    /// The number of the next batch.
    next: u64,
}

impl Kept {
    pub(crate) fn new(most: usize) -> Kept {
        Kept { batches: Mutex::default(), most }
    }

    /// Numbers a batch and keeps it, in place of older ones.
    pub(crate) fn add(&self, batch: &Bytes) -> u64 {
        let mut batches = self.lock();
        batches.bytes += batch.len();
        batches.last.push_back(batch.clone());
        while batches.last.len() > self.most || batches.bytes > KEPT_BYTES_MAX {
            let Some(oldest) = batches.last.pop_front() else { break };
            batches.bytes -= oldest.len();
        }
        batches.next += 1;
        batches.next - 1
    }

    /// The batches from a number on; `None` if some of them are no longer kept.
    fn since(&self, number: u64) -> Option<Vec<(u64, Bytes)>> {
        let batches = self.lock();
        let oldest = batches.next - batches.last.len() as u64;
        let skipped = number.checked_sub(oldest)?;
        let skipped = usize::try_from(skipped).unwrap_or(usize::MAX);
        Some((oldest..).zip(batches.last.iter().cloned()).skip(skipped).collect())
    }

    /// The number of the next batch.
    fn next(&self) -> u64 {
        self.lock().next
    }

    fn lock(&self) -> MutexGuard<'_, Batches> {
        // No statement panics between two that belong together, so a poisoned lock is taken too.
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The whole content of the cache as one batch.
#[derive(Debug)]
struct Snapshot {
    /// The number of the last batch that it includes.
    number: u64,
    batch: Bytes,
    made: Instant,
}

/// Answers requests for missed batches: the requests of one client one after the other, and the
/// requests of several clients at the same time, so that a client that reads nothing blocks no
/// other.
pub(crate) struct Replay {
    engine: Engine,
    kept: Arc<Kept>,
    counters: Arc<Counters>,
    topic: Bytes,
    socket: Socket,
    /// The last one that was taken.
    snapshot: tokio::sync::Mutex<Option<Snapshot>>,
    /// The clients that are being answered, and the first numbers of their further requests.
    clients: Mutex<HashMap<Bytes, VecDeque<u64>>>,
}

impl Replay {
    pub(crate) fn new(
        engine: Engine,
        kept: Arc<Kept>,
        counters: Arc<Counters>,
        topic: Bytes,
        socket: Socket,
    ) -> Replay {
        let (snapshot, clients) = Default::default();
        Replay { engine, kept, counters, topic, socket, snapshot, clients }
    }

    /// Serves until the socket is closed.
    pub(crate) async fn serve(self) {
        let replay = Arc::new(self);
        let permits = Arc::new(Semaphore::new(CLIENTS_MAX));
        // Dropping it ends all replies.
        let mut replies = JoinSet::new();
        // While there is no permit, requests wait in the socket.
        while let Ok(permit) = Arc::clone(&permits).acquire_owned().await
            && let Ok(request) = replay.socket.recv().await
        {
            while replies.try_join_next().is_some() {}
            let Some((client, first)) = parse(&request) else {
                tracing::debug!(frames = request.len(), "not a request for KV events");
                continue;
            };
            if replay.is_first(&client, first) {
                let replay = Arc::clone(&replay);
                replies.spawn(async move {
                    let _permit = permit;
                    replay.answer(&client).await;
                });
            }
        }
    }

    /// Adds a request to those of its client. Returns whether the client has no other request, so
    /// that the caller has to answer its requests.
    fn is_first(&self, client: &Bytes, first: u64) -> bool {
        let mut clients = self.clients();
        let is_first = !clients.contains_key(client);
        let requests = clients.entry(client.clone()).or_default();
        match requests.len() < WAITING_MAX {
            true => requests.push_back(first),
            false => tracing::debug!("a client has too many requests for KV events"),
        }
        is_first
    }

    /// Answers the requests of a client until there is none.
    async fn answer(&self, client: &Bytes) {
        loop {
            let first = {
                let mut clients = self.clients();
                let next = clients.get_mut(client).and_then(VecDeque::pop_front);
                let Some(first) = next else {
                    clients.remove(client);
                    return;
                };
                first
            };
            self.counters.replays.add(1);
            // The reply to a client that has disconnected or reads nothing is abandoned.
            match tokio::time::timeout(REPLY_TIME, self.reply(client, first)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "a replay of KV events was not taken"),
                Err(_) => tracing::debug!("a replay of KV events was not taken in time"),
            }
        }
    }

    fn clients(&self) -> MutexGuard<'_, HashMap<Bytes, VecDeque<u64>>> {
        // Each change is complete.
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn reply(&self, client: &Bytes, first: u64) -> Result<(), omq_tokio::Error> {
        for (number, batch) in self.since(first).await {
            self.send(client, self.topic.clone(), number, batch).await?;
            self.counters.replayed.add(1);
        }
        self.send(client, Bytes::new(), END, Bytes::new()).await
    }

    async fn send(
        &self,
        client: &Bytes,
        topic: Bytes,
        number: u64,
        batch: Bytes,
    ) -> Result<(), omq_tokio::Error> {
        let number = Bytes::copy_from_slice(&number.to_be_bytes());
        let frames = [client.clone(), Bytes::new(), topic, number, batch];
        self.socket.send(Message::multipart(frames)).await
    }

    /// The batches from `first` on or, if they are no longer kept, the present content of the cache
    /// and the later batches.
    async fn since(&self, first: u64) -> Vec<(u64, Bytes)> {
        if let Some(batches) = self.kept.since(first) {
            return batches;
        }
        // Others that need a snapshot wait, and use this one.
        let mut snapshot = self.snapshot.lock().await;
        let usable = |snapshot: &Snapshot| {
            snapshot.made.elapsed() < SNAPSHOT_TIME
                && self.kept.since(snapshot.number + 1).is_some()
        };
        if !snapshot.as_ref().is_some_and(usable) {
            *snapshot = self.take_snapshot().await;
        }
        let Some(Snapshot { number, batch, .. }) = &*snapshot else { return Vec::new() };
        let mut batches = vec![(*number, batch.clone())];
        batches.extend(self.kept.since(number + 1).unwrap_or_default());
        batches
    }

    /// The content of the cache. The number is read first: a batch that is published meanwhile is
    /// both in the snapshot and sent after it, and it does no harm to apply it twice. `None` while
    /// the engine restarts: then everything is published anew soon.
    async fn take_snapshot(&self) -> Option<Snapshot> {
        let number = self.kept.next().checked_sub(1)?;
        let (whole, _) = subscribe(&self.engine, 1).await.ok()?;
        let batch = wire::encode(&whole, &self.engine);
        Some(Snapshot { number, batch, made: Instant::now() })
    }
}

/// The identity of a client, and the first number that it requests.
fn parse(request: &Message) -> Option<(Bytes, u64)> {
    if request.len() != 3 || !request.part_bytes(1)?.is_empty() {
        return None;
    }
    let number: [u8; 8] = request.part_bytes(2)?[..].try_into().ok()?;
    Some((request.part_bytes(0)?, u64::from_be_bytes(number)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the last batches are kept, and a number before them is known to be too old.
    #[test]
    fn the_last_batches_are_kept() {
        let kept = Kept::new(2);
        assert_eq!(kept.since(0), Some(Vec::new()));
        let batch = |byte: u8| Bytes::from(vec![byte]);
        for number in 0..5 {
            assert_eq!(kept.add(&batch(number as u8)), number);
        }
        assert_eq!(kept.since(2), None);
        assert_eq!(kept.since(3), Some(vec![(3, batch(3)), (4, batch(4))]));
        assert_eq!(kept.since(4), Some(vec![(4, batch(4))]));
        assert_eq!(kept.since(5), Some(Vec::new()));
        assert_eq!(kept.since(END), Some(Vec::new()));
    }

    /// Goal: the memory of large batches is bounded, too.
    #[test]
    fn bytes_are_bounded() {
        let kept = Kept::new(1000);
        let large = Bytes::from(vec![0; KEPT_BYTES_MAX / 2]);
        for _ in 0..3 {
            kept.add(&large);
        }
        assert_eq!(kept.since(1).map(|batches| batches.len()), Some(2));
        kept.add(&Bytes::from(vec![0; KEPT_BYTES_MAX + 1]));
        assert_eq!((kept.since(3), kept.since(4)), (None, Some(Vec::new())));
    }
}
