//! `GET /v1/cache/events`: the changes of the prefix cache as server-sent events, after a snapshot.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::State;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream;
use stolon::{CacheEvent, CacheEvents, NumberedEvent};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::api::cache::{EventData, EventsQuery};
use crate::handlers::app::App;
use crate::wire::error::ApiError;
use crate::wire::parts::Query;

/// Maximum number of concurrent streams: each has a queue in the engine, and a copy of the tree at
/// its beginning.
const MAX_STREAMS: usize = 8;
/// Maximum number of events that wait for one client. A slower client gets a reset.
const QUEUE: usize = 1024;

/// The streams of a router.
#[derive(Debug)]
pub(crate) struct EventStreams {
    permits: Arc<Semaphore>,
    /// Dropped with the router, when the server stops. The streams would never end otherwise.
    alive: watch::Sender<()>,
}

impl EventStreams {
    pub(crate) fn new() -> Self {
        Self { permits: Arc::new(Semaphore::new(MAX_STREAMS)), alive: watch::channel(()).0 }
    }
}

/// The handler.
pub(crate) async fn events(
    State(app): State<Arc<App>>,
    Query(query): Query<EventsQuery>,
) -> Result<Response, ApiError> {
    let permit = Arc::clone(&app.event_streams.permits).try_acquire_owned().map_err(|_| {
        let message = format!("{MAX_STREAMS} clients read the events already");
        ApiError::unavailable(message, std::time::Duration::from_secs(5))
    })?;
    let mut live = app.engine.cache().events(QUEUE).await?;
    let mut snapshot = live.take_snapshot();
    if !query.snapshot {
        snapshot.events = Vec::new();
    }
    let events = EventStream {
        first: Some(EventData::Snapshot { number: snapshot.number, runs: snapshot.events.len() }),
        snapshot: snapshot.events.into(),
        number: snapshot.number,
        live,
        tokens: query.tokens,
        alive: app.event_streams.alive.subscribe(),
        ended: false,
        _permit: permit,
    };
    drop(app);
    let events = stream::unfold(events, |mut events| async move {
        let data = events.next().await?;
        Some((Ok::<_, Infallible>(event(&data)), events))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()).into_response())
}

fn event(data: &EventData) -> sse::Event {
    let json = serde_json::to_string(data).expect("numbers and strings cannot fail to serialize");
    sse::Event::default().event(data.name()).data(json)
}

/// One client's stream.
struct EventStream {
    /// The event that announces the snapshot, until it is sent.
    first: Option<EventData>,
    /// Events of the snapshot that have not been sent.
    snapshot: VecDeque<CacheEvent>,
    /// Number of the last event that the snapshot includes.
    number: u64,
    live: CacheEvents,
    tokens: bool,
    /// Yields an error when the server stops.
    alive: watch::Receiver<()>,
    ended: bool,
    _permit: OwnedSemaphorePermit,
}

impl EventStream {
    async fn next(&mut self) -> Option<EventData> {
        if self.ended {
            return None;
        }
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        let event = match self.snapshot.pop_front() {
            Some(event) => NumberedEvent { number: self.number, event },
            None => tokio::select! {
                event = self.live.next() => event?,
                _ = self.alive.changed() => return None,
            },
        };
        self.ended = matches!(event.event, CacheEvent::Reset { .. });
        Some(EventData::new(event, self.tokens))
    }
}

impl EventData {
    fn new(NumberedEvent { number, event }: NumberedEvent, tokens: bool) -> Self {
        let hex = |hash: u64| format!("{hash:016x}");
        let all = |hashes: Vec<u64>| hashes.into_iter().map(hex).collect();
        match event {
            CacheEvent::Stored { namespace, parent, hashes, positions } => Self::Stored {
                number,
                namespace: format!("{namespace:?}"),
                parent: parent.map(hex),
                hashes: all(hashes),
                token_ids: tokens.then_some(positions),
            },
            CacheEvent::Removed { hashes } => Self::Removed { number, hashes: all(hashes) },
            CacheEvent::Cleared => Self::Cleared { number },
            CacheEvent::Reset { missed } => Self::Reset { number, missed },
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Snapshot { .. } => "snapshot",
            Self::Stored { .. } => "stored",
            Self::Removed { .. } => "removed",
            Self::Cleared { .. } => "cleared",
            Self::Reset { .. } => "reset",
        }
    }
}
