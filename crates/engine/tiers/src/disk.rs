//! [`DiskTier`]: records in a directory, up to a budget in bytes.
//!
//! Each record is a file of its own, named by its key: `DIRECTORY/v1/ab/abcd....kv`. Only full
//! records and tails are stored ([`Place`]). The index of the stored records is in memory and is
//! made from the names and sizes of the files when the tier is opened; their content is read, and
//! verified, when it is needed.
//!
//! A file appears under its name only when it is complete, so a process that is killed leaves
//! nothing wrong behind. A file that was removed, damaged or written by another program is a miss.
//! One process owns a directory at a time, by a lock on the file `lock`.
//!
//! All methods may be called from any thread; those that do I/O say so.

mod directory;
mod events;
mod read;

use std::fs;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use stolon_kvcache::{EvictionOrder, EvictionPolicy, Namespace};

use crate::disk_index::Index;
use crate::disk_stats::{Counters, DiskStats};
use crate::files::{self, Links, write_atomically};
use crate::key::ChainKey;
use crate::place::Place;
use crate::record::{Record, RecordShape, is_of};
use crate::shared::{PAUSE, Pause, Speed, lock};
use crate::tier::Tier;
use crate::tokens::NamedTokens;

use directory::Directory;
pub use directory::DiskError;

/// The speed of reading in bytes per second that is assumed before it was measured.
const ASSUMED_SPEED: f64 = 200e6;

/// Records in a directory.
#[derive(Debug)]
pub struct DiskTier {
    directory: Directory,
    shape: RecordShape,
    budget: u64,
    index: Mutex<Index>,
    counters: Counters,
    /// Speed of recent reads.
    speed: Speed,
    /// Pause after a write that failed.
    pause: Pause,
    closed: AtomicBool,
}

impl DiskTier {
    /// Opens a directory, which is made if it does not exist, for KV of this format, and removes
    /// the records that exceed the budget, in the order `eviction`. Blocks; the time is
    /// proportional to the number of files.
    ///
    /// The order ranks records as it ranks leaves of the prefix tree. The files do not record how
    /// often and with which priority they were used, so a restart forgets that.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn open(
        directory: &Path,
        budget: u64,
        shape: RecordShape,
        eviction: Box<dyn EvictionOrder>,
    ) -> Result<DiskTier, DiskError> {
        let directory = Directory::open(directory)?;
        let index = directory.scan(eviction)?;
        let tier = DiskTier {
            directory,
            shape,
            budget,
            index: Mutex::new(index),
            counters: Counters::default(),
            speed: Speed::assumed(ASSUMED_SPEED),
            pause: Pause::default(),
            closed: AtomicBool::new(false),
        };
        tier.shrink();
        Ok(tier)
    }

    /// The format of the KV.
    pub fn shape(&self) -> &RecordShape {
        &self.shape
    }

    /// A secret key for namespaces with a salt, which was drawn at random when the directory was
    /// made. With it, they are the same after a restart.
    pub fn namespace_key(&self) -> [u8; 32] {
        self.directory.namespace_key
    }

    /// Stores records of `tokens` from position `first` on, which must begin a full record.
    /// `blocks` are the bytes of the blocks from there, one after another; a remainder that fills
    /// no record is ignored. `priority` is the priority of the request that they were computed for.
    /// Records that exceed the budget are removed. If a write fails, nothing is written for a few
    /// seconds. Blocks. Returns the keys of the records that were written.
    pub fn write(
        &self,
        namespace: &Namespace,
        tokens: &NamedTokens,
        first: usize,
        blocks: &[u8],
        priority: i32,
    ) -> Vec<ChainKey> {
        let RecordShape { block_size, block_bytes, .. } = self.shape;
        let byte = |position: usize| (position - first) / block_size * block_bytes;
        let end = first + blocks.len() / block_bytes.max(1) * block_size;
        let places = self.shape.stored_places(namespace, tokens, end);
        let (mut written, now) = (Vec::new(), SystemTime::now());
        for place in places.filter(|place| place.first >= first) {
            if self.index().contains(&place.key) {
                continue;
            }
            let Some(content) = place.content(tokens) else { continue };
            if !self.accepts_writes() {
                self.counters.skipped(1);
                continue;
            }
            let (_, record) = Record::encode(
                &self.shape,
                namespace,
                &place.parent,
                place.first,
                place.end(),
                &content,
                &blocks[byte(place.first)..byte(place.end())],
            );
            match self.write_record(&place.key, &record, earlier(now, written.len())) {
                Ok(()) => written.push(place),
                Err(error) => self.write_failed(&error),
            }
        }
        self.index().note_use(&written, &self.shape, priority, false);
        self.announce(namespace, tokens, written.iter());
        written.into_iter().map(|place| place.key).collect()
    }

    /// The bytes of a stored record; `None` if there is none, it cannot be read or has KV of
    /// another format, of another model for example. They are not verified. Blocks.
    pub fn bytes_of(&self, key: &ChainKey) -> Option<Bytes> {
        let path = self.contains(key).then(|| self.directory.record(key))?;
        let file = files::open(&path, Links::Refuse).ok()?;
        let mut bytes = Vec::new();
        let most = self.shape.record_bytes_max() as u64;
        file.take(most.saturating_add(1)).read_to_end(&mut bytes).ok()?;
        is_of(&bytes, &self.shape).then(|| bytes.into())
    }

    /// The keys of all records, also of other formats, the most recently used first. Does no I/O.
    pub fn keys(&self) -> Vec<ChainKey> {
        self.index().keys()
    }

    /// Removes all records. Blocks.
    pub fn clear(&self) {
        let keys = self.index().clear();
        keys.iter().for_each(|key| self.remove_file(key));
    }

    /// Counters, and the current content of the tier.
    pub fn stats(&self) -> DiskStats {
        let index = self.index();
        let (records, bytes) = (index.len() as u64, index.bytes());
        drop(index);
        self.counters.stats(records, bytes, self.budget)
    }

    /// Unlocks the directory, so that another process, or another tier of this one, can open it.
    /// Nothing is read or written any longer.
    pub fn close(&self) {
        *self.index() = Index::new(EvictionPolicy::default().order());
        self.closed.store(true, Ordering::Release);
        self.directory.unlock();
    }

    /// Whether writes are tried now: not for a while after one has failed, and not after
    /// [`DiskTier::close`].
    pub(crate) fn accepts_writes(&self) -> bool {
        !self.pause.is_on() && !self.closed.load(Ordering::Acquire)
    }

    /// Counts records that were not stored because too much was waiting to be written.
    pub(crate) fn note_skipped(&self, records: u64) {
        self.counters.skipped(records);
    }

    fn write_record(&self, key: &ChainKey, record: &[u8], used: SystemTime) -> io::Result<()> {
        let bytes = record.len() as u64;
        if bytes > self.budget {
            return Err(io::Error::other("a record is larger than the budget of the disk tier"));
        }
        let path = self.directory.record(key);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        write_atomically(&path, |file| {
            file.write_all(record)?;
            // Only the order of eviction after a restart depends on it, so an error is ignored.
            let _ = file.set_modified(used);
            Ok(())
        })?;
        self.counters.wrote(bytes);
        self.index().insert(*key, bytes);
        self.shrink();
        Ok(())
    }

    fn write_failed(&self, error: &io::Error) {
        self.counters.write_failed();
        tracing::warn!(
            %error,
            folder = %self.directory.folder.display(),
            pause_seconds = PAUSE.as_secs(),
            "KV could not be stored; nothing is stored for a while"
        );
        self.pause.begin();
    }

    /// Replaces the order in which records are removed when the budget is exceeded.
    pub fn set_eviction_order(&self, eviction: Box<dyn EvictionOrder>) {
        self.index().set_order(eviction);
    }

    /// Lets these records, also those that are written later, be removed after all others while
    /// the result lives.
    pub fn protect(self: &Arc<DiskTier>, keys: Vec<ChainKey>) -> ProtectedRecords {
        self.index().protect(&keys);
        ProtectedRecords { tier: Arc::clone(self), keys }
    }

    /// Removes records that exceed the budget.
    fn shrink(&self) {
        loop {
            let mut index = self.index();
            if index.bytes() <= self.budget {
                return;
            }
            let Some(removed) = index.remove_first() else { return };
            drop(index);
            self.counters.evicted();
            self.remove_file(&removed);
        }
    }

    fn remove(&self, key: &ChainKey) {
        self.index().remove(key);
        self.remove_file(key);
    }

    fn remove_file(&self, key: &ChainKey) {
        // It may be gone already; if it cannot be removed, it is found again at the next start.
        let _ = fs::remove_file(self.directory.record(key));
    }

    /// Notes that a request of this priority has found records of one prefix. The first ones count
    /// as used last. Does no I/O: after a restart, they count as used when they were written or
    /// read last.
    pub fn note_use(&self, places: &[Place], priority: i32) {
        self.index().note_use(places, &self.shape, priority, true);
    }

    /// As [`note_use`](DiskTier::note_use), also for the order after a restart. Blocks.
    pub fn touch(&self, places: &[Place], priority: i32) {
        self.note_use(places, priority);
        let now = SystemTime::now();
        for (number, place) in places.iter().enumerate() {
            let used = earlier(now, number);
            // The time of a readable file may be impossible to set, so an error is ignored.
            let _ = files::open(&self.directory.record(&place.key), Links::Refuse)
                .and_then(|file| file.set_modified(used));
        }
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        lock(&self.index)
    }
}

/// Unlocks the directory. Closing the lock file does not unlock it while a child process that was
/// forked at that moment has a copy of it.
impl Drop for DiskTier {
    fn drop(&mut self) {
        self.close();
    }
}

/// Records that are removed after all others until this is dropped.
#[derive(Debug)]
pub struct ProtectedRecords {
    tier: Arc<DiskTier>,
    keys: Vec<ChainKey>,
}

impl Drop for ProtectedRecords {
    fn drop(&mut self) {
        self.tier.index().unprotect(&self.keys);
    }
}

/// When the record with this number counts as used, if its prefix was used at `now`: the first
/// record counts as the last one used.
fn earlier(now: SystemTime, number: usize) -> SystemTime {
    now.checked_sub(Duration::from_micros(number as u64)).unwrap_or(now)
}
