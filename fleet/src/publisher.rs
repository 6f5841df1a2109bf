//! [`KvEventPublisher`]: publishes the changes of an engine's prefix cache.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use omq_tokio::{Endpoint, Message, Options, Socket, SocketType};
use stolon::{CacheEvent, CacheEvents, Engine, Error};
use tokio::task::JoinHandle;

use crate::config::{ConfigError, KvEventsConfig};
use crate::replay::{Kept, Replay};
use crate::wire;

/// Maximum number of events in a batch, but for those that describe the whole cache.
const BATCH_MAX: usize = 1024;
/// Maximum size of a message that a subscriber or a client of replays may send, in bytes.
const RECEIVED_MAX: usize = 64 << 10;
/// A peer that takes nothing for this long is disconnected.
const STALLED: Duration = Duration::from_secs(30);
/// Pause before an engine that restarts is asked again.
const PAUSE: Duration = Duration::from_millis(100);

/// Why events are not published.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// The configuration is refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Nothing is to be published: `enable_kv_cache_events` is false, or the publisher `null`.
    #[error("KV events: expected `enable_kv_cache_events`: true and the publisher \"zmq\"")]
    Disabled,
    /// The engine does not run.
    #[error(transparent)]
    Engine(#[from] Error),
    /// An address cannot be used.
    #[error("KV events: cannot use the address {endpoint}: {reason}")]
    Endpoint {
        /// The address.
        endpoint: String,
        /// The reason.
        reason: String,
    },
}

/// What a publisher has done since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvEventCounts {
    /// Number of batches.
    pub batches: u64,
    /// Number of events in them.
    pub events: u64,
    /// How often the whole cache was published: at the start, when the engine restarted, and when
    /// its events came faster than they could be published.
    pub snapshots: u64,
    /// Number of requests for a replay.
    pub replays: u64,
}

/// The counters behind [`KvEventCounts`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    batches: Counter,
    events: Counter,
    snapshots: Counter,
    pub(crate) replays: Counter,
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        // Statistics: no other memory depends on them.
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Publishes the changes of an engine's prefix cache until it is dropped or the engine stops. It
/// keeps the engine alive, as a clone does.
#[derive(Debug)]
pub struct KvEventPublisher {
    endpoint: String,
    replay_endpoint: Option<String>,
    counters: Arc<Counters>,
    tasks: Vec<JoinHandle<()>>,
}

impl KvEventPublisher {
    /// Binds the sockets and publishes the whole cache, as `AllBlocksCleared` and `BlockStored`.
    /// Its changes are then published by a task on the tokio runtime of the caller.
    ///
    /// # Errors
    /// [`PublishError`].
    pub async fn start(engine: &Engine, config: &KvEventsConfig) -> Result<Self, PublishError> {
        config.check()?;
        if !config.publishes() {
            return Err(PublishError::Disabled);
        }
        let kept = Arc::new(Kept::new(config.buffer_steps));
        let counters = Arc::new(Counters::default());
        let topic = Bytes::from(config.topic.clone());
        let socket = Socket::new(SocketType::Pub, options(config.hwm));
        let endpoint = if config.binds() {
            bind(&socket, &config.endpoint).await?
        } else {
            let to = parse(&config.endpoint)?;
            socket.connect(to).await.map_err(|error| refused(&config.endpoint, &error))?;
            config.endpoint.clone()
        };
        let publishing = Publishing {
            engine: engine.clone(),
            queue: config.max_queue_size,
            kept: Arc::clone(&kept),
            counters: Arc::clone(&counters),
            topic: topic.clone(),
            socket,
        };
        let events = publishing.begin().await?;
        let tasks = vec![tokio::spawn(publishing.run(events))];
        let mut publisher =
            Self { endpoint, replay_endpoint: None, counters: Arc::clone(&counters), tasks };
        if let Some(endpoint) = &config.replay_endpoint {
            // A full queue makes the reply wait, and a client that has gone is an error.
            let options = options(config.hwm).router_mandatory(true);
            let socket = Socket::new(SocketType::Router, options);
            publisher.replay_endpoint = Some(bind(&socket, endpoint).await?);
            let engine = engine.clone();
            let replay = Replay { engine, kept, counters, topic, socket, snapshot: None };
            publisher.tasks.push(tokio::spawn(replay.serve()));
        }
        tracing::info!(
            endpoint = publisher.endpoint,
            replay = publisher.replay_endpoint,
            "KV events are published"
        );
        Ok(publisher)
    }

    /// The address of the PUB socket, with the port that was chosen for port 0.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// The address of the ROUTER socket, likewise.
    #[must_use]
    pub fn replay_endpoint(&self) -> Option<&str> {
        self.replay_endpoint.as_deref()
    }

    /// What has been done so far.
    #[must_use]
    pub fn counts(&self) -> KvEventCounts {
        let Counters { batches, events, snapshots, replays } = &*self.counters;
        KvEventCounts {
            batches: batches.get(),
            events: events.get(),
            snapshots: snapshots.get(),
            replays: replays.get(),
        }
    }
}

impl Drop for KvEventPublisher {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

fn options(hwm: usize) -> Options {
    let hwm = u32::try_from(hwm).unwrap_or(u32::MAX);
    Options::new()
        .send_hwm(hwm)
        .max_message_size(RECEIVED_MAX)
        .tcp_user_timeout(STALLED)
        .heartbeat_interval(STALLED)
}

fn parse(endpoint: &str) -> Result<Endpoint, PublishError> {
    endpoint.parse().map_err(|error| refused(endpoint, &error))
}

async fn bind(socket: &Socket, endpoint: &str) -> Result<String, PublishError> {
    let bound = socket.bind(parse(endpoint)?).await.map_err(|error| refused(endpoint, &error))?;
    Ok(bound.to_string())
}

fn refused(endpoint: &str, error: &omq_tokio::Error) -> PublishError {
    PublishError::Endpoint { endpoint: endpoint.to_owned(), reason: error.to_string() }
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

/// The task that publishes.
struct Publishing {
    engine: Engine,
    queue: usize,
    kept: Arc<Kept>,
    counters: Arc<Counters>,
    topic: Bytes,
    socket: Socket,
}

impl Publishing {
    /// Publishes the changes that follow `events`, until the engine stops.
    async fn run(self, mut events: CacheEvents) {
        loop {
            self.follow(events).await;
            events = loop {
                match self.begin().await {
                    Ok(events) => break events,
                    Err(error) if error.is_retryable() => tokio::time::sleep(PAUSE).await,
                    Err(_) => return,
                }
            }
        }
    }

    /// Publishes what is cached. Returns the changes from then on.
    async fn begin(&self) -> Result<CacheEvents, Error> {
        let (batch, live) = subscribe(&self.engine, self.queue).await?;
        self.counters.snapshots.add(1);
        self.publish(&batch).await;
        Ok(live)
    }

    /// Publishes changes until the engine restarts or stops, or events were lost.
    async fn follow(&self, mut live: CacheEvents) {
        let mut batch = Vec::new();
        while let Some(first) = live.next().await {
            batch.clear();
            batch.push(first.event);
            while batch.len() < BATCH_MAX
                && let Some(Some(next)) = live.next().now_or_never()
            {
                batch.push(next.event);
            }
            if batch.iter().any(|event| matches!(event, CacheEvent::Reset { .. })) {
                return;
            }
            self.publish(&batch).await;
        }
    }

    async fn publish(&self, events: &[CacheEvent]) {
        let batch = wire::encode(events);
        let number = Bytes::copy_from_slice(&self.kept.add(&batch).to_be_bytes());
        self.counters.batches.add(1);
        self.counters.events.add(events.len() as u64);
        let message = Message::multipart([self.topic.clone(), number, batch]);
        // Never waits for a subscriber. Fails only if the socket was closed.
        if let Err(error) = self.socket.send(message).await {
            tracing::warn!(%error, "a batch of KV events was not published");
        }
    }
}
