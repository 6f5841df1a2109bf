//! The object store behind the disk tier: a task uploads records that are written to the disk.
//! Records that only the store has are fetched, or looked for, when a prompt needs them.
//!
//! The task uploads a few records at a time from a bounded queue; records that do not fit are left
//! out, counted, and offered again when it is computed again by an engine whose disk lacks it.
//! Another task lists the store from time to time, to learn what other engines have stored.

use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::{StreamExt, stream};
use stolon_kvcache::Namespace;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

use crate::disk::DiskTier;
use crate::key::ChainKey;
use crate::object::ObjectTier;
use crate::object_error::ObjectError;
use crate::object_stats::ObjectStats;
use crate::place::Place;
use crate::record::{Record, RecordShape};
use crate::tier::{RemoteTier, Tier};
use crate::tokens::NamedTokens;

/// Maximum number of lists of records that wait to be uploaded.
const QUEUE: usize = 1_024;
/// Records that are uploaded at a time, and that are fetched at a time for one prompt.
const PARALLEL: usize = 16;
/// Minimum time between two listings, and the same as a multiple of the time that a listing takes.
const LIST_INTERVAL: Duration = Duration::from_secs(30);
const LIST_INTERVAL_TIMES: u32 = 20;
/// The maximum time that a flush waits.
const FLUSH_LIMIT: Duration = Duration::from_secs(30);

/// An object store, and the queue of uploads to it.
#[derive(Debug)]
pub(crate) struct ObjectStoreTier {
    tier: Arc<ObjectTier>,
    disk: Arc<DiskTier>,
    uploads: mpsc::Sender<Upload>,
    /// The runtime of all tasks.
    runtime: Handle,
}

#[derive(Debug)]
enum Upload {
    Records(Vec<ChainKey>),
    /// Answered when every upload before it was made or given up.
    Flush(oneshot::Sender<()>),
}

/// Opens a store and checks that it answers. Its settings are taken from the environment. Blocks,
/// and must be called on a thread of a tokio runtime that may block.
pub(crate) fn open(url: &str, disk: Arc<DiskTier>) -> Result<Arc<dyn RemoteTier>, ObjectError> {
    // Variables that are not UTF-8 are not settings.
    let settings = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let tier = Arc::new(ObjectTier::new(url, settings, disk.shape())?);
    let runtime = Handle::try_current().map_err(|error| ObjectError::Store(error.to_string()))?;
    let checked = Arc::clone(&tier);
    let answer = run(&runtime, async move { checked.check().await });
    answer.ok_or_else(|| ObjectError::Store("the runtime has ended".to_owned()))??;
    tracing::info!(url, "KV is stored in an object store");
    let (uploads, queue) = mpsc::channel(QUEUE);
    runtime.spawn(upload_all(Arc::clone(&tier), Arc::clone(&disk), queue));
    runtime.spawn(list(Arc::downgrade(&tier), Arc::downgrade(&disk)));
    Ok(Arc::new(ObjectStoreTier { tier, disk, uploads, runtime }))
}

/// Runs a task and waits for its result; `None` if the runtime ends. In this case `block_on` would
/// panic.
fn run<T: Send + 'static>(
    runtime: &Handle,
    work: impl Future<Output = T> + Send + 'static,
) -> Option<T> {
    let (sender, result) = std::sync::mpsc::sync_channel(1);
    runtime.spawn(async move { sender.send(work.await) });
    result.recv().ok()
}

impl Tier for ObjectStoreTier {
    fn contains(&self, key: &ChainKey) -> bool {
        self.tier.contains(key)
    }

    fn record_time(&self) -> Duration {
        self.tier.fetch_time(self.disk.shape().full_record_bytes())
    }

    fn speed_is_due(&self) -> bool {
        self.tier.speed_is_due()
    }

    fn read(&self, namespace: &Namespace, tokens: &NamedTokens, places: &[Place]) -> Vec<Bytes> {
        run(&self.runtime, self.fetch(namespace, tokens, places).all()).unwrap_or_default()
    }
}

impl RemoteTier for ObjectStoreTier {
    fn may_contain(&self, key: &ChainKey) -> bool {
        self.tier.may_contain(key)
    }

    fn look_time(&self) -> Duration {
        self.tier.look_time()
    }

    fn look(
        &self,
        namespace: &Namespace,
        tokens: &NamedTokens,
        places: &[Place],
        limit: Duration,
    ) -> Vec<Bytes> {
        let fetch = self.fetch(namespace, tokens, places);
        run(&self.runtime, fetch.look(limit)).unwrap_or_default()
    }

    fn offer(&self, keys: &[ChainKey]) {
        let count = keys.len() as u64;
        if count > 0 && self.uploads.try_send(Upload::Records(keys.to_vec())).is_err() {
            self.tier.note_skipped(count);
        }
    }

    fn flush(&self) {
        let uploads = self.uploads.clone();
        let flush = async move {
            let (done, finished) = oneshot::channel();
            if uploads.send(Upload::Flush(done)).await.is_ok() {
                // Fails only if the task has ended.
                let _ = finished.await;
            }
        };
        let flush = async move { tokio::time::timeout(FLUSH_LIMIT, flush).await };
        if run(&self.runtime, flush).is_some_and(|flushed| flushed.is_err()) {
            tracing::warn!("some KV was not uploaded to the object store in time");
        }
    }

    fn stats(&self) -> ObjectStats {
        self.tier.stats()
    }
}

impl ObjectStoreTier {
    fn fetch(&self, namespace: &Namespace, tokens: &NamedTokens, places: &[Place]) -> Fetch {
        Fetch {
            tier: Arc::clone(&self.tier),
            shape: *self.disk.shape(),
            namespace: *namespace,
            tokens: tokens.clone(),
            places: places.to_vec(),
        }
    }
}

/// Consecutive records of a prompt that are fetched and verified.
struct Fetch {
    tier: Arc<ObjectTier>,
    shape: RecordShape,
    namespace: Namespace,
    tokens: NamedTokens,
    places: Vec<Place>,
}

impl Fetch {
    /// The blocks of the records, up to the first one that is missing or wrong.
    async fn all(self) -> Vec<Bytes> {
        let begun = Instant::now();
        let places = stream::iter(self.places.iter().copied());
        let mut records = places.map(|place| self.one(place)).buffered(PARALLEL);
        let (mut blocks, mut bytes) = (Vec::new(), 0);
        while let Some(record) = records.next().await {
            match record {
                Ok(record) => {
                    bytes += record.header.record_bytes;
                    blocks.extend(record.blocks);
                }
                Err(error) => {
                    warn(&error);
                    break;
                }
            }
        }
        if bytes > 0 {
            self.tier.note_speed(bytes, begun.elapsed());
        }
        blocks
    }

    /// Fetches records that the store may have. Returns nothing if the store does not say within
    /// `limit` that it has the first one.
    async fn look(mut self, limit: Duration) -> Vec<Bytes> {
        let Some(&first) = self.places.first() else { return Vec::new() };
        let found = match self.tier.look(&first.key, first.bytes(&self.shape), limit).await {
            Ok(Some(bytes)) => self.verify(first, bytes).await,
            Ok(None) => return Vec::new(),
            Err(error) => Err(error.into()),
        };
        let mut blocks = match found {
            Ok(record) => record.blocks,
            Err(error) => {
                warn(&error);
                return Vec::new();
            }
        };
        self.places.remove(0);
        blocks.extend(self.all().await);
        blocks
    }

    async fn one(&self, place: Place) -> Result<Record, FetchError> {
        let record = self.tier.fetch(&place.key, place.bytes(&self.shape)).await?;
        self.verify(place, record).await
    }

    async fn verify(&self, place: Place, record: Bytes) -> Result<Record, FetchError> {
        let (shape, namespace) = (self.shape, self.namespace);
        let tokens = self.tokens.clone();
        let verify = move || place.verify(&shape, &namespace, &tokens, &record);
        // Fails only if the runtime ends.
        let verified = tokio::task::spawn_blocking(verify).await;
        let verified = verified.map_err(|error| FetchError::Record(error.to_string()))?;
        verified.map_err(|reason| {
            self.tier.refuse(&place.key);
            FetchError::Record(reason)
        })
    }
}

/// Why a record could not be fetched.
#[derive(Debug, thiserror::Error)]
enum FetchError {
    #[error(transparent)]
    Store(#[from] ObjectError),
    #[error("{0}")]
    Record(String),
}

fn warn(error: &FetchError) {
    // A record that is looked for may be absent, and the store's rules may have removed an old one.
    if !matches!(error, FetchError::Store(ObjectError::Missing(_))) {
        tracing::warn!(%error, "stored KV could not be fetched; it is computed");
    }
}

/// Uploads until the last sender is dropped.
async fn upload_all(tier: Arc<ObjectTier>, disk: Arc<DiskTier>, mut queue: mpsc::Receiver<Upload>) {
    while let Some(message) = queue.recv().await {
        match message {
            Upload::Records(keys) => {
                let missing = keys.into_iter().filter(|key| !tier.contains(key));
                let upload = |key| upload(&tier, &disk, key);
                stream::iter(missing).for_each_concurrent(PARALLEL, upload).await;
            }
            // Fails only if the caller does not wait any longer.
            Upload::Flush(done) => drop(done.send(())),
        }
    }
}

async fn upload(tier: &ObjectTier, disk: &Arc<DiskTier>, key: ChainKey) {
    // It may have been evicted since.
    let Some(record) = read(disk, key).await else { return tier.note_skipped(1) };
    if tier.is_paused() {
        return tier.note_skipped(1);
    }
    store(tier, &key, record).await;
}

/// The bytes of a record on the disk.
async fn read(disk: &Arc<DiskTier>, key: ChainKey) -> Option<Bytes> {
    let disk = Arc::clone(disk);
    // Fails only if the runtime ends.
    tokio::task::spawn_blocking(move || disk.bytes_of(&key)).await.ok()?
}

async fn store(tier: &ObjectTier, key: &ChainKey, record: Bytes) {
    if let Err(error) = tier.store(key, record).await {
        tracing::warn!(%error, "KV could not be uploaded; nothing is uploaded for a while");
    }
}

/// Uploads the records that are on the disk and not in the store, one record after the other. Ends
/// early if the engine ends.
async fn upload_earlier(tier: &Weak<ObjectTier>, disk: &Weak<DiskTier>) {
    let keys = disk.upgrade().map(|disk| disk.keys()).unwrap_or_default();
    for key in keys {
        let (Some(tier), Some(disk)) = (tier.upgrade(), disk.upgrade()) else { return };
        // Records of other models are not uploaded: `read` returns `None` for them.
        if !tier.contains(&key)
            && !tier.is_paused()
            && let Some(record) = read(&disk, key).await
        {
            store(&tier, &key, record).await;
        }
    }
}

/// Lists the store as long as an engine uses it. When it is listed for the first time, the records
/// that the disk had before the engine was started are uploaded.
async fn list(tier: Weak<ObjectTier>, disk: Weak<DiskTier>) {
    let mut listed = false;
    while let Some(own_tier) = tier.upgrade() {
        let begun = Instant::now();
        let result = own_tier.refresh().await;
        drop(own_tier);
        match result {
            Ok(()) if !listed => {
                listed = true;
                upload_earlier(&tier, &disk).await;
            }
            Ok(()) => {}
            Err(error) => tracing::warn!(%error, "the object store could not be listed"),
        }
        tokio::time::sleep(LIST_INTERVAL.max(begun.elapsed() * LIST_INTERVAL_TIMES)).await;
    }
}
