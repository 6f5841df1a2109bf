//! [`Announced`]: which blocks a disk tier has, for programs that follow it by events, a router for
//! example.
//!
//! The events are those of the prefix tree, with the same hashes of blocks. Nothing is kept and
//! nothing is hashed before somebody subscribes.
//!
//! **Invariant**: every record here is in the index. Both are changed under one lock.

use std::collections::HashMap;
use std::sync::Arc;

use stolon_kvcache::{
    BlockHasher, CacheEvent, CacheSnapshot, EventLog, EventReceiver, Namespace, TokenSpan,
    len_before_checkpoint,
};

use crate::key::ChainKey;

/// Maximum number of records that are announced. With 64 positions in blocks of 16, one takes about
/// 450 bytes of memory, and all of them 60 MB; with blocks of one position, twice as much.
pub(crate) const RECORDS_MAX: usize = 1 << 17;

/// The records whose blocks are known to subscribers.
#[derive(Debug, Default)]
pub(crate) struct Announced {
    /// That of the prefix tree; `None` before the first subscription.
    hasher: Option<BlockHasher>,
    records: HashMap<ChainKey, Arc<RecordBlocks>>,
    log: EventLog,
}

/// A subscription, with the content at its beginning.
#[derive(Debug)]
pub(crate) struct Subscription {
    /// The number of the last event that the content includes.
    number: u64,
    records: Vec<Arc<RecordBlocks>>,
    receiver: EventReceiver,
}

impl Subscription {
    /// The content as events, parents before children, and the events that follow.
    pub(crate) fn into_events(mut self) -> (CacheSnapshot, EventReceiver) {
        self.records.sort_by_key(|record| record.first);
        let events = self.records.iter().map(|record| record.stored()).collect();
        (CacheSnapshot { number: self.number, events }, self.receiver)
    }
}

/// The blocks of a record, as an event describes them.
#[derive(Clone, Debug)]
pub(crate) struct RecordBlocks {
    pub(crate) namespace: Namespace,
    /// Number of positions before the record.
    pub(crate) first: usize,
    /// Hash of the block before the record; `None` at the start of a prompt.
    pub(crate) parent: Option<u64>,
    /// Hash of each block.
    pub(crate) hashes: Vec<u64>,
    /// The positions of the record.
    pub(crate) positions: Vec<u32>,
}

impl RecordBlocks {
    fn stored(&self) -> CacheEvent {
        let RecordBlocks { namespace, parent, hashes, positions, .. } = self.clone();
        CacheEvent::Stored { namespace, parent, hashes, positions }
    }
}

/// Number of leading positions of a prompt whose records are announced. The numbers of images
/// differ between processes, and those of a checkpoint are in no prompt.
pub(crate) fn announced_len(positions: &[u32]) -> usize {
    let positions = &positions[..len_before_checkpoint(positions)];
    positions.iter().take_while(|&&position| !TokenSpan::is_image(position)).count()
}

impl Announced {
    /// The content and all changes from now on, in a queue of at most `capacity` events. The hasher
    /// of the first subscription remains.
    pub(crate) fn subscribe(&mut self, hasher: BlockHasher, capacity: usize) -> Subscription {
        self.hasher.get_or_insert(hasher);
        let records = self.records.values().cloned().collect();
        let receiver = self.log.subscribe(capacity);
        Subscription { number: self.log.last(), records, receiver }
    }

    /// The hasher; `None` if nobody has subscribed.
    pub(crate) fn hasher(&self) -> Option<BlockHasher> {
        self.hasher
    }

    /// Whether a record is neither announced nor one too many.
    pub(crate) fn lacks(&self, key: &ChainKey) -> bool {
        self.records.len() < RECORDS_MAX && !self.records.contains_key(key)
    }

    /// Hash of the last block of an announced record.
    pub(crate) fn last_hash(&self, key: &ChainKey) -> Option<u64> {
        self.records.get(key)?.hashes.last().copied()
    }

    /// Announces a record.
    pub(crate) fn add(&mut self, key: ChainKey, blocks: RecordBlocks) {
        if self.lacks(&key) {
            self.log.report(|| blocks.stored());
            self.records.insert(key, Arc::new(blocks));
        }
    }

    /// Announces that a record was removed, if it was announced.
    pub(crate) fn remove(&mut self, key: &ChainKey) {
        if let Some(blocks) = self.records.remove(key) {
            // As in events of the tree, a block comes before its ancestors.
            let hashes = || blocks.hashes.iter().rev().copied().collect();
            self.log.report(|| CacheEvent::Removed { hashes: hashes() });
        }
    }

    /// Announces that all records were removed.
    pub(crate) fn clear(&mut self) {
        self.records.clear();
        if self.hasher.is_some() {
            self.log.report(|| CacheEvent::Cleared);
        }
    }
}
