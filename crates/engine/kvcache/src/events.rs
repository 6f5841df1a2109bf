//! Events: what enters and leaves the index, in order, for subscribers that keep a copy of it. (A
//! router in front of several engines does so.) The writer appends to a bounded queue and never
//! waits. When a subscriber's queue is full, all queued events are replaced by one
//! [`CacheEvent::Reset`].
//!
//! Order: a block is reported as stored after its parent and after its commit. It is reported as
//! removed before the writer returns its id, so before the block can be reused.

use crate::Namespace;
use crate::sync::{Arc, Mutex, lock};
use std::collections::VecDeque;
use std::sync::mpsc::RecvTimeoutError;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// One change of the set of cached blocks. Splits and merges of nodes are not reported, because
/// they do not change which blocks are cached.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum CacheEvent {
    /// A run of consecutive blocks was added.
    Stored {
        /// The namespace of the blocks.
        namespace: Namespace,
        /// Hash of the block before the first one; `None` at the start of a sequence.
        parent: Option<u64>,
        /// The chained hash of each block, as
        /// [`TreeReader::block_hashes`](crate::TreeReader::block_hashes) computes it.
        hashes: Vec<u64>,
        /// The positions of the blocks: block size times `hashes.len()` of them.
        positions: Vec<u32>,
    },
    /// Blocks were removed.
    Removed {
        /// The chained hashes of the blocks, a block always before its ancestors. The hashes
        /// differ between namespaces.
        hashes: Vec<u64>,
    },
    /// All blocks were removed.
    Cleared,
    /// The subscriber was too slow, and events were dropped. Its copy of the index is out of date.
    /// [`TreeWriter::snapshot`](crate::TreeWriter::snapshot) returns a new one.
    Reset {
        /// Number of events that were dropped.
        missed: u64,
    },
}

/// An event with its sequence number. The numbers have no gaps. A [`CacheEvent::Reset`] has the
/// number of the last event that it replaces.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct NumberedEvent {
    /// The sequence number, counted from 1 in each tree.
    pub number: u64,
    /// The event.
    pub event: CacheEvent,
}

#[derive(Debug)]
struct Queue {
    events: VecDeque<NumberedEvent>,
    capacity: usize,
    /// Whether the receiver or the tree's writer was dropped.
    closed: bool,
    /// The waker of the task that waits for the next event.
    waiting: Option<Waker>,
}

/// The receiving end of a subscription, created by
/// [`TreeWriter::subscribe`](crate::TreeWriter::subscribe) and [`EventLog::subscribe`]. It may be
/// used on any thread. Dropping it ends the subscription.
///
/// A task waits with [`poll_next`](EventReceiver::poll_next), a thread with
/// [`recv`](EventReceiver::recv).
#[derive(Debug)]
pub struct EventReceiver {
    queue: Arc<Mutex<Queue>>,
}

impl EventReceiver {
    /// Takes the oldest queued event, if there is one.
    pub fn try_next(&self) -> Option<NumberedEvent> {
        lock(&self.queue).events.pop_front()
    }

    /// Polls for the next event. Ready with `None` when the tree's writer was dropped and the queue
    /// is empty. Only the task that polled last is woken.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<NumberedEvent>> {
        let mut queue = lock(&self.queue);
        if let Some(event) = queue.events.pop_front() {
            return Poll::Ready(Some(event));
        }
        if queue.closed {
            return Poll::Ready(None);
        }
        queue.waiting = Some(context.waker().clone());
        Poll::Pending
    }

    /// Waits for the next event and blocks the thread meanwhile. `None` when the tree's writer was
    /// dropped and the queue is empty.
    pub fn recv(&mut self) -> Option<NumberedEvent> {
        self.recv_until(None).ok()
    }

    /// As [`recv`](EventReceiver::recv), but waits for at most `timeout`.
    ///
    /// # Errors
    ///
    /// [`RecvTimeoutError::Timeout`] after that time, and [`RecvTimeoutError::Disconnected`] when
    /// the tree's writer was dropped and the queue is empty.
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<NumberedEvent, RecvTimeoutError> {
        // A time that an `Instant` cannot hold never comes.
        self.recv_until(Instant::now().checked_add(timeout))
    }

    fn recv_until(&mut self, end: Option<Instant>) -> Result<NumberedEvent, RecvTimeoutError> {
        let waker = Waker::from(std::sync::Arc::new(Unpark(thread::current())));
        let mut context = Context::from_waker(&waker);
        loop {
            if let Poll::Ready(event) = self.poll_next(&mut context) {
                return event.ok_or(RecvTimeoutError::Disconnected);
            }
            match end.map(|end| end.saturating_duration_since(Instant::now())) {
                None => thread::park(),
                Some(Duration::ZERO) => return Err(RecvTimeoutError::Timeout),
                Some(left) => thread::park_timeout(left),
            }
        }
    }

    /// Takes all queued events, oldest first.
    pub fn drain(&self) -> Vec<NumberedEvent> {
        lock(&self.queue).events.drain(..).collect()
    }
}

/// Wakes a thread that is parked.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.unpark();
    }
}

impl Drop for EventReceiver {
    fn drop(&mut self) {
        lock(&self.queue).closed = true;
    }
}

/// The writer's side of subscriptions: numbers the events and copies them to all subscribers. The
/// tree has one; other stores of blocks use it to report theirs in the same form.
#[derive(Debug, Default)]
pub struct EventLog {
    /// Number of the last event.
    last: u64,
    queues: Vec<Arc<Mutex<Queue>>>,
}

impl EventLog {
    /// Subscribes to all events from now on, with a queue of `capacity` events, at least 1.
    pub fn subscribe(&mut self, capacity: usize) -> EventReceiver {
        let capacity = capacity.max(1);
        let queue = Queue { events: VecDeque::new(), capacity, closed: false, waiting: None };
        let queue = Arc::new(Mutex::new(queue));
        self.queues.push(queue.clone());
        EventReceiver { queue }
    }

    /// Number of the last event; 0 before the first.
    pub fn last(&self) -> u64 {
        self.last
    }

    /// Counts one event, and sends what `event` returns to all subscribers, if there are any.
    pub fn report(&mut self, event: impl FnOnce() -> CacheEvent) {
        self.last += 1;
        if self.queues.is_empty() {
            return;
        }
        let number = self.last;
        let event = event();
        self.queues.retain(|queue| {
            let mut queue = lock(queue);
            if queue.closed {
                return false;
            }
            queue.push(NumberedEvent { number, event: event.clone() });
            let waiting = queue.waiting.take();
            drop(queue);
            // After the lock is released, because a waker may run the task at once.
            waiting.into_iter().for_each(Waker::wake);
            true
        });
    }
}

impl Drop for EventLog {
    fn drop(&mut self) {
        for queue in &self.queues {
            let mut queue = lock(queue);
            queue.closed = true;
            let waiting = queue.waiting.take();
            drop(queue);
            waiting.into_iter().for_each(Waker::wake);
        }
    }
}

impl Queue {
    fn push(&mut self, event: NumberedEvent) {
        if self.events.len() < self.capacity {
            self.events.push_back(event);
            return;
        }
        // An earlier reset in the queue counts for the events that it replaced.
        let dropped = self.events.drain(..).map(|old| match old.event {
            CacheEvent::Reset { missed } => missed,
            _ => 1,
        });
        let missed = dropped.sum::<u64>() + 1;
        self.events
            .push_back(NumberedEvent { number: event.number, event: CacheEvent::Reset { missed } });
    }
}
