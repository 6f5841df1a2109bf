//! Events: what enters and leaves the index, for those who keep a copy of it elsewhere (a router
//! in front of several engines, say). The writer appends, never waits; a subscriber that falls
//! too far behind loses the queue and is told so.
//!
//! Order: a block's parent is stored before the block; a block is stored only after it was
//! committed; it is removed before the writer gives it back, so before anyone reuses it.

use crate::Namespace;
use crate::sync::{Arc, Mutex, lock};
use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

/// One change of the index. Splits and merges of nodes are no changes: blocks stay what they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// A run of blocks entered.
    Stored {
        /// Where.
        namespace: Namespace,
        /// Hash of the block before the first one; `None` at the start of a sequence.
        parent: Option<u64>,
        /// Chained hashes, one a block.
        hashes: Vec<u64>,
        /// The blocks' positions: `hashes.len()` x block size.
        positions: Vec<u32>,
    },
    /// Blocks left, by their chained hashes, which include the namespace.
    Removed {
        /// The hashes, descendants never after their ancestors are gone.
        hashes: Vec<u64>,
    },
    /// Everything left.
    Cleared,
    /// The subscriber was too slow: this many events were dropped. Its copy is worth nothing any
    /// more; [`TreeWriter::snapshot`](crate::TreeWriter::snapshot) gives a new one.
    Reset {
        /// Events dropped.
        missed: u64,
    },
}

/// An event and its number. Numbers have no gaps; a `Reset` has the number of the last event that
/// it stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumberedEvent {
    /// Counts up from 1 in each tree.
    pub number: u64,
    /// What happened.
    pub event: CacheEvent,
}

#[derive(Debug)]
struct Queue {
    events: VecDeque<NumberedEvent>,
    capacity: usize,
    /// Whether the receiver or the tree is gone.
    closed: bool,
    /// Who waits for the next event.
    waiting: Option<Waker>,
}

/// The receiving end of one subscription. May live on any thread.
#[derive(Debug)]
pub struct EventReceiver {
    queue: Arc<Mutex<Queue>>,
}

impl EventReceiver {
    /// Takes the oldest event that waits.
    pub fn try_next(&self) -> Option<NumberedEvent> {
        lock(&self.queue).events.pop_front()
    }

    /// The next event, for async callers: `None` when the tree's writer is gone and nothing waits.
    /// Only the task that polled last is woken.
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

    /// Takes all events that wait, oldest first.
    pub fn drain(&self) -> Vec<NumberedEvent> {
        lock(&self.queue).events.drain(..).collect()
    }
}

impl Drop for EventReceiver {
    fn drop(&mut self) {
        lock(&self.queue).closed = true;
    }
}

/// The writer's side: numbers events and copies them to all subscribers.
#[derive(Debug, Default)]
pub(crate) struct EventLog {
    last: u64,
    queues: Vec<Arc<Mutex<Queue>>>,
}

impl EventLog {
    pub(crate) fn subscribe(&mut self, capacity: usize) -> EventReceiver {
        let queue = Queue { events: VecDeque::new(), capacity, closed: false, waiting: None };
        let queue = Arc::new(Mutex::new(queue));
        self.queues.push(queue.clone());
        EventReceiver { queue }
    }

    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// Reports what `event` makes, if anyone listens.
    pub(crate) fn report(&mut self, event: impl FnOnce() -> CacheEvent) {
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
            // Without the lock, since a waker may run the task at once.
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
        // An earlier reset in the queue stands for what it stands for; all of it is dropped now.
        let dropped = self.events.drain(..).map(|old| match old.event {
            CacheEvent::Reset { missed } => missed,
            _ => 1,
        });
        let missed = dropped.sum::<u64>() + 1;
        self.events
            .push_back(NumberedEvent { number: event.number, event: CacheEvent::Reset { missed } });
    }
}
