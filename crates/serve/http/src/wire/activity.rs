//! Whether a connection is receiving a request or is busy with a complete one.
//!
//! The listener adds an [`Activity`] to each request, and the handlers that read a body report its
//! end there. Requests of an application that has mounted the router itself have none.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// What a connection is doing.
#[derive(Debug)]
pub(crate) struct Activity {
    /// When the connection began to receive; `None` while it is busy.
    receiving_since: Mutex<Option<Instant>>,
    /// Notified when the connection has to be closed.
    end: Notify,
}

#[cfg_attr(not(feature = "listen"), allow(dead_code, reason = "made and read by the listener"))]
impl Activity {
    /// The activity of a connection that has just been opened.
    pub(crate) fn new() -> Arc<Self> {
        let receiving_since = Mutex::new(Some(Instant::now()));
        Arc::new(Self { receiving_since, end: Notify::new() })
    }

    /// The request has been received completely.
    pub(crate) fn busy(&self) {
        self.set(None);
    }

    /// The reply has been sent, so that the next request may come.
    pub(crate) fn receive(&self) {
        self.set(Some(Instant::now()));
    }

    /// Closes the connection, for a client that takes a reply too slowly.
    pub(crate) fn end(&self) {
        self.end.notify_one();
    }

    /// Waits until the connection has to be closed.
    pub(crate) async fn ended(&self) {
        self.end.notified().await;
    }

    fn set(&self, since: Option<Instant>) {
        *self.receiving_since.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }

    /// How long the connection has been receiving; `None` while it is busy.
    pub(crate) fn receiving(&self) -> Option<Duration> {
        let since = *self.receiving_since.lock().unwrap_or_else(PoisonError::into_inner);
        since.map(|since| since.elapsed())
    }
}
