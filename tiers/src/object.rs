//! [`ObjectTier`]: records in an object store that several engines share: S3 and what is compatible
//! with it, Google Cloud Storage, Azure, or a shared directory.
//!
//! Each record is an object of its own, `FOLDER/v1/FORMAT/KEY.kv`: the folder of the URL, the first
//! digits of the KV format's fingerprint, and the record's key. The bytes are those of a file of
//! the disk tier. What is there is listed from time to time, so that a prompt that no engine has
//! stored costs no round trip. Nothing is ever removed: that is left to the store's own rules for
//! old objects.
//!
//! The methods need a tokio runtime with timers.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, parse_url_opts};

use crate::key::ChainKey;
use crate::object_error::ObjectError;
use crate::object_stats::ObjectStats;
use crate::record::RecordShape;
use crate::shared::{Counter, Pause, Speed, lock};

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

/// Records in an object store.
#[derive(Debug)]
pub struct ObjectTier {
    store: Box<dyn ObjectStore>,
    folder: Path,
    keys: Mutex<Keys>,
    /// Speed of recent fetches.
    speed: Speed,
    pause: Pause,
    counters: Counters,
}

#[derive(Debug, Default)]
struct Keys {
    stored: HashSet<ChainKey>,
    /// Keys of objects whose content did not match their names.
    wrong: HashSet<ChainKey>,
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

    /// Lists the records that the store has.
    ///
    /// # Errors
    /// [`ObjectError`]; what was known remains known.
    pub async fn refresh(&self) -> Result<(), ObjectError> {
        let list = self.store.list(Some(&self.folder));
        let add = |mut stored: HashSet<ChainKey>, object: object_store::ObjectMeta| async move {
            let name = object.location.filename().and_then(|name| name.strip_suffix(EXTENSION));
            if stored.len() < KEYS_MAX {
                stored.extend(name.and_then(ChainKey::from_hex));
            }
            Ok(stored)
        };
        let listed = within(LIST_TIMEOUT, list.try_fold(HashSet::new(), add)).await;
        match listed {
            Ok(stored) => {
                self.keys().stored = stored;
                Ok(())
            }
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Whether the store has a record, as far as is known, and can be used now. Does no I/O.
    pub fn contains(&self, key: &ChainKey) -> bool {
        let keys = self.keys();
        keys.stored.contains(key) && !keys.wrong.contains(key) && !self.is_paused()
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
    /// [`ObjectError`]; the store is then not used for a few seconds, unless only the size is
    /// wrong.
    pub async fn fetch(&self, key: &ChainKey, bytes: usize) -> Result<Bytes, ObjectError> {
        let path = self.path(key);
        let get = async {
            let object = self.store.get(&path).await?;
            if object.meta.size != bytes as u64 {
                let (object, got) = (path.to_string(), object.meta.size);
                // The size is that of the reply's header: nothing was read.
                return Ok(Err((object, got)));
            }
            object.bytes().await.map(Ok)
        };
        match within(OBJECT_TIMEOUT, get).await {
            Ok(Ok(got)) => {
                self.counters.fetched.add(1);
                self.counters.fetched_bytes.add(got.len() as u64);
                Ok(got)
            }
            Ok(Err((object, got))) => {
                self.refuse(key);
                Err(ObjectError::Size { object, expected: bytes, got })
            }
            Err(error) => {
                // It may have been removed since it was listed.
                self.keys().stored.remove(key);
                Err(self.failed(error))
            }
        }
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

    /// Counters, and what is known of the store.
    pub fn stats(&self) -> ObjectStats {
        let counters = &self.counters;
        ObjectStats {
            records: self.keys().stored.len() as u64,
            records_fetched: counters.fetched.get(),
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

/// The result of a request to the store, if it comes in time.
async fn within<T>(
    limit: Duration,
    request: impl Future<Output = Result<T, object_store::Error>>,
) -> Result<T, ObjectError> {
    match tokio::time::timeout(limit, request).await {
        Ok(result) => result.map_err(|error| ObjectError::Store(error.to_string())),
        Err(_) => Err(ObjectError::Timeout(limit)),
    }
}
