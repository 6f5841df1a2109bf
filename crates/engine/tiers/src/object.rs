//! [`ObjectTier`]: records in an object store that several engines share: S3 and compatible stores,
//! Google Cloud Storage, Azure, or a shared directory.
//!
//! Each record is an object of its own, `FOLDER/v1/FORMAT/KEY.kv`: the folder of the URL, the first
//! digits of the KV format's fingerprint, and the record's key. The bytes are those of a file of
//! the disk tier. The store's objects are listed from time to time; between two listings, a record
//! that is not known can be looked for once ([`ObjectTier::look`]). Nothing is ever removed: that
//! is left to the store's own rules for old objects.
//!
//! The methods need a tokio runtime with timers.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{GetResult, ObjectMeta, ObjectStore, ObjectStoreExt, parse_url_opts};

use crate::key::ChainKey;
use crate::object_error::ObjectError;
use crate::object_stats::ObjectStats;
use crate::record::RecordShape;
use crate::shared::{Counter, Latency, Pause, Speed, lock};

/// The folder of the objects of this version of the format.
const FOLDER: &str = "v1";
const EXTENSION: &str = ".kv";
/// Maximum number of records that are known.
const KEYS_MAX: usize = 4 << 20;
/// Maximum time for fetching or storing one object.
const OBJECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum time of a listing.
const LIST_TIMEOUT: Duration = Duration::from_secs(300);
/// The speed of fetching in bytes per second that is assumed before it was measured.
const ASSUMED_SPEED: f64 = 50e6;
/// The time of looking for a record that is assumed before it was measured.
const ASSUMED_LOOK: Duration = Duration::from_millis(20);

/// Records in an object store.
#[derive(Debug)]
pub struct ObjectTier {
    store: Box<dyn ObjectStore>,
    folder: Path,
    keys: Mutex<Keys>,
    /// Speed of recent fetches.
    speed: Speed,
    /// Time until the store answered when it was asked for a record that it was not known to have.
    look_time: Latency,
    pause: Pause,
    counters: Counters,
}

#[derive(Debug, Default)]
struct Keys {
    stored: HashSet<ChainKey>,
    /// Keys of objects whose content did not match their names.
    wrong: HashSet<ChainKey>,
    /// Keys that were looked for since the last listing and were not found.
    absent: HashSet<ChainKey>,
}

#[derive(Debug, Default)]
struct Counters {
    fetched: Counter,
    fetched_bytes: Counter,
    stored: Counter,
    stored_bytes: Counter,
    refused: Counter,
    failures: Counter,
    skipped: Counter,
    looks_found: Counter,
    looks_absent: Counter,
}

impl ObjectTier {
    /// The store at this URL. `settings` are names and values as the store's own tools take them
    /// from the environment, such as `AWS_ACCESS_KEY_ID`; others are ignored. Does no I/O.
    ///
    /// # Errors
    /// [`ObjectError::Url`].
    pub fn new(
        url: &str,
        settings: impl IntoIterator<Item = (String, String)>,
        shape: &RecordShape,
    ) -> Result<ObjectTier, ObjectError> {
        // Fails if the program has chosen one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let failed = |reason: String| ObjectError::Url { url: url.to_owned(), reason };
        let parsed = url::Url::parse(url).map_err(|error| failed(error.to_string()))?;
        let (store, folder) =
            parse_url_opts(&parsed, settings).map_err(|error| failed(error.to_string()))?;
        let format = ChainKey::from_bytes(shape.fingerprint).to_hex();
        let folder = folder.join(FOLDER).join(&format[..16]);
        Ok(ObjectTier {
            store,
            folder,
            keys: Mutex::default(),
            speed: Speed::assumed(ASSUMED_SPEED),
            look_time: Latency::assumed(ASSUMED_LOOK),
            pause: Pause::default(),
            counters: Counters::default(),
        })
    }

    /// Checks that the store can be used, by asking it for its first record.
    ///
    /// # Errors
    /// [`ObjectError`].
    pub async fn check(&self) -> Result<(), ObjectError> {
        let mut list = self.store.list(Some(&self.folder));
        within(OBJECT_TIMEOUT, list.try_next()).await.map(drop)
    }

    /// Lists the records that the store has. If the speed of fetching was never measured, one of
    /// them is fetched and dropped: otherwise the first prompt would wait for a store of unknown
    /// speed.
    ///
    /// # Errors
    /// [`ObjectError`]. The records that were known remain known.
    pub async fn refresh(&self) -> Result<(), ObjectError> {
        let list = self.store.list(Some(&self.folder));
        let add = |(mut stored, _): (HashSet<ChainKey>, _), object: ObjectMeta| async move {
            let name = object.location.filename().and_then(|name| name.strip_suffix(EXTENSION));
            if stored.len() < KEYS_MAX {
                stored.extend(name.and_then(ChainKey::from_hex));
            }
            Ok((stored, Some(object)))
        };
        let listed = list.try_fold((HashSet::new(), None), add);
        let listed = within(LIST_TIMEOUT, listed).await;
        let (stored, last) = listed.map_err(|error| self.failed(error))?;
        {
            let mut keys = self.keys();
            keys.stored = stored;
            keys.absent.clear();
        }
        match last.filter(|_| !self.speed.is_measured()) {
            Some(object) => self.measure(&object).await,
            None => Ok(()),
        }
    }

    async fn measure(&self, object: &ObjectMeta) -> Result<(), ObjectError> {
        let begun = Instant::now();
        let get = async { self.store.get(&object.location).await?.bytes().await };
        match within(OBJECT_TIMEOUT, get).await {
            Ok(bytes) => {
                self.note_speed(bytes.len(), begun.elapsed());
                Ok(())
            }
            Err(ObjectError::Missing(_)) => Ok(()),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Whether the store has a record, as far as is known, and can be used now. Does no I/O.
    pub fn contains(&self, key: &ChainKey) -> bool {
        let keys = self.keys();
        keys.stored.contains(key) && !keys.wrong.contains(key) && !self.is_paused()
    }

    /// Whether the store may have a record that it is not known to have: it was not looked for
    /// since the last listing. Does no I/O.
    pub fn may_contain(&self, key: &ChainKey) -> bool {
        let keys = self.keys();
        !keys.wrong.contains(key) && !keys.absent.contains(key) && !self.is_paused()
    }

    /// The time until the store answers that it does not have a record, by recent answers.
    pub fn look_time(&self) -> Duration {
        self.look_time.get()
    }

    /// The time that fetching `bytes` bytes takes, by the speed of recent fetches.
    pub fn fetch_time(&self, bytes: usize) -> Duration {
        self.speed.time_of(bytes)
    }

    /// Whether the caller should fetch something only to measure the speed. True for at most one
    /// caller every 30 seconds, and for none while there are other fetches.
    pub fn speed_is_due(&self) -> bool {
        self.speed.is_due()
    }

    /// Notes how long fetches have taken together.
    pub fn note_speed(&self, bytes: usize, time: Duration) {
        self.speed.note(bytes as u64, time);
    }

    /// Fetches an object of `bytes` bytes. It is not verified.
    ///
    /// # Errors
    /// [`ObjectError`]; the store is then not used for a few seconds, unless the object is missing
    /// or only its size is wrong.
    pub async fn fetch(&self, key: &ChainKey, bytes: usize) -> Result<Bytes, ObjectError> {
        let path = self.path(key);
        let fetched = match within(OBJECT_TIMEOUT, self.store.get(&path)).await {
            Ok(object) => self.receive(key, bytes, object).await,
            Err(error) => Err(error),
        };
        fetched.map_err(|error| self.not_fetched(key, error))
    }

    /// Fetches an object that the store may have. `None` if it does not say within this time that
    /// it has it.
    ///
    /// # Errors
    /// The errors of [`ObjectTier::fetch`].
    pub async fn look(
        &self,
        key: &ChainKey,
        bytes: usize,
        limit: Duration,
    ) -> Result<Option<Bytes>, ObjectError> {
        let (path, begun) = (self.path(key), Instant::now());
        let answer = tokio::time::timeout(limit, self.store.get(&path)).await;
        self.look_time.note(begun.elapsed());
        let fetched = match answer {
            Err(_) => Ok(None),
            Ok(Ok(object)) => self.receive(key, bytes, object).await.map(Some),
            Ok(Err(error)) => Err(error.into()),
        };
        let fetched = match fetched.map_err(|error| self.not_fetched(key, error)) {
            Err(ObjectError::Missing(_)) => Ok(None),
            fetched => fetched,
        };
        match fetched {
            Ok(Some(_)) => self.counters.looks_found.add(1),
            _ => self.counters.looks_absent.add(1),
        }
        fetched
    }

    /// The content of an object whose header has come.
    async fn receive(
        &self,
        key: &ChainKey,
        bytes: usize,
        object: GetResult,
    ) -> Result<Bytes, ObjectError> {
        if object.meta.size != bytes as u64 {
            self.refuse(key);
            let (object, got) = (object.meta.location.to_string(), object.meta.size);
            return Err(ObjectError::Size { object, expected: bytes, got });
        }
        let got = within(OBJECT_TIMEOUT, object.bytes()).await?;
        self.counters.fetched.add(1);
        self.counters.fetched_bytes.add(got.len() as u64);
        let mut keys = self.keys();
        if keys.stored.len() < KEYS_MAX {
            keys.stored.insert(*key);
        }
        Ok(got)
    }

    fn not_fetched(&self, key: &ChainKey, error: ObjectError) -> ObjectError {
        if matches!(error, ObjectError::Size { .. }) {
            return error;
        }
        let mut keys = self.keys();
        // It may have been removed since it was listed.
        keys.stored.remove(key);
        if !matches!(error, ObjectError::Missing(_)) {
            drop(keys);
            return self.failed(error);
        }
        if keys.absent.len() < KEYS_MAX {
            keys.absent.insert(*key);
        }
        error
    }

    /// Notes that the content of an object does not match its name. It is not fetched again.
    pub fn refuse(&self, key: &ChainKey) {
        self.counters.refused.add(1);
        let mut keys = self.keys();
        if keys.wrong.len() < KEYS_MAX {
            keys.wrong.insert(*key);
        }
    }

    /// Stores a record.
    ///
    /// # Errors
    /// [`ObjectError`]; the store is then not used for a few seconds.
    pub async fn store(&self, key: &ChainKey, record: Bytes) -> Result<(), ObjectError> {
        let bytes = record.len() as u64;
        let path = self.path(key);
        match within(OBJECT_TIMEOUT, self.store.put(&path, record.into())).await {
            Ok(_) => {
                self.counters.stored.add(1);
                self.counters.stored_bytes.add(bytes);
                let mut keys = self.keys();
                if keys.stored.len() < KEYS_MAX {
                    keys.stored.insert(*key);
                }
                keys.wrong.remove(key);
                keys.absent.remove(key);
                Ok(())
            }
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Whether the store has failed a short time ago.
    pub fn is_paused(&self) -> bool {
        self.pause.is_on()
    }

    /// Notes that records were not stored.
    pub fn note_skipped(&self, records: u64) {
        self.counters.skipped.add(records);
    }

    /// Counters, and the number of records that the store is known to have.
    pub fn stats(&self) -> ObjectStats {
        let counters = &self.counters;
        // The sum is computed from the values that are reported, so that the difference never
        // falls.
        let looks_found = counters.looks_found.get();
        ObjectStats {
            records: self.keys().stored.len() as u64,
            records_fetched: counters.fetched.get(),
            looks: looks_found + counters.looks_absent.get(),
            looks_found,
            fetched_bytes: counters.fetched_bytes.get(),
            records_stored: counters.stored.get(),
            stored_bytes: counters.stored_bytes.get(),
            records_refused: counters.refused.get(),
            failures: counters.failures.get(),
            writes_skipped: counters.skipped.get(),
        }
    }

    fn failed(&self, error: ObjectError) -> ObjectError {
        self.counters.failures.add(1);
        self.pause.begin();
        error
    }

    fn path(&self, key: &ChainKey) -> Path {
        self.folder.clone().join(key.to_hex() + EXTENSION)
    }

    fn keys(&self) -> MutexGuard<'_, Keys> {
        lock(&self.keys)
    }
}

/// The result of a request to the store, or an error if it takes too long.
async fn within<T>(
    limit: Duration,
    request: impl Future<Output = Result<T, object_store::Error>>,
) -> Result<T, ObjectError> {
    match tokio::time::timeout(limit, request).await {
        Ok(result) => result.map_err(ObjectError::from),
        Err(_) => Err(ObjectError::Timeout(limit)),
    }
}
