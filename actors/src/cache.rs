//! The prefix cache as callers see it: pins and the stream of changes.

use std::pin::Pin as Pinned;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use stolon_kvcache::{CacheSnapshot, EventReceiver, Namespace, NumberedEvent, PinId};

/// The duration and the purpose of a pin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PinOptions {
    /// Time to live. `None` lasts until it is unpinned.
    pub ttl: Option<Duration>,
    /// Whether requests that use the prefix prolong its life: the pin ends `ttl` after its last use.
    pub refresh_on_hit: bool,
    /// The reason for the pin, in a word or two. It has no effect; [`Pin`] shows it.
    pub reason: Option<String>,
    /// A description of the prefix. It has no effect; [`Pin`] shows it.
    pub description: Option<String>,
}

/// A pinned prefix. Until the pin ends, it is not evicted or, if there is a disk tier, evicted last
/// and kept there.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pin {
    /// Identifies the pin.
    pub id: PinId,
    /// Whether it is a mark, which a request has made. Marks let their prefixes be evicted after
    /// everything else.
    pub is_mark: bool,
    /// The namespace of the prefix.
    pub namespace: Namespace,
    /// Number of pinned tokens from the start of the prompt: whole blocks.
    pub tokens: usize,
    /// Number of pinned blocks. Blocks shared with another pin count for both.
    pub blocks: usize,
    /// Whether blocks of the prefix were evicted, because running requests needed all others. Its
    /// next use reads them from the disk tier, or computes them. Always false without a disk tier.
    pub demoted: bool,
    /// Remaining time to live; `None` if it has no limit.
    pub ends_in: Option<Duration>,
    /// The pinned token ids.
    pub token_ids: Arc<[u32]>,
    /// The chained hash of the last pinned block: [`NodeDump::last_hash`](stolon_kvcache::NodeDump)
    /// of the node that the pin ends in.
    pub last_hash: u64,
    /// The options that the pin was made with.
    pub options: PinOptions,
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
    /// A subscription to another store of blocks that reports its changes as the prefix cache does.
    #[must_use]
    pub fn new(snapshot: CacheSnapshot, receiver: EventReceiver) -> CacheEvents {
        CacheEvents { snapshot, receiver }
    }

    /// The content of the cache when the subscription began, as events that would build it.
    pub fn snapshot(&self) -> &CacheSnapshot {
        &self.snapshot
    }

    /// Takes the content that [`CacheEvents::snapshot`] returns and leaves an empty list of events.
    pub fn take_snapshot(&mut self) -> CacheSnapshot {
        let events = std::mem::take(&mut self.snapshot.events);
        CacheSnapshot { number: self.snapshot.number, events }
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
