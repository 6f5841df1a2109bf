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
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use stolon_kvcache::{EvictionOrder, EvictionPolicy, Namespace};

use crate::disk_index::{EXTENSION, Index};
use crate::disk_stats::{Counters, DiskStats};
use crate::key::ChainKey;
use crate::prefix::write_atomically;
use crate::record::{KvShape, Record, is_of};
use crate::shared::{PAUSE, Pause, Speed, lock};

/// The folder of the files of this version of the format.
const FOLDER: &str = "v1";
/// The file with the key of namespaces.
const KEY_FILE: &str = "namespace-key";
/// The speed of reading in bytes per second that is assumed before it was measured.
const ASSUMED_SPEED: f64 = 200e6;
/// Maximum number of threads that read one prompt.
const READ_THREADS_MAX: usize = 4;

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
    /// Of reads.
    speed: Speed,
    /// Of writes.
    pause: Pause,
    namespace_key: [u8; 32],
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
    /// what exceeds the budget, in the order `eviction`. Blocks; the time is proportional to the
    /// number of files.
    ///
    /// The order ranks records as it ranks leaves of the prefix tree. The files do not say how
    /// often and with which priority they were used, so after a restart that begins anew.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn open(
        directory: &Path,
        budget: u64,
        shape: KvShape,
        eviction: Box<dyn EvictionOrder>,
    ) -> Result<DiskTier, DiskError> {
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
        let path = folder.join(KEY_FILE);
        let namespace_key = namespace_key(&path).map_err(failed(&path))?;
        let index = Index::scan(&folder, eviction).map_err(failed(&folder))?;
        let tier = DiskTier {
            folder,
            shape,
            budget,
            index: Mutex::new(index),
            counters: Counters::default(),
            speed: Speed::assumed(ASSUMED_SPEED),
            pause: Pause::default(),
            namespace_key,
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

    /// A secret key for namespaces with a salt, which was drawn at random when the directory was
    /// made. With it, they are the same after a restart.
    pub fn namespace_key(&self) -> [u8; 32] {
        self.namespace_key
    }

    /// Number of positions from the start of `tokens` that are stored: whole records. Does no I/O
    /// and changes nothing.
    pub fn query_match_len(&self, namespace: &Namespace, tokens: &[u32]) -> usize {
        let index = self.index();
        let stored = self.places(namespace, tokens);
        let stored = stored.take_while(|place| index.contains(&place.key));
        stored.count() * self.shape.record_positions()
    }

    /// The time that reading `positions` positions takes, by the speed of recent reads.
    pub fn read_time(&self, positions: usize) -> Duration {
        self.speed.time_of(self.shape.record_bytes(positions).unwrap_or(usize::MAX))
    }

    /// Whether to read something only to learn how fast that is now. Says so to one caller at most
    /// every 30 seconds, and to none while there are other reads.
    pub fn speed_is_due(&self) -> bool {
        self.speed.is_due()
    }

    /// Reads the records of a prompt's first places, those from position `from` on, and verifies
    /// them. Returns the bytes of each block, fewer if a record is missing or wrong. Wrong records
    /// are removed. Blocks, and uses a few threads, because verifying takes as long as reading.
    pub fn read(
        &self,
        namespace: &Namespace,
        tokens: &[u32],
        places: &[Place],
        from: usize,
    ) -> Vec<Bytes> {
        let begun = Instant::now();
        let wanted = &places[places.partition_point(|place| place.first < from)..];
        let mut records = self.read_records(namespace, tokens, wanted);
        let complete = records.iter().take_while(|record| record.is_some()).count();
        // If the whole directory is gone, the records after the first missing one are gone too.
        // While they are in the index, they are not written again.
        for place in &wanted[complete..] {
            if !self.path(&place.key).exists() {
                self.index().remove(&place.key);
            }
        }
        let time = begun.elapsed();
        let read = records.drain(..complete).flatten();
        let (mut blocks, mut bytes) = (Vec::new(), 0);
        for record in read {
            bytes += record.header.record_bytes as u64;
            blocks.extend(record.blocks);
        }
        if bytes > 0 {
            self.counters.read(bytes, blocks.len() * self.shape.block_size, time);
            self.speed.note(bytes, time);
        }
        blocks
    }

    /// Reads records in parallel, up to the first one that is missing or wrong. The results have
    /// the order of `places`.
    fn read_records(
        &self,
        namespace: &Namespace,
        tokens: &[u32],
        places: &[Place],
    ) -> Vec<Option<Record>> {
        let records: Vec<OnceLock<Record>> = places.iter().map(|_| OnceLock::new()).collect();
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = || {
            while !failed.load(Ordering::Relaxed) {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(place) = places.get(index) else { return };
                match self.read_record(namespace, tokens, place) {
                    // Each index is read once.
                    Some(record) => drop(records[index].set(record)),
                    None => failed.store(true, Ordering::Relaxed),
                }
            }
        };
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let threads = places.len().min(cores).min(READ_THREADS_MAX);
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // What cannot be done in parallel is done by this thread.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        records.into_iter().map(OnceLock::into_inner).collect()
    }

    /// Stores full records of `tokens` from position `first` on, the beginning of a record.
    /// `blocks` are the bytes of the blocks from there, one after another; a rest that fills no
    /// record is ignored. They are for a request of this `priority`. What exceeds the budget is
    /// removed. If a write fails, nothing is written for a few seconds. Blocks.
    /// Returns the keys of what was written.
    pub fn write(
        &self,
        namespace: &Namespace,
        tokens: &[u32],
        first: usize,
        blocks: &[u8],
        priority: i32,
    ) -> Vec<ChainKey> {
        let positions = self.shape.record_positions();
        let bytes = positions / self.shape.block_size * self.shape.block_bytes;
        let places = self.places(namespace, tokens).filter(|place| place.first >= first);
        let (mut written, now) = (Vec::new(), SystemTime::now());
        for (place, blocks) in places.zip(blocks.chunks_exact(bytes)) {
            if self.index().contains(&place.key) {
                continue;
            }
            if !self.accepts_writes() {
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
            match self.write_record(&place.key, &record, earlier(now, written.len())) {
                Ok(()) => written.push(place),
                Err(error) => self.write_failed(&error),
            }
        }
        self.index().note_use(&written, &self.shape, priority, false);
        written.into_iter().map(|place| place.key).collect()
    }

    /// The bytes of a stored record; `None` if there is none, it cannot be read or has KV of
    /// another format, of another model for example. They are not verified. Blocks.
    pub fn bytes_of(&self, key: &ChainKey) -> Option<Bytes> {
        let file = self.contains(key).then(|| File::open(self.path(key)))?.ok()?;
        let mut bytes = Vec::new();
        let expected = self.shape.record_bytes(self.shape.record_positions())?;
        file.take(expected as u64 + 1).read_to_end(&mut bytes).ok()?;
        (bytes.len() == expected && is_of(&bytes, &self.shape)).then(|| bytes.into())
    }

    /// The keys of all records, also of other formats, those that were used last first. Does no
    /// I/O.
    pub fn keys(&self) -> Vec<ChainKey> {
        self.index().keys()
    }

    /// Removes all records. Blocks.
    pub fn clear(&self) {
        let keys = self.index().clear();
        keys.iter().for_each(|key| self.remove_file(key));
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
        *self.index() = Index::new(EvictionPolicy::default().order());
        self.closed.store(true, Ordering::Release);
        // If this fails, the directory is free when this process ends.
        let _ = self.lock.unlock();
    }

    /// Whether writes are tried now: not for a while after one has failed, and not after
    /// [`DiskTier::close`].
    pub(crate) fn accepts_writes(&self) -> bool {
        !self.pause.is_on() && !self.closed.load(Ordering::Acquire)
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
            self.verify(namespace, tokens, place, &bytes.into())
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

    /// The record in `bytes`, which come from here or from elsewhere, if it is that of `place`.
    /// Does no I/O.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn verify(
        &self,
        namespace: &Namespace,
        tokens: &[u32],
        place: &Place,
        bytes: &Bytes,
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

    fn write_record(&self, key: &ChainKey, record: &[u8], used: SystemTime) -> io::Result<()> {
        let bytes = record.len() as u64;
        if bytes > self.budget {
            return Err(io::Error::other("a record is larger than the budget of the disk tier"));
        }
        let path = self.path(key);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        write_atomically(&path, |file| {
            file.write_all(record)?;
            // Only the order after a restart depends on it.
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
            folder = %self.folder.display(),
            pause_seconds = PAUSE.as_secs(),
            "KV could not be stored; nothing is stored for a while"
        );
        self.pause.begin();
    }

    /// Replaces the order in which records are removed when the budget is exceeded.
    pub fn set_eviction_order(&self, eviction: Box<dyn EvictionOrder>) {
        self.index().set_order(eviction);
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
        let _ = fs::remove_file(self.path(key));
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
            // Reading is possible without the right to do this.
            let _ = File::open(self.path(&place.key)).and_then(|file| file.set_modified(used));
        }
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        lock(&self.index)
    }
}

/// Closing a file unlocks it only when no child process that was forked at that moment has a copy
/// of it.
impl Drop for DiskTier {
    fn drop(&mut self) {
        self.close();
    }
}

/// When the record with this number of a prefix that was used at `now` counts as used: the first
/// one last.
fn earlier(now: SystemTime, number: usize) -> SystemTime {
    now.checked_sub(Duration::from_micros(number as u64)).unwrap_or(now)
}

/// The key in a file. It is made if it does not exist; if it has another size, it is made again.
fn namespace_key(path: &Path) -> io::Result<[u8; 32]> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(33).read_to_end(&mut bytes));
    let read = match read {
        Ok(_) => <[u8; 32]>::try_from(bytes).ok(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    if let Some(key) = read {
        return Ok(key);
    }
    let mut key = [0; 32];
    getrandom::fill(&mut key).map_err(io::Error::other)?;
    write_atomically(path, |file| file.write_all(&key))?;
    Ok(key)
}
