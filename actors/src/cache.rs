//! What callers get to see of the prefix cache: pins and the stream of changes.

use std::pin::Pin as Pinned;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use stolon_kvcache::{CacheSnapshot, EventReceiver, NumberedEvent, PinId};

/// A pinned prefix: it is not evicted until the pin ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pin {
    /// Identifies the pin.
    pub id: PinId,
    /// Number of pinned tokens from the start of the prompt: whole blocks.
    pub tokens: usize,
    /// Number of pinned blocks. Blocks shared with another pin count for both.
    pub blocks: usize,
    /// Remaining time to live; `None` if it has no limit.
    pub ends_in: Option<Duration>,
}

/// The changes of the prefix cache, in order. A router can use them to keep a copy of the tree.
///
/// Event numbers have no gaps. The queue is bounded: a reader that is too slow finds a reset event
/// in place of the events it missed and should subscribe again. The stream ends when the engine
/// stops or restarts.
#[derive(Debug)]
pub struct CacheEvents {
    pub(crate) snapshot: CacheSnapshot,
    pub(crate) receiver: EventReceiver,
}

impl CacheEvents {
    /// The content of the cache when the subscription began, as events that would build it.
    pub fn snapshot(&self) -> &CacheSnapshot {
        &self.snapshot
    }

    /// The next change; `None` at the end.
    pub async fn next(&mut self) -> Option<NumberedEvent> {
        std::future::poll_fn(|context| self.receiver.poll_next(context)).await
    }
}

impl Stream for CacheEvents {
    type Item = NumberedEvent;

    fn poll_next(
        self: Pinned<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<NumberedEvent>> {
        self.get_mut().receiver.poll_next(context)
    }
}
