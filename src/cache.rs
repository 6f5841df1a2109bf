//! The prefix cache as an embedding program sees it: pins, events, dumps and counts.

use std::pin::Pin as Pinned;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::Stream;
use serde::Serialize;
use stolon_actors::{CacheReport, CorePin};
use stolon_kvcache::{Numbered, PinId, Snapshot};

/// A cached prefix that stays cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pin {
    /// Its name.
    pub id: PinId,
    /// Tokens held, from the start of the prompt: whole blocks.
    pub tokens: usize,
    /// Blocks held; those shared with another pin count for both.
    pub blocks: usize,
    /// Time until it ends by itself, if it does.
    pub ends_in: Option<Duration>,
}

impl From<CorePin> for Pin {
    fn from(core: CorePin) -> Pin {
        Pin {
            id: core.info.id,
            tokens: core.info.position_count,
            blocks: core.info.block_count,
            ends_in: core.ends.map(|end| end.saturating_duration_since(Instant::now())),
        }
    }
}

/// What enters and leaves the cache, in order: for a router that keeps a copy of it, say.
///
/// Numbers have no gaps. The queue is bounded: a reader that is too slow finds a
/// [`CacheEvent::Reset`](crate::CacheEvent::Reset) in place of what it missed, and should
/// subscribe anew. The stream ends when the engine stops, or starts again with an empty cache.
#[derive(Debug)]
pub struct CacheEvents {
    snapshot: Snapshot,
    receiver: stolon_kvcache::EventReceiver,
}

impl CacheEvents {
    pub(crate) fn new(core: stolon_actors::CacheEvents) -> CacheEvents {
        CacheEvents { snapshot: core.snapshot, receiver: core.receiver }
    }

    /// The cache as it was when the subscription began: events that would build it.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// The next change; `None` at the end.
    pub async fn next(&mut self) -> Option<Numbered> {
        std::future::poll_fn(|context| self.receiver.poll_next(context)).await
    }
}

impl Stream for CacheEvents {
    type Item = Numbered;

    fn poll_next(self: Pinned<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Numbered>> {
        self.get_mut().receiver.poll_next(context)
    }
}

/// Numbers about the prefix cache. Counts are since the engine last started its cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CacheStats {
    /// Blocks in the index.
    pub blocks: usize,
    /// Of these, blocks that can be evicted.
    pub blocks_evictable: usize,
    /// Of these, blocks that running requests and pins hold.
    pub blocks_locked: usize,
    /// Blocks that pins hold; those of several pins count for each.
    pub blocks_pinned: usize,
    /// Nodes of the tree.
    pub nodes: usize,
    /// Namespaces (cache salts, say) that hold something, the one without a salt not counted.
    pub namespaces: usize,
    /// Bytes of the index itself.
    pub index_bytes: usize,
    /// Blocks that entered.
    pub blocks_committed: u64,
    /// Blocks that were computed twice at the same time; one copy was dropped.
    pub blocks_duplicate: u64,
    /// Blocks that left to make room.
    pub evicted_for_room: u64,
    /// Blocks that a flush took out.
    pub evicted_by_flush: u64,
    /// Tokens found by a request, on average over all that ran.
    pub average_match: f64,
    /// How long evicted runs of blocks had been cached: entry `n` counts those of 2^n to
    /// 2^(n+1) - 1 ticks (changes of the cache), entry 0 those below 2.
    pub lifetime_ticks: [u64; 32],
}

impl From<CacheReport> for CacheStats {
    fn from(report: CacheReport) -> CacheStats {
        let CacheReport { counts, stats, index_bytes } = report;
        CacheStats {
            blocks: counts.cached,
            blocks_evictable: counts.evictable,
            blocks_locked: counts.locked,
            blocks_pinned: counts.pinned,
            nodes: counts.nodes,
            namespaces: counts.namespaces,
            index_bytes,
            blocks_committed: stats.blocks_committed,
            blocks_duplicate: stats.blocks_duplicate,
            evicted_for_room: stats.evicted_for_room,
            evicted_by_flush: stats.evicted_by_flush,
            average_match: stats.average_match(),
            lifetime_ticks: stats.lifetime_ticks,
        }
    }
}
