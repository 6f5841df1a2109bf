//! [`DiskTier`]: records in a directory, up to a budget in bytes.
//!
//! Each record is a file of its own, named by its key: `DIRECTORY/v1/ab/abcd....kv`. Only full
//! records are stored. The index of what is there is in memory and is made from the names and sizes
//! of the files when the tier is opened; their content is read, and verified, when it is needed.
//!
//! A file appears under its name only when it is complete, so a process that is killed leaves
//! nothing wrong behind. Whatever else happens to the files (removed, damaged, of another program)
//! makes them misses. One process owns a directory at a time, by a lock on the file `lock`.
//!
//! All methods may be called from any thread; those that do I/O say so.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use stolon_kvcache::Namespace;

use crate::disk_index::{EXTENSION, Index};
use crate::disk_stats::{Counters, DiskStats};
use crate::key::ChainKey;
use crate::prefix::write_atomically;
use crate::record::{KvShape, Record};

/// The folder of the files of this version of the format.
const FOLDER: &str = "v1";
/// How long nothing is written after a write has failed.
const PAUSE: Duration = Duration::from_secs(5);
/// The speed of reading in bytes per second that is assumed before it was measured.
const ASSUMED_SPEED: f64 = 200e6;

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// Another process uses it.
    #[error(
        "{}: another process uses this directory of stored KV: give each process its own",
        .directory.display()
    )]
    Locked {
        /// The directory.
        directory: PathBuf,
    },
    /// It cannot be read or written.
    #[error("{}: {error}", .path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
}

/// Records in a directory.
#[derive(Debug)]
pub struct DiskTier {
    folder: PathBuf,
    shape: KvShape,
    budget: u64,
    index: Mutex<Index>,
    counters: Counters,
    /// Bytes per second of recent reads; `None` before the first one.
    speed: Mutex<Option<f64>>,
    /// When writing is tried again after a failure.
    paused_until: Mutex<Option<Instant>>,
    /// Locked as long as it is open and the tier is not closed.
    lock: File,
    closed: AtomicBool,
}

/// A full record of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its first position.
    pub first: usize,
    /// The key of what is before it.
    pub parent: ChainKey,
    /// Its own key.
    pub key: ChainKey,
}

impl DiskTier {
    /// Opens a directory, which is made if it does not exist, for KV of this format, and removes
    /// what exceeds the budget. Blocks; the time is proportional to the number of files.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn open(directory: &Path, budget: u64, shape: KvShape) -> Result<DiskTier, DiskError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            |error| DiskError::Io { path, error }
        };
        let folder = directory.join(FOLDER);
        // Stored KV reveals the prompts.
        let mut builder = DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&folder).map_err(failed(&folder))?;
        let path = directory.join("lock");
        let lock = File::options().create(true).truncate(false).write(true).open(&path);
        let lock = lock.map_err(failed(&path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(DiskError::Locked { directory: directory.to_owned() });
            }
            Err(TryLockError::Error(error)) => return Err(failed(&path)(error)),
        }
        let index = Index::scan(&folder).map_err(failed(&folder))?;
        let tier = DiskTier {
            folder,
            shape,
            budget,
            index: Mutex::new(index),
            counters: Counters::default(),
            speed: Mutex::new(None),
            paused_until: Mutex::new(None),
            lock,
            closed: AtomicBool::new(false),
        };
        tier.shrink();
        Ok(tier)
    }

    /// The format of the KV.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Number of positions from the start of `tokens` that are stored: whole records. Does no I/O
    /// and changes nothing.
    pub fn query_match_len(&self, namespace: &Namespace, tokens: &[u32]) -> usize {
        let index = self.index();
        let stored = self.places(namespace, tokens);
        let stored = stored.take_while(|place| index.contains(&place.key));
        stored.count() * self.shape.record_positions()
    }

    /// The key of the first `positions` positions of `tokens`, which are whole records.
    pub fn key(&self, namespace: &Namespace, tokens: &[u32], positions: usize) -> ChainKey {
        let last = self.places(namespace, &tokens[..positions]).last();
        last.map_or_else(|| ChainKey::root(&self.shape.fingerprint, namespace), |last| last.key)
    }

    /// The time that reading `positions` positions takes, by the speed of recent reads.
    pub fn read_time(&self, positions: usize) -> Duration {
        let bytes = self.shape.record_bytes(positions).unwrap_or(usize::MAX);
        let speed = lock(&self.speed).unwrap_or(ASSUMED_SPEED).max(1.0);
        Duration::from_secs_f64((bytes as f64 / speed).min(1e6))
    }

    /// Reads the blocks of the positions `from..to` of `tokens`, whole records, and verifies them.
    /// Returns the bytes of each block, fewer if a record is missing or wrong. Wrong records are
    /// removed. Blocks.
    pub fn read(
        &self,
        namespace: &Namespace,
        tokens: &[u32],
        from: usize,
        to: usize,
    ) -> Vec<Box<[u8]>> {
        let begun = Instant::now();
        let (mut blocks, mut used, mut bytes) = (Vec::new(), Vec::new(), 0);
        let mut places = self.places(namespace, &tokens[..to]);
        for place in places.by_ref() {
            if place.first >= from {
                match self.read_record(namespace, tokens, &place) {
                    Some(record) => {
                        bytes += record.header.record_bytes as u64;
                        blocks.extend(record.blocks);
                    }
                    None => break,
                }
            }
            used.push(place.key);
        }
        // If the whole directory is gone, the records after the first missing one are gone too. While
        // they are in the index, they are not written again.
        for place in places {
            if !self.path(&place.key).exists() {
                self.index().remove(&place.key);
            }
        }
        self.touch(&used);
        let time = begun.elapsed();
        if bytes > 0 {
            self.counters.read(bytes, blocks.len() * self.shape.block_size, time);
            let now = bytes as f64 / time.as_secs_f64().max(1e-9);
            let mut speed = lock(&self.speed);
            *speed = Some(speed.map_or(now, |before| 0.7 * before + 0.3 * now));
        }
        blocks
    }

    /// Where storing the prefix `tokens` should begin: the first position of the first full record
    /// that is not stored; `None` if all are. Does no I/O.
    pub fn first_missing(&self, namespace: &Namespace, tokens: &[u32]) -> Option<usize> {
        let stored = self.query_match_len(namespace, tokens);
        (stored + self.shape.record_positions() <= tokens.len()).then_some(stored)
    }

    /// Stores full records of `tokens` from position `first` on, the beginning of a record.
    /// `blocks` are the bytes of the blocks from there, one after another; a rest that fills no
    /// record is ignored. What exceeds the budget is removed, the least recently used first. If a
    /// write fails, nothing is written for a few seconds. Blocks.
    /// Returns the keys of what was written.
    pub fn write(
        &self,
        namespace: &Namespace,
        tokens: &[u32],
        first: usize,
        blocks: &[u8],
    ) -> Vec<ChainKey> {
        let positions = self.shape.record_positions();
        let bytes = positions / self.shape.block_size * self.shape.block_bytes;
        let places = self.places(namespace, tokens).filter(|place| place.first >= first);
        let mut written = Vec::new();
        for (place, blocks) in places.zip(blocks.chunks_exact(bytes)) {
            if self.index().contains(&place.key) {
                continue;
            }
            if self.is_paused() || self.closed.load(Ordering::Acquire) {
                self.counters.skipped(1);
                continue;
            }
            let end = place.first + positions;
            let tokens = &tokens[place.first..end];
            let place_in_prefix = (place.first, end);
            let (_, record) = Record::encode(
                &self.shape,
                namespace,
                &place.parent,
                place_in_prefix,
                tokens,
                blocks,
            );
            match self.write_record(&place.key, &record) {
                Ok(()) => written.push(place.key),
                Err(error) => self.write_failed(&error),
            }
        }
        self.touch(&written);
        written
    }

    /// The bytes of a stored record; `None` if there is none or it cannot be read. They are not
    /// verified. Blocks.
    pub fn bytes_of(&self, key: &ChainKey) -> Option<Vec<u8>> {
        let file = self.contains(key).then(|| File::open(self.path(key)))?.ok()?;
        let mut bytes = Vec::new();
        let expected = self.shape.record_bytes(self.shape.record_positions())?;
        file.take(expected as u64 + 1).read_to_end(&mut bytes).ok()?;
        (bytes.len() == expected).then_some(bytes)
    }

    /// Counters, and what is stored now.
    pub fn stats(&self) -> DiskStats {
        let index = self.index();
        let (records, bytes) = (index.len() as u64, index.bytes());
        drop(index);
        self.counters.stats(records, bytes, self.budget)
    }

    /// Gives the directory back, so that another process, or another tier of this one, can open it.
    /// Nothing is read or written any more.
    pub fn close(&self) {
        *self.index() = Index::default();
        self.closed.store(true, Ordering::Release);
        // If this fails, the directory is free when this process ends.
        let _ = self.lock.unlock();
    }

    /// Notes that something was not stored because too much was waiting to be written.
    pub(crate) fn note_skipped(&self, records: u64) {
        self.counters.skipped(records);
    }

    /// Whether a record is stored. Does no I/O.
    pub fn contains(&self, key: &ChainKey) -> bool {
        self.index().contains(key)
    }

    /// The full records of a prompt, in their order. Does no I/O.
    pub fn places<'a>(
        &self,
        namespace: &Namespace,
        tokens: &'a [u32],
    ) -> impl Iterator<Item = Place> + 'a {
        let positions = self.shape.record_positions();
        let mut parent = ChainKey::root(&self.shape.fingerprint, namespace);
        tokens.chunks_exact(positions).enumerate().map(move |(number, tokens)| {
            let key = parent.then(tokens);
            let place = Place { first: number * positions, parent, key };
            parent = key;
            place
        })
    }

    fn path(&self, key: &ChainKey) -> PathBuf {
        let name = key.to_hex();
        self.folder.join(&name[..2]).join(name).with_extension(EXTENSION)
    }

    /// Reads and verifies one record. Anything but a missing entry that prevents it is counted and
    /// logged, and the record is removed.
    fn read_record(&self, namespace: &Namespace, tokens: &[u32], place: &Place) -> Option<Record> {
        if !self.index().contains(&place.key) {
            return None;
        }
        let path = self.path(&place.key);
        let expected = self.shape.record_bytes(self.shape.record_positions())?;
        let read = || -> Result<Record, String> {
            let file = File::open(&path).map_err(|error| error.to_string())?;
            let size = file.metadata().map_err(|error| error.to_string())?.len();
            if size != expected as u64 {
                return Err(format!("expected {expected} bytes, got {size}"));
            }
            let mut bytes = Vec::with_capacity(expected);
            let limited = file.take(expected as u64 + 1).read_to_end(&mut bytes);
            limited.map_err(|error| error.to_string())?;
            self.verify(namespace, tokens, place, &bytes)
        };
        match read() {
            Ok(record) => Some(record),
            Err(reason) => {
                self.counters.refused();
                tracing::warn!(path = %path.display(), reason, "stored KV cannot be used");
                self.remove(&place.key);
                None
            }
        }
    }

    /// The record in `bytes`, which come from here or from elsewhere, if it is that of `place`. Does
    /// no I/O.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn verify(
        &self,
        namespace: &Namespace,
        tokens: &[u32],
        place: &Place,
        bytes: &[u8],
    ) -> Result<Record, String> {
        let record = Record::parse(bytes, &self.shape, namespace);
        let record = record.map_err(|error| error.to_string())?;
        let end = place.first + record.tokens.len();
        let is_it = record.header.key == place.key
            && record.header.parent == place.parent
            && record.header.first == place.first
            && tokens.get(place.first..end) == Some(&record.tokens);
        if is_it { Ok(record) } else { Err("it is the record of another key".into()) }
    }

    fn write_record(&self, key: &ChainKey, record: &[u8]) -> io::Result<()> {
        let bytes = record.len() as u64;
        if bytes > self.budget {
            return Err(io::Error::other("a record is larger than the budget of the disk tier"));
        }
        let path = self.path(key);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        write_atomically(&path, |file| file.write_all(record))?;
        self.counters.wrote(bytes);
        self.index().insert(*key, bytes);
        self.shrink();
        Ok(())
    }

    fn write_failed(&self, error: &io::Error) {
        self.counters.write_failed();
        tracing::warn!(
            %error,
            folder = %self.folder.display(),
            pause_seconds = PAUSE.as_secs(),
            "KV could not be stored; nothing is stored for a while"
        );
        *lock(&self.paused_until) = Some(Instant::now() + PAUSE);
    }

    /// Whether a write has failed a short time ago.
    fn is_paused(&self) -> bool {
        lock(&self.paused_until).is_some_and(|until| Instant::now() < until)
    }

    /// Removes the least recently used records that exceed the budget.
    fn shrink(&self) {
        loop {
            let mut index = self.index();
            if index.bytes() <= self.budget {
                return;
            }
            let Some(oldest) = index.remove_oldest() else { return };
            drop(index);
            self.counters.evicted();
            self.remove_file(&oldest);
        }
    }

    fn remove(&self, key: &ChainKey) {
        self.index().remove(key);
        self.remove_file(key);
    }

    fn remove_file(&self, key: &ChainKey) {
        // It may be gone already; if it cannot be removed, it is found again at the next start.
        let _ = fs::remove_file(self.path(key));
    }

    /// Marks records of one prefix as used, in their order. The first ones count as used last, so
    /// that the end of a prefix is removed before its beginning, without which it is of no use.
    fn touch(&self, keys: &[ChainKey]) {
        let now = SystemTime::now();
        for key in keys.iter().rev() {
            self.index().touch(key);
            // For the order after a restart. Reading is possible without the right to do this.
            let _ = File::open(self.path(key)).and_then(|file| file.set_modified(now));
        }
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        lock(&self.index)
    }
}

/// Closing a file unlocks it only when no child process that was forked at that moment has a copy of
/// it.
impl Drop for DiskTier {
    fn drop(&mut self) {
        self.close();
    }
}

/// Ignores poisoning: every change under these locks is complete or has not begun.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
