//! [`Announced`]: which blocks a disk tier has, for programs that follow it by events, a router for
//! example.
//!
//! The events are those of the prefix tree, with the same hashes of blocks. Nothing is kept and
//! nothing is hashed before somebody subscribes.
//!
//! Prompts that diverge within a record store the blocks before that point twice, once in the
//! record of each. So records are counted by block: a block is announced with the first record that
//! has it, and removed with the last one.
//!
//! **Invariant**: every record here is in the index. Both are changed under one lock.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use stolon_kvcache::{
    BlockHasher, CacheEvent, CacheSnapshot, EventLog, EventReceiver, Namespace, TokenSpan,
    len_before_checkpoint,
};

use crate::key::ChainKey;

/// Maximum number of records that are announced. With 64 positions in blocks of 16, one takes about
/// 550 bytes of memory, and all of them 70 MB; with blocks of one position, five times as much.
pub(crate) const RECORDS_MAX: usize = 1 << 17;

/// The records whose blocks are known to subscribers.
#[derive(Debug, Default)]
pub(crate) struct Announced {
    /// The hasher of the prefix tree; `None` before the first subscription.
    hasher: Option<BlockHasher>,
    records: HashMap<ChainKey, Arc<RecordBlocks>>,
    /// Number of announced records that have each block.
    blocks: BlockCounts,
    log: EventLog,
}

/// The number of records that have each block, by the hash of the block.
#[derive(Debug, Default)]
struct BlockCounts(HashMap<u64, u32>);

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
        let mut blocks = BlockCounts::default();
        let events = self.records.iter().filter_map(|record| blocks.add(record)).collect();
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

impl BlockCounts {
    /// Counts the blocks of a record. Returns the event of those that no other record has; `None`
    /// if there are none. A hash stands for all blocks before its own, so these are the last ones.
    fn add(&mut self, record: &RecordBlocks) -> Option<CacheEvent> {
        let RecordBlocks { namespace, parent, hashes, positions, .. } = record;
        let known = hashes.iter().take_while(|hash| self.0.contains_key(hash)).count();
        for hash in hashes {
            *self.0.entry(*hash).or_default() += 1;
        }
        let block_size = positions.len() / hashes.len().max(1);
        (known < hashes.len()).then(|| CacheEvent::Stored {
            namespace: *namespace,
            parent: known.checked_sub(1).map_or(*parent, |last| Some(hashes[last])),
            hashes: hashes[known..].to_vec(),
            positions: positions[known * block_size..].to_vec(),
        })
    }

    /// Reverses [`BlockCounts::add`]. Returns the event of the blocks that no other record has;
    /// `None` if there are none. As in events of the tree, a block comes before its ancestors.
    fn remove(&mut self, record: &RecordBlocks) -> Option<CacheEvent> {
        let mut hashes = Vec::new();
        for hash in record.hashes.iter().rev() {
            let Entry::Occupied(mut count) = self.0.entry(*hash) else { continue };
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
                hashes.push(*hash);
            }
        }
        (!hashes.is_empty()).then_some(CacheEvent::Removed { hashes })
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

    /// Whether a record is not announced although there is room for it.
    pub(crate) fn lacks(&self, key: &ChainKey) -> bool {
        self.records.len() < RECORDS_MAX && !self.records.contains_key(key)
    }

    /// Hash of the last block of an announced record.
    pub(crate) fn last_hash(&self, key: &ChainKey) -> Option<u64> {
        self.records.get(key)?.hashes.last().copied()
    }

    /// Announces a record: those of its blocks that no announced record has.
    pub(crate) fn add(&mut self, key: ChainKey, record: RecordBlocks) {
        if self.lacks(&key) {
            let event = self.blocks.add(&record);
            self.report(event);
            self.records.insert(key, Arc::new(record));
        }
    }

    /// Announces that a record was removed, if it was announced: those of its blocks that no other
    /// announced record has.
    pub(crate) fn remove(&mut self, key: &ChainKey) {
        if let Some(record) = self.records.remove(key) {
            let event = self.blocks.remove(&record);
            self.report(event);
        }
    }

    fn report(&mut self, event: Option<CacheEvent>) {
        if let Some(event) = event {
            self.log.report(|| event);
        }
    }

    /// Announces that all records were removed.
    pub(crate) fn clear(&mut self) {
        self.records.clear();
        self.blocks = BlockCounts::default();
        if self.hasher.is_some() {
            self.log.report(|| CacheEvent::Cleared);
        }
    }
}
