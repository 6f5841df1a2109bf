//! The channel that carries a request's events from the scheduler to the caller.
//!
//! It is bounded, has one sender and one receiver, and never makes the sender wait:
//!
//! 1. Before the scheduler includes a sequence in a step, it asks [`EventSender::has_room`]. A few
//!    places are always kept free, so that the events of one step fit. If there is no room, the
//!    sequence is paused: it takes part in no step until the reader catches up.
//! 2. When the reader has drained the channel to half its capacity, the receiver reports once that
//!    the sequence should be resumed.
//! 3. Dropping the receiver closes the channel; the scheduler then cancels the sequence.
//!
//! All state is behind one mutex that is held for a few instructions, so a pause that races with a
//! read cannot be lost: whichever comes second sees what the other did. `loom_tests` checks this.

use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

#[cfg(loom)]
use crate::sync::planted;
use crate::sync::{Arc, Mutex, lock};
use crate::{EngineError, Event};

/// Places kept free for the events of one step: start, prompt log-probabilities, token or
/// embedding, end, and an error.
pub const RESERVED_EVENTS: usize = 5;

type Item = Result<Event, EngineError>;

#[derive(Debug)]
struct State {
    events: VecDeque<Item>,
    /// Maximum length of `events`.
    capacity: usize,
    /// The sender found no room; the reader must resume the sequence.
    paused: bool,
    sender_dropped: bool,
    receiver_dropped: bool,
    /// The reader has all that it wants; see [`EventReceiver::complete`].
    complete: bool,
    /// Wakes the reader's task.
    waker: Option<Waker>,
}

/// The scheduler's end of the channel.
#[derive(Debug)]
pub struct EventSender {
    state: Arc<Mutex<State>>,
}

/// The caller's end of the channel.
#[derive(Debug)]
pub struct EventReceiver {
    state: Arc<Mutex<State>>,
}

/// An event that was read, and whether the scheduler must be told to resume the sequence.
#[derive(Debug)]
pub struct Received {
    /// The event; `None` if the sender was dropped and all events were read.
    pub event: Option<Item>,
    /// The sequence was paused and the channel has room again.
    pub resume: bool,
}

/// Makes a channel that holds at most `capacity` events.
pub fn event_channel(capacity: usize) -> (EventSender, EventReceiver) {
    let state = Arc::new(Mutex::new(State {
        events: VecDeque::new(),
        capacity,
        paused: false,
        sender_dropped: false,
        receiver_dropped: false,
        complete: false,
        waker: None,
    }));
    (EventSender { state: Arc::clone(&state) }, EventReceiver { state })
}

impl EventSender {
    /// Sends an event without waiting. Returns false if the receiver was dropped or the channel is
    /// full; the latter does not happen after [`EventSender::has_room`] returned true.
    pub fn send(&self, event: Item) -> bool {
        let mut state = lock(&self.state);
        if state.receiver_dropped || state.events.len() >= state.capacity {
            return false;
        }
        state.events.push_back(event);
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }

    /// Whether the events of one more step fit. If not, the sequence counts as paused until the
    /// receiver reports [`Received::resume`].
    pub fn has_room(&self) -> bool {
        let mut state = lock(&self.state);
        let len = state.events.len();
        #[cfg(loom)]
        if planted::is(planted::Bug::StaleLength) {
            drop(state);
            state = lock(&self.state);
        }
        state.paused = len + RESERVED_EVENTS > state.capacity;
        !state.paused
    }

    /// Number of events that fit in addition to those of one more step.
    pub(crate) fn room(&self) -> usize {
        let state = lock(&self.state);
        state.capacity.saturating_sub(state.events.len() + RESERVED_EVENTS)
    }

    /// Whether the reader ended the request because it was complete.
    pub(crate) fn is_complete(&self) -> bool {
        lock(&self.state).complete
    }

    /// Whether the receiver was dropped.
    pub fn is_closed(&self) -> bool {
        lock(&self.state).receiver_dropped
    }

    /// Number of events that were sent and not read, for the loom models.
    #[cfg(loom)]
    pub fn queued(&self) -> usize {
        lock(&self.state).events.len()
    }
}

impl Drop for EventSender {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        state.sender_dropped = true;
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl EventReceiver {
    /// Reads the next event. If there is none, the task of `context` is woken when one arrives.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<Received> {
        let mut state = lock(&self.state);
        match state.take() {
            Some(received) => Poll::Ready(received),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Ends the request because the reader has all that it wants, for example up to a stop string.
    /// The request then counts as finished and not as canceled.
    pub fn complete(&self) {
        lock(&self.state).complete = true;
    }

    /// Reads the next event if there is one.
    pub fn try_next(&mut self) -> Option<Received> {
        lock(&self.state).take()
    }
}

impl State {
    /// `None` if an event may still come.
    fn take(&mut self) -> Option<Received> {
        let event = self.events.pop_front();
        if event.is_none() && !self.sender_dropped {
            return None;
        }
        let drained = self.events.len() <= self.capacity / 2;
        Some(Received { event, resume: drained && std::mem::take(&mut self.paused) })
    }
}

impl Drop for EventReceiver {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        state.receiver_dropped = true;
        state.events.clear();
    }
}
