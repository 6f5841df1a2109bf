//! The events by which a disk tier tells subscribers which blocks of which prompts it has.
//!
//! Records are announced when they are written and when they are read. Those that were on the disk
//! before the first subscription are known by their names only. A thread reads the beginnings of
//! their files, which have their tokens, and announces them too.

use std::io::Read;
use std::sync::{Arc, Weak};

use stolon_kvcache::{BlockHasher, CacheSnapshot, EventReceiver, Namespace};
use stolon_scheduler::yield_to_computing;

use super::{DiskTier, Ordering};
use crate::announced::{RECORDS_MAX, RecordBlocks, announced_len};
use crate::files::{self, Links};
use crate::key::ChainKey;
use crate::place::Place;
use crate::record::RecordHead;
use crate::tokens::NamedTokens;

impl DiskTier {
    /// The records that are known by their tokens, and every change from now on, in a queue of at
    /// most `capacity` events, at least 1. The events are those of the prefix tree whose hasher
    /// this is. Nothing waits for the reader, and the queue ends with [`DiskTier::close`].
    ///
    /// A record counts from its first block to its last, although it can only be read whole.
    /// Records with an image or a checkpoint of a recurrent state, and those that follow an image,
    /// are left out; so are those beyond a limit of 131,072. After the first subscription, the
    /// records on the disk become known while their files are read in the background.
    pub fn events(
        self: &Arc<DiskTier>,
        hasher: BlockHasher,
        capacity: usize,
    ) -> (CacheSnapshot, EventReceiver) {
        let mut index = self.index();
        let is_first = index.announced.hasher().is_none();
        let subscription = index.announced.subscribe(hasher, capacity);
        let mut keys = if is_first { index.keys() } else { Vec::new() };
        drop(index);
        keys.truncate(RECORDS_MAX);
        if !keys.is_empty() {
            let tier = Arc::downgrade(self);
            let learn = move || {
                yield_to_computing();
                learn(&tier, hasher, &keys);
            };
            // Without a thread, records become known when they are read.
            let _ = std::thread::Builder::new().name("stolon-heads".to_owned()).spawn(learn);
        }
        subscription.into_events()
    }

    /// Announces records of a prompt, if somebody has subscribed.
    pub(super) fn announce<'a>(
        &self,
        namespace: &Namespace,
        tokens: &NamedTokens,
        places: impl Iterator<Item = &'a Place>,
    ) {
        let Some(hasher) = self.index().announced.hasher() else { return };
        let tokens = &tokens.tokens()[..announced_len(tokens.tokens())];
        let is_announced = |place: &&Place| {
            place.end() <= tokens.len() && place.positions == self.shape.record_positions()
        };
        let new = |place: &&Place| self.index().announced.lacks(&place.key);
        let places: Vec<&Place> = places.filter(is_announced).filter(new).collect();
        let Some(end) = places.iter().map(|place| place.end()).max() else { return };
        let hashes = hasher.block_hashes(namespace, &tokens[..end]);
        for place in places {
            let [first, end] = [place.first, place.end()].map(|at| at / self.shape.block_size);
            let blocks = RecordBlocks {
                namespace: *namespace,
                first: place.first,
                parent: first.checked_sub(1).map(|before| hashes[before]),
                hashes: hashes[first..end].to_vec(),
                positions: tokens[place.first..place.end()].to_vec(),
            };
            self.index().announce(place.key, blocks);
        }
    }

    /// The beginning of a record's file, if the record is one that is announced.
    fn head(&self, key: &ChainKey) -> Option<RecordHead> {
        let file = files::open(&self.directory.record(key), Links::Refuse).ok()?;
        let size = file.metadata().ok()?.len();
        let mut bytes = Vec::new();
        file.take(self.shape.head_bytes() as u64).read_to_end(&mut bytes).ok()?;
        let head = RecordHead::parse(&bytes, &self.shape).ok()?;
        let is_whole = head.header.record_bytes as u64 == size
            && head.header.positions == self.shape.record_positions();
        let tokens = &head.content.tokens;
        let is_announced = is_whole && announced_len(tokens) == tokens.len();
        (is_announced && head.header.key == *key).then_some(head)
    }

    /// Announces a record whose tokens were read, if it is the first of its prompt or the one
    /// before it is announced.
    fn announce_head(&self, hasher: &BlockHasher, head: RecordHead) {
        let RecordHead { namespace, header, content } = head;
        let mut index = self.index();
        let parent = match header.first {
            0 if header.parent == self.shape.root(&namespace) => None,
            0 => return,
            _ => match index.announced.last_hash(&header.parent) {
                Some(hash) => Some(hash),
                None => return,
            },
        };
        let hashes = hasher.block_hashes_after(&namespace, parent, &content.tokens);
        let first = header.first;
        let positions = content.tokens;
        let blocks = RecordBlocks { namespace, first, parent, hashes, positions };
        index.announce(header.key, blocks);
    }
}

/// Reads the tokens of records and announces them, the beginnings of prompts first. Ends early if
/// the tier does.
fn learn(tier: &Weak<DiskTier>, hasher: BlockHasher, keys: &[ChainKey]) {
    let mut heads = Vec::new();
    for key in keys {
        let Some(tier) = open(tier) else { return };
        if tier.index().announced.lacks(key) {
            heads.extend(tier.head(key));
        }
    }
    heads.sort_by_key(|head| head.header.first);
    for head in heads {
        let Some(tier) = open(tier) else { return };
        tier.announce_head(&hasher, head);
    }
}

/// The tier, unless it was dropped or closed.
fn open(tier: &Weak<DiskTier>) -> Option<Arc<DiskTier>> {
    // Pairs with the store in `close`.
    tier.upgrade().filter(|tier| !tier.closed.load(Ordering::Acquire))
}
