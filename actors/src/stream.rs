//! The channel between a sequence and its caller: bounded, pausing, cancelled by dropping.
//!
//! 1. The sender keeps a few places of the channel in reserve, so that a sequence's last events
//!    always fit. When the rest is full, the sequence is paused: it takes part in no step.
//! 2. The reader, once it has read half of what was there, sends `Resume`.
//! 3. Dropping the reader before the end sends `Cancel`.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::task::{Context, Poll};

use futures::Stream;
use ractor::ActorRef;
use tokio::sync::mpsc;

use crate::admission::AdmissionMessage;
use crate::error::CoreError;
use crate::handle::Shared;
use crate::request::SequenceEvent;
use crate::supervisor::Generation;

/// Places kept free for a step's events: start, prompt log-probabilities, token, end, an error.
const PLACES_KEPT: usize = 5;

/// The scheduler's end.
#[derive(Debug)]
pub(crate) struct EventSender {
    channel: mpsc::Sender<Result<SequenceEvent, CoreError>>,
    /// Set by the sender when it pauses, cleared by the reader when it asks to go on.
    paused: Arc<AtomicBool>,
}

/// The caller's end, before it is tied to an engine.
#[derive(Debug)]
pub(crate) struct EventReceiver {
    channel: mpsc::Receiver<Result<SequenceEvent, CoreError>>,
    paused: Arc<AtomicBool>,
}

/// A channel of `capacity` events.
pub(crate) fn event_channel(capacity: usize) -> (EventSender, EventReceiver) {
    let (sender, receiver) = mpsc::channel(capacity);
    let paused = Arc::new(AtomicBool::new(false));
    let sender = EventSender { channel: sender, paused: Arc::clone(&paused) };
    (sender, EventReceiver { channel: receiver, paused })
}

impl EventSender {
    /// Sends an event; whether anybody will read it. Never waits: callers ask
    /// [`EventSender::has_room`] before they do what leads to events.
    pub(crate) fn send(&self, event: Result<SequenceEvent, CoreError>) -> bool {
        self.channel.try_send(event).is_ok()
    }

    /// Whether the events of one more step fit. If not, the reader will ask to go on.
    pub(crate) fn has_room(&self) -> bool {
        if self.channel.capacity() >= PLACES_KEPT {
            return true;
        }
        self.paused.store(true, Ordering::Relaxed);
        // Pairs with the fence in `EventReceiver::poll`: either this thread sees the places
        // that the reader has freed, or the reader sees `paused`.
        fence(Ordering::SeqCst);
        let room = self.channel.capacity() >= PLACES_KEPT;
        if room {
            self.paused.store(false, Ordering::Relaxed);
        }
        room
    }

    /// Whether the reader is gone.
    pub(crate) fn is_closed(&self) -> bool {
        self.channel.is_closed()
    }
}

impl EventReceiver {
    /// The next event, and whether the sequence is to be told to go on.
    pub(crate) fn poll(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<(Option<Result<SequenceEvent, CoreError>>, bool)> {
        self.channel.poll_recv(context).map(|event| (event, self.resumes()))
    }

    /// The next event if there is one, and whether the sequence is to be told to go on. Unlike
    /// [`EventReceiver::poll`] it gives all there is to a task that never yields to its runtime.
    pub(crate) fn try_next(&mut self) -> Option<(Result<SequenceEvent, CoreError>, bool)> {
        let event = self.channel.try_recv().ok()?;
        Some((event, self.resumes()))
    }

    fn resumes(&self) -> bool {
        fence(Ordering::SeqCst);
        let drained = self.channel.len() <= self.channel.max_capacity() / 2;
        drained && self.paused.load(Ordering::Relaxed) && self.paused.swap(false, Ordering::Relaxed)
    }
}

/// A sequence's events, owned by the caller. Dropping it cancels the sequence.
#[derive(Debug)]
pub struct SequenceStream {
    id: u64,
    events: EventReceiver,
    generation: Arc<Generation>,
    /// Keeps the engine alive while somebody reads.
    shared: Arc<Shared>,
    ended: bool,
}

impl SequenceStream {
    pub(crate) fn new(
        id: u64,
        events: EventReceiver,
        generation: Arc<Generation>,
        shared: Arc<Shared>,
    ) -> SequenceStream {
        SequenceStream { id, events, generation, shared, ended: false }
    }

    /// The next event; `None` after the end.
    pub async fn next(&mut self) -> Option<Result<SequenceEvent, CoreError>> {
        std::future::poll_fn(|context| Pin::new(&mut *self).poll_next(context)).await
    }

    fn admission(&self) -> &ActorRef<AdmissionMessage> {
        &self.generation.admission
    }
}

impl Stream for SequenceStream {
    type Item = Result<SequenceEvent, CoreError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let (event, resume) = std::task::ready!(self.events.poll(context));
        if resume {
            // A core that is gone needs no telling.
            let _ = self.admission().cast(AdmissionMessage::Resume);
        }
        let event = event.unwrap_or_else(|| Err(self.shared.why_gone(&self.generation)));
        self.ended = matches!(event, Err(_) | Ok(SequenceEvent::Finished(_)));
        Poll::Ready(Some(event))
    }
}

impl Drop for SequenceStream {
    fn drop(&mut self) {
        if !self.ended {
            // A core that is gone has nothing left to cancel.
            let _ = self.admission().cast(AdmissionMessage::Cancel(self.id));
        }
    }
}
