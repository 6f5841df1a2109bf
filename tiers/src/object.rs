//! [`ObjectTier`]: records in an object store that several engines share: S3 and what is compatible
//! with it, Google Cloud Storage, Azure, or a shared directory.
//!
//! Each record is an object of its own, `FOLDER/v1/FORMAT/KEY.kv`: the folder of the URL, the first
//! digits of the KV format's fingerprint, and the record's key. The bytes are those of a file of the
//! disk tier. What is there is listed from time to time, so that a prompt that nobody has stored
//! costs no round trip. Nothing is ever removed: that is left to the store's own rules for old
//! objects.
//!
//! The methods need a tokio runtime with timers.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, parse_url_opts};

use crate::key::ChainKey;
use crate::object_stats::ObjectStats;
use crate::record::KvShape;

/// The folder of the objects of this version of the format.
const FOLDER: &str = "v1";
const EXTENSION: &str = ".kv";
/// Maximum number of records that are known.
const KEYS_MAX: usize = 4 << 20;
/// How long the store is left alone after a failure.
const PAUSE: Duration = Duration::from_secs(5);
/// How long one object may take.
const OBJECT_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a listing may take.
const LIST_TIMEOUT: Duration = Duration::from_secs(300);
/// The speed of fetching in bytes per second that is assumed before it was measured.
const ASSUMED_SPEED: f64 = 50e6;

/// Why an object store cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectError {
    /// The URL is not that of a store.
    #[error(
        "expected the URL of an object store, such as s3://bucket/folder, gs://, az:// or file://, \
         got `{url}`: {reason}"
    )]
    Url {
        /// The URL.
        url: String,
        /// What is wrong with it, or with the settings of its store.
        reason: String,
    },
    /// The store has answered with an error.
    #[error("the object store: {0}")]
    Store(#[from] object_store::Error),
    /// The store has not answered in time.
    #[error("the object store has not answered within {} s", .0.as_secs())]
    Timeout(Duration),
    /// An object has another size than its record.
    #[error("the object `{object}`: expected {expected} bytes, got {got}")]
    Size {
        /// Its name.
        object: String,
        /// Bytes of the record.
        expected: usize,
        /// Bytes of the object.
        got: u64,
    },
}

/// Records in an object store.
#[derive(Debug)]
pub struct ObjectTier {
    store: Box<dyn ObjectStore>,
    folder: Path,
    keys: Mutex<Keys>,
    /// Bytes per second of recent fetches; `None` before the first one.
    speed: Mutex<Option<f64>>,
    /// When the store is used again after a failure.
    paused_until: Mutex<Option<Instant>>,
    counters: Counters,
}

#[derive(Debug, Default)]
struct Keys {
    stored: HashSet<ChainKey>,
    /// Objects that were not what their names say.
    wrong: HashSet<ChainKey>,
}

/// They guard no other memory, so all accesses are relaxed.
#[derive(Debug, Default)]
struct Counters {
    fetched: AtomicU64,
    fetched_bytes: AtomicU64,
    stored: AtomicU64,
    stored_bytes: AtomicU64,
    refused: AtomicU64,
    failures: AtomicU64,
    skipped: AtomicU64,
}

impl ObjectTier {
    /// A store by its URL. `settings` are names and values as the store's own tools take them from
    /// the environment, such as `AWS_ACCESS_KEY_ID`; others are ignored. Does no I/O.
    ///
    /// # Errors
    /// [`ObjectError::Url`].
    pub fn new(
        url: &str,
        settings: impl IntoIterator<Item = (String, String)>,
        shape: &KvShape,
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
            speed: Mutex::default(),
            paused_until: Mutex::default(),
            counters: Counters::default(),
        })
    }

    /// Asks the store for the first of its records: whether it can be used.
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
        let speed = lock(&self.speed).unwrap_or(ASSUMED_SPEED).max(1.0);
        Duration::from_secs_f64((bytes as f64 / speed).min(1e6))
    }

    /// Notes how long fetches have taken together.
    pub fn note_speed(&self, bytes: usize, time: Duration) {
        let now = bytes as f64 / time.as_secs_f64().max(1e-9);
        let mut speed = lock(&self.speed);
        *speed = Some(speed.map_or(now, |before| 0.7 * before + 0.3 * now));
    }

    /// Fetches an object of `bytes` bytes. It is not verified.
    ///
    /// # Errors
    /// [`ObjectError`]; the store is left alone for a few seconds then, unless only the size is
    /// wrong.
    pub async fn fetch(&self, key: &ChainKey, bytes: usize) -> Result<Vec<u8>, ObjectError> {
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
                add(&self.counters.fetched, 1);
                add(&self.counters.fetched_bytes, got.len() as u64);
                Ok(got.into())
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

    /// Notes that an object is not what its name says. It is not fetched again.
    pub fn refuse(&self, key: &ChainKey) {
        add(&self.counters.refused, 1);
        let mut keys = self.keys();
        if keys.wrong.len() < KEYS_MAX {
            keys.wrong.insert(*key);
        }
    }

    /// Stores a record.
    ///
    /// # Errors
    /// [`ObjectError`]; the store is left alone for a few seconds then.
    pub async fn store(&self, key: &ChainKey, record: Vec<u8>) -> Result<(), ObjectError> {
        let bytes = record.len() as u64;
        let path = self.path(key);
        match within(OBJECT_TIMEOUT, self.store.put(&path, record.into())).await {
            Ok(_) => {
                add(&self.counters.stored, 1);
                add(&self.counters.stored_bytes, bytes);
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
        lock(&self.paused_until).is_some_and(|until| Instant::now() < until)
    }

    /// Notes that records were not stored.
    pub fn note_skipped(&self, records: u64) {
        add(&self.counters.skipped, records);
    }

    /// Counters, and what is known of the store.
    pub fn stats(&self) -> ObjectStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        ObjectStats {
            records: self.keys().stored.len() as u64,
            records_fetched: get(&counters.fetched),
            fetched_bytes: get(&counters.fetched_bytes),
            records_stored: get(&counters.stored),
            stored_bytes: get(&counters.stored_bytes),
            records_refused: get(&counters.refused),
            failures: get(&counters.failures),
            writes_skipped: get(&counters.skipped),
        }
    }

    fn failed(&self, error: ObjectError) -> ObjectError {
        add(&self.counters.failures, 1);
        *lock(&self.paused_until) = Some(Instant::now() + PAUSE);
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
        Ok(result) => Ok(result?),
        Err(_) => Err(ObjectError::Timeout(limit)),
    }
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// Ignores poisoning: every change under these locks is complete or has not begun.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
