//! The index of a disk tier: which records are there, how large they are, and which one is removed
//! next. It is made from the names, sizes and times of the files.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::SystemTime;

use stolon_kvcache::{EvictionCandidate, EvictionOrder, EvictionPolicy, EvictionRank};

use crate::announced::{Announced, RecordBlocks};
use crate::key::ChainKey;
use crate::place::Place;
use crate::record::RecordShape;

/// The extension of the files.
pub(crate) const EXTENSION: &str = "kv";

/// The records on the disk.
///
/// A record is of no use without those before it, so only records that no stored record follows are
/// removed to make room: the leaves of the tree that the records form. A file's name does not tell
/// which record precedes it, so after a restart that is known only once the record is used.
#[derive(Debug)]
pub(crate) struct Index {
    entries: HashMap<ChainKey, Entry>,
    /// Number of stored records that are known to follow each record.
    followers: HashMap<ChainKey, u32>,
    /// Records, stored or not, that are removed after all others, each with the number of
    /// times that it was protected.
    protected: HashMap<ChainKey, u32>,
    /// The records that none follows. The first is removed first.
    order: BTreeSet<(RecordRank, ChainKey)>,
    eviction: Box<dyn EvictionOrder>,
    /// The records that subscribers know.
    pub(crate) announced: Announced,
    bytes: u64,
    /// Increases with each use of a record.
    clock: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    bytes: u64,
    /// The record before it, once it is known.
    parent: Option<ChainKey>,
    /// The properties of the record from which the order of eviction ranks it.
    candidate: EvictionCandidate,
    /// Its place in [`Index::order`].
    rank: Option<RecordRank>,
}

/// A record's place in the order of eviction. Protected records come after all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct RecordRank {
    is_protected: bool,
    rank: EvictionRank,
}

impl Index {
    /// An empty index.
    pub(crate) fn new(eviction: Box<dyn EvictionOrder>) -> Index {
        Index {
            entries: HashMap::new(),
            followers: HashMap::new(),
            protected: HashMap::new(),
            order: BTreeSet::new(),
            eviction,
            announced: Announced::default(),
            bytes: 0,
            clock: 0,
        }
    }

    /// Finds the records in a folder, and removes the temporary files of writes that did not end.
    pub(crate) fn scan(folder: &Path, eviction: Box<dyn EvictionOrder>) -> io::Result<Index> {
        let mut found = Vec::new();
        for part in fs::read_dir(folder)? {
            let part = part?;
            if !part.file_type()?.is_dir() {
                continue;
            }
            for file in fs::read_dir(part.path())? {
                let path = file?.path();
                if path.extension().is_some_and(|extension| extension == "tmp") {
                    // If it cannot be removed, it only takes up space.
                    let _ = fs::remove_file(&path);
                    continue;
                }
                let stem = path.file_stem().and_then(|stem| stem.to_str());
                let key = stem.and_then(ChainKey::from_hex);
                let is_record = path.extension().is_some_and(|extension| extension == EXTENSION);
                if let (Some(key), true, Ok(metadata)) =
                    (key, is_record, fs::symlink_metadata(&path))
                    && metadata.is_file()
                {
                    let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                    found.push((used, key, metadata.len()));
                }
            }
        }
        found.sort_unstable();
        let mut index = Index::new(eviction);
        found.into_iter().for_each(|(_, key, bytes)| index.insert(key, bytes));
        Ok(index)
    }

    pub(crate) fn contains(&self, key: &ChainKey) -> bool {
        self.entries.contains_key(key)
    }

    /// Number of records.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Size of all records in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds a record as the one that was used last.
    pub(crate) fn insert(&mut self, key: ChainKey, bytes: u64) {
        self.remove(&key);
        self.clock += 1;
        let mut candidate = EvictionCandidate::default();
        (candidate.created, candidate.last_use) = (self.clock, self.clock);
        self.entries.insert(key, Entry { bytes, parent: None, candidate, rank: None });
        self.bytes += bytes;
        self.rank(&key);
    }

    pub(crate) fn remove(&mut self, key: &ChainKey) {
        let Some(entry) = self.entries.remove(key) else { return };
        self.announced.remove(key);
        self.bytes -= entry.bytes;
        if let Some(rank) = entry.rank {
            self.order.remove(&(rank, *key));
        }
        let Some(parent) = entry.parent else { return };
        if let Some(followers) = self.followers.get_mut(&parent) {
            *followers -= 1;
            if *followers == 0 {
                self.followers.remove(&parent);
                self.rank(&parent);
            }
        }
    }

    /// Tells subscribers which blocks a record has, if it is there.
    pub(crate) fn announce(&mut self, key: ChainKey, blocks: RecordBlocks) {
        if self.contains(&key) {
            self.announced.add(key, blocks);
        }
    }

    /// Removes the record that is first in the order of eviction.
    pub(crate) fn remove_first(&mut self) -> Option<ChainKey> {
        let &(rank, key) = self.order.first()?;
        self.remove(&key);
        let Index { eviction, .. } = self;
        // A custom order may panic.
        let _ = catch_unwind(AssertUnwindSafe(|| eviction.evicted(rank.rank)));
        Some(key)
    }

    /// Lets records be removed after all others, until [`Index::unprotect`].
    pub(crate) fn protect(&mut self, keys: &[ChainKey]) {
        for key in keys {
            *self.protected.entry(*key).or_default() += 1;
            self.rank(key);
        }
    }

    /// Ends one [`Index::protect`].
    pub(crate) fn unprotect(&mut self, keys: &[ChainKey]) {
        for key in keys {
            if let Some(count) = self.protected.get_mut(key) {
                *count -= 1;
                if *count == 0 {
                    self.protected.remove(key);
                    self.rank(key);
                }
            }
        }
    }

    /// Replaces the order of eviction.
    pub(crate) fn set_order(&mut self, eviction: Box<dyn EvictionOrder>) {
        self.eviction = eviction;
        let leaves: Vec<ChainKey> = self.order.iter().map(|&(_, key)| key).collect();
        leaves.iter().for_each(|key| self.rank(key));
    }

    /// The keys of all records, the most recently used first.
    pub(crate) fn keys(&self) -> Vec<ChainKey> {
        let last_use = |(key, entry): (&ChainKey, &Entry)| (entry.candidate.last_use, *key);
        let mut keys: Vec<_> = self.entries.iter().map(last_use).collect();
        keys.sort_unstable_by(|a, b| b.cmp(a));
        keys.into_iter().map(|(_, key)| key).collect()
    }

    /// Removes all records and returns their keys.
    pub(crate) fn clear(&mut self) -> Vec<ChainKey> {
        let eviction = std::mem::replace(&mut self.eviction, EvictionPolicy::default().order());
        let mut new = Index::new(eviction);
        new.protected = std::mem::take(&mut self.protected);
        new.announced = std::mem::take(&mut self.announced);
        new.announced.clear();
        let old = std::mem::replace(self, new);
        old.entries.into_keys().collect()
    }

    /// Notes that records of one prefix were written for, or found by, a request of this priority.
    /// The first ones count as used last.
    pub(crate) fn note_use(
        &mut self,
        places: &[Place],
        shape: &RecordShape,
        priority: i32,
        found: bool,
    ) {
        for place in places.iter().rev() {
            self.note_one(place, shape, priority, found);
        }
    }

    fn note_one(&mut self, place: &Place, shape: &RecordShape, priority: i32, found: bool) {
        let Some(entry) = self.entries.get_mut(&place.key) else { return };
        self.clock += 1;
        let candidate = &mut entry.candidate;
        candidate.last_use = self.clock;
        candidate.hits = candidate.hits.saturating_add(u32::from(found));
        candidate.priority = candidate.priority.max(priority);
        candidate.start_block = place.first / shape.block_size;
        candidate.block_count = place.positions / shape.block_size;
        candidate.saved_blocks = candidate.block_count;
        if entry.parent.replace(place.parent).is_none() {
            *self.followers.entry(place.parent).or_default() += 1;
            self.rank(&place.parent);
        }
        self.rank(&place.key);
    }

    /// Updates a record's place in the order of eviction, if there is such a record.
    fn rank(&mut self, key: &ChainKey) {
        let Index { entries, order, eviction, protected, .. } = self;
        let Some(entry) = entries.get_mut(key) else { return };
        if let Some(rank) = entry.rank.take() {
            order.remove(&(rank, *key));
        }
        if !self.followers.contains_key(key) {
            let ranked = catch_unwind(AssertUnwindSafe(|| eviction.rank(&entry.candidate)));
            let rank = ranked.unwrap_or(EvictionRank(0, entry.candidate.last_use));
            let rank = RecordRank { is_protected: protected.contains_key(key), rank };
            entry.rank = Some(rank);
            order.insert((rank, *key));
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};
    use stolon_kvcache::Namespace;

    use super::*;

    const SHAPE: RecordShape = RecordShape { fingerprint: [1; 32], block_size: 16, block_bytes: 1 };

    /// The first `len` records of prompt `seed`; all prompts begin with the same record.
    fn places(seed: u32, len: usize) -> Vec<Place> {
        let mut parent = ChainKey::root(&SHAPE.fingerprint, &Namespace::default());
        let place = |number: usize| {
            let key = parent.then(&[if number == 0 { 0 } else { seed }, number as u32]);
            let place = Place { first: number * 64, positions: 64, images: 0, parent, key };
            parent = key;
            place
        };
        (0..len).map(place).collect()
    }

    fn write(index: &mut Index, places: &[Place], priority: i32) {
        places.iter().for_each(|place| index.insert(place.key, 10));
        index.note_use(places, &SHAPE, priority, false);
    }

    fn find(index: &mut Index, places: &[Place]) {
        index.note_use(places, &SHAPE, 0, true);
    }

    /// Goal: each policy removes another prompt first, as its name says.
    #[test]
    fn policies_remove_different_records_first() {
        for (policy, first) in [
            (EvictionPolicy::Lru, 2),
            (EvictionPolicy::Lfu, 3),
            (EvictionPolicy::Fifo, 1),
            (EvictionPolicy::Mru, 1),
            (EvictionPolicy::Filo, 4),
            (EvictionPolicy::Priority, 2),
            (EvictionPolicy::Slru, 3),
            (EvictionPolicy::CostAware, 3),
        ] {
            let mut index = Index::new(policy.order());
            let prompts: Vec<_> = (0..=4).map(|seed| places(seed, 2)).collect();
            for (seed, priority) in [(1, 1), (2, 0), (3, 1), (4, 1)] {
                write(&mut index, &prompts[seed][1..], priority);
            }
            for seed in [2, 2, 4, 4, 3, 1, 1, 1] {
                find(&mut index, &prompts[seed][1..]);
            }
            assert_eq!(index.remove_first(), Some(prompts[first][1].key), "{policy}");
        }
    }

    /// Goal: under every policy, after any uses, writes and losses, a record is removed before
    /// those that precede it, everything can be removed, and the sums are right.
    #[test]
    fn the_end_of_a_prefix_goes_first() {
        for policy in EvictionPolicy::ALL {
            let mut random = SmallRng::seed_from_u64(7);
            let mut index = Index::new(policy.order());
            for _ in 0..2_000 {
                let prompt = places(random.random_range(1..6), random.random_range(1..8));
                match random.random_range(0..6) {
                    0 => index.remove(&prompt[prompt.len() - 1].key),
                    1 => find(&mut index, &prompt),
                    2 => index.set_order(policy.order()),
                    3 => {
                        let Some(removed) = index.remove_first() else { continue };
                        let mut others = (1..6).flat_map(|seed| places(seed, 8));
                        let follows =
                            |place: &Place| place.parent == removed && index.contains(&place.key);
                        assert!(!others.any(|place| follows(&place)), "{policy}");
                    }
                    _ => write(&mut index, &prompt, random.random_range(0..3)),
                }
                assert_eq!(index.bytes(), 10 * index.len() as u64);
                assert_eq!(index.keys().len(), index.len());
            }
            while index.remove_first().is_some() {}
            assert_eq!((index.len(), index.bytes(), index.followers.len()), (0, 0, 0), "{policy}");
        }
    }

    /// Goal: protected records are removed after all others, also if they were written after they
    /// were protected and after everything was removed once, until nothing protects them any
    /// longer.
    #[test]
    fn protected_records_are_removed_last() {
        let mut index = Index::new(EvictionPolicy::Lru.order());
        let [first, second] = [places(1, 3), places(2, 3)];
        let keys: Vec<_> = first.iter().map(|place| place.key).collect();
        index.protect(&keys);
        index.protect(&keys[2..]);
        index.clear();
        write(&mut index, &first, 0);
        write(&mut index, &second, 0);
        find(&mut index, &second);
        let removed: Vec<_> = std::iter::from_fn(|| index.remove_first()).collect();
        let [end, middle] = [second[2].key, second[1].key];
        assert_eq!(removed, [end, middle, keys[2], keys[1], keys[0]]);
        write(&mut index, &first, 0);
        write(&mut index, &second, 0);
        index.unprotect(&keys);
        assert_eq!(index.remove_first(), Some(end), "the first is protected twice");
        index.unprotect(&keys[2..]);
        assert_eq!(index.remove_first(), Some(keys[2]), "least recently used");
        assert!(index.protected.is_empty());
    }

    /// Goal: an order that panics removes something nonetheless.
    #[test]
    fn an_order_that_panics_is_contained() {
        #[derive(Debug)]
        struct Panics;
        impl EvictionOrder for Panics {
            fn rank(&mut self, _: &EvictionCandidate) -> EvictionRank {
                panic!("planted")
            }
        }
        let mut index = Index::new(Box::new(Panics));
        write(&mut index, &places(1, 3), 0);
        assert_eq!(index.remove_first(), Some(places(1, 3)[2].key));
    }
}
