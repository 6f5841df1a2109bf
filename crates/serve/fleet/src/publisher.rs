//! [`KvEventPublisher`]: publishes the changes of an engine's prefix cache and disk tier.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use omq_tokio::{
    DisconnectReason, Endpoint, Message, MonitorEvent, MonitorRecvError, MonitorStream, Options,
    Socket, SocketType,
};
use stolon::{Engine, Error};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::config::{ConfigError, KvEventsConfig};
use crate::feed::{CacheBatch, CacheFeed};
use crate::replay::{Kept, Replay};
use crate::wire;

/// Maximum size of a message that a subscriber or a client of replays may send, in bytes.
const RECEIVED_MAX: usize = 64 << 10;
/// Minimum time between two batches that are published because somebody has subscribed.
const ANNOUNCEMENTS: Duration = Duration::from_millis(100);
/// Time for which changes are gathered after a batch was sent: each batch wakes threads, which take
/// processor time from those that compute.
const GATHERING: Duration = Duration::from_millis(5);
/// A peer that takes nothing for this long is disconnected.
const STALLED: Duration = Duration::from_secs(30);

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

/// Counts of a publisher's work since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvEventCounts {
    /// Number of batches.
    pub batches: u64,
    /// Number of events in them.
    pub events: u64,
    /// How often everything was published: at the start, when the engine restarted, when events
    /// came faster than they could be published, and, if there is a disk tier, when it or the cache
    /// was cleared.
    pub snapshots: u64,
    /// Number of requests for a replay.
    pub replays: u64,
    /// Number of batches that were sent again in replies to them. A subscriber that was too slow
    /// has lost these, or was not there when they were published.
    pub replayed: u64,
    /// Number of subscribers whose connection was ended because they took nothing for 30 seconds,
    /// or failed. Those that left by themselves do not count.
    pub lost_subscribers: u64,
}

/// The counters behind [`KvEventCounts`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    batches: Counter,
    events: Counter,
    snapshots: Counter,
    pub(crate) replays: Counter,
    pub(crate) replayed: Counter,
    lost_subscribers: Counter,
}

impl Counters {
    fn read(&self) -> KvEventCounts {
        KvEventCounts {
            batches: self.batches.get(),
            events: self.events.get(),
            snapshots: self.snapshots.get(),
            replays: self.replays.get(),
            replayed: self.replayed.get(),
            lost_subscribers: self.lost_subscribers.get(),
        }
    }
}

/// Reads the counters of a publisher, also after the publisher has ended.
#[derive(Clone, Debug)]
pub struct KvEventCounters(Arc<Counters>);

impl KvEventCounters {
    /// The present counts.
    #[must_use]
    pub fn read(&self) -> KvEventCounts {
        self.0.read()
    }
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

/// Publishes the changes of an engine's prefix cache and disk tier until it is dropped or the
/// engine stops. It keeps the engine alive, as a clone does.
#[derive(Debug)]
pub struct KvEventPublisher {
    endpoint: String,
    replay_endpoint: Option<String>,
    counters: Arc<Counters>,
    tasks: Vec<JoinHandle<()>>,
}

impl KvEventPublisher {
    /// Binds the sockets and publishes the stored blocks, as `AllBlocksCleared` and `BlockStored`.
    /// The changes are then published by a task on the tokio runtime of the caller.
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
        let joined = Arc::new(Notify::new());
        let watching = watch(socket.monitor(), Arc::clone(&counters), Arc::clone(&joined));
        let mut feed = CacheFeed::open(engine, config.max_queue_size).await?;
        let publishing = Publishing {
            engine: engine.clone(),
            kept: Arc::clone(&kept),
            counters: Arc::clone(&counters),
            topic: topic.clone(),
            socket,
            joined,
        };
        // The content is there already. A request for a replay finds it from now on.
        if let Some(whole) = feed.next().await {
            publishing.publish(&whole).await;
        }
        let tasks = vec![tokio::spawn(publishing.run(feed)), tokio::spawn(watching)];
        let mut publisher =
            Self { endpoint, replay_endpoint: None, counters: Arc::clone(&counters), tasks };
        if let Some(endpoint) = &config.replay_endpoint {
            // A full queue makes the reply wait, and a client that has gone is an error.
            let options = options(config.hwm).router_mandatory(true);
            let socket = Socket::new(SocketType::Router, options);
            publisher.replay_endpoint = Some(bind(&socket, endpoint).await?);
            let engine = engine.clone();
            let replay = Replay::new(engine, kept, counters, topic, socket);
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

    /// The present counts.
    #[must_use]
    pub fn counts(&self) -> KvEventCounts {
        self.counters.read()
    }

    /// The counters, to be read without the publisher.
    #[must_use]
    pub fn counters(&self) -> KvEventCounters {
        KvEventCounters(Arc::clone(&self.counters))
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

/// Watches the connections of the PUB socket. Reports subscriptions, and counts subscribers that
/// are disconnected because they take nothing or fail.
async fn watch(mut events: MonitorStream, counters: Arc<Counters>, joined: Arc<Notify>) {
    loop {
        match events.recv().await {
            Ok(MonitorEvent::SubscribeReceived { .. }) => joined.notify_one(),
            Ok(MonitorEvent::Disconnected {
                peer, reason: DisconnectReason::Error(cause), ..
            }) => {
                counters.lost_subscribers.add(1);
                let address = peer.peer_address;
                tracing::warn!(?address, cause, "a subscriber of KV events was disconnected");
            }
            Ok(_) => {}
            // Events of this socket were missed, perhaps a subscription; the next ones follow.
            Err(MonitorRecvError::Lagged(_)) => joined.notify_one(),
            Err(_) => return,
        }
    }
}

/// The task that publishes.
struct Publishing {
    engine: Engine,
    kept: Arc<Kept>,
    counters: Arc<Counters>,
    topic: Bytes,
    socket: Socket,
    /// Notified when somebody has subscribed.
    joined: Arc<Notify>,
}

impl Publishing {
    /// Publishes the changes until the engine stops.
    async fn run(self, mut feed: CacheFeed) {
        let mut earliest = Instant::now();
        loop {
            let joined = async {
                self.joined.notified().await;
                tokio::time::sleep_until(earliest).await;
            };
            tokio::select! {
                batch = feed.next() => match batch {
                    Some(batch) => {
                        self.publish(&batch).await;
                        tokio::time::sleep(GATHERING).await;
                    }
                    None => return,
                },
                () = joined => {
                    // Without events. A subscriber learns the number of the last batch from it, and
                    // requests what it has missed. If nothing changes in the cache, it would
                    // otherwise know nothing.
                    self.publish(&CacheBatch::default()).await;
                    earliest = Instant::now() + ANNOUNCEMENTS;
                }
            }
        }
    }

    async fn publish(&self, batch: &CacheBatch) {
        self.counters.batches.add(1);
        self.counters.events.add((batch.events.len() + batch.disk.len()) as u64);
        self.counters.snapshots.add(u64::from(batch.is_whole));
        let payload = wire::encode(batch, &self.engine);
        let number = Bytes::copy_from_slice(&self.kept.add(&payload).to_be_bytes());
        let message = Message::multipart([self.topic.clone(), number, payload]);
        // Never waits for a subscriber. Fails only if the socket was closed.
        if let Err(error) = self.socket.send(message).await {
            tracing::warn!(%error, "a batch of KV events was not published");
        }
    }
}
