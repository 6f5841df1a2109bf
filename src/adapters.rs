//! The adapters of an engine: for each name the path of its files and, if they are in memory, its
//! weights.
//!
//! An adapter is registered when it is loaded, and stays so until it is unloaded. While it is idle,
//! its weights may leave the memory to make room for others; the next request reads them again.
//!
//! 1. [`AdapterTable::load`] reads the files on a blocking thread and registers the adapter.
//! 2. [`AdapterTable::acquire`] returns a clone of the weights, which a request holds until it
//!    ends, and reads them again if they have left the memory.
//! 3. If the name is loaded again or unloaded, the weights are *retired*: requests that hold them
//!    continue, and the memory is released after the last one.
//!
//! **Invariant**: the KV of a request with an adapter belongs to the adapter's name and its
//! *generation*, which is computed from the contents of its files. So no request ever reads KV that
//! other weights have computed, also from tiers that outlive the process, and an adapter that is
//! loaded again unchanged finds its KV.

mod error;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stolon_backend::{Adapter, AdapterLoader};
use stolon_kvcache::Namespace;
use tokio::runtime::Handle;

pub use error::AdapterError;

/// Maximum number of registered adapters.
const ADAPTERS_MAX: usize = 4096;
/// Maximum number of namespaces whose adapters are known. They are forgotten all at once; requests
/// make them known again.
const NAMESPACES_MAX: usize = 1 << 14;
/// Maximum length of a name in bytes.
const NAME_BYTES_MAX: usize = 256;

/// An adapter of an engine: see [`Engine::adapters`](crate::Engine::adapters).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdapterInfo {
    /// The name by which requests choose it.
    pub name: String,
    /// The directory or file that it was loaded from.
    pub path: PathBuf,
    /// Identifies its weights. Requests share cached KV only with those of the same name and
    /// generation.
    pub generation: u64,
    /// The largest rank of its matrices.
    pub rank: usize,
    /// Size of its weights in memory, in bytes.
    pub bytes: u64,
    /// Whether its weights are in memory. If not, the next request reads them again.
    pub in_memory: bool,
    /// Whether a request uses it.
    pub in_use: bool,
    /// Number of requests that have used it since it was loaded under this name.
    pub requests: u64,
}

/// The lock that permits reading files.
type Reading = tokio::sync::OwnedMutexGuard<()>;

/// The weights and the generation of the adapter that a request uses.
#[derive(Clone, Debug)]
pub(crate) struct Acquired {
    pub(crate) weights: Adapter,
    pub(crate) generation: u64,
}

/// The adapters of an engine. See the module documentation.
#[derive(Debug)]
pub(crate) struct AdapterTable {
    /// `None` if the backend does not support adapters.
    loader: Option<Arc<dyn AdapterLoader>>,
    /// The name of the model, which no adapter may have.
    model: String,
    /// Maximum size in bytes of the weights in memory.
    memory: u64,
    runtime: Handle,
    /// Held while files are read, so that two requests for the same adapter do not read it twice,
    /// and so that abandoned requests do not pile up reads.
    reading: Arc<tokio::sync::Mutex<()>>,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    entries: BTreeMap<String, Entry>,
    /// Weights that were replaced or unloaded while requests held them.
    retired: Vec<Adapter>,
    /// The names of the adapters of namespaces that requests have used.
    namespaces: HashMap<Namespace, Arc<str>>,
    /// Number of uses so far.
    clock: u64,
    /// Number of times that weights have left the memory to make room.
    evictions: u64,
}

#[derive(Debug)]
struct Entry {
    path: PathBuf,
    fingerprint: [u8; 32],
    rank: usize,
    bytes: u64,
    /// `None` while the weights are not in memory.
    weights: Option<Adapter>,
    /// The value of [`Table::clock`] at the last use.
    used: u64,
    requests: u64,
}

impl AdapterTable {
    pub(crate) fn new(
        loader: Option<Arc<dyn AdapterLoader>>,
        model: String,
        memory: u64,
        runtime: Handle,
    ) -> AdapterTable {
        let (reading, table) = (Arc::default(), Mutex::default());
        AdapterTable { loader, model, memory, runtime, reading, table }
    }

    /// Reads the adapter at `path` and registers it as `name`. With `replace`, a registered one of
    /// this name is replaced; otherwise it is an error.
    pub(crate) async fn load(
        &self,
        name: &str,
        path: &Path,
        replace: bool,
    ) -> Result<AdapterInfo, AdapterError> {
        self.check_name(name)?;
        let reading = Arc::clone(&self.reading).lock_owned().await;
        self.check_new(name, replace)?;
        let (weights, reading) = self.read(reading, name, path).await?;
        let mut table = self.lock();
        table.make_room(name, weights.bytes(), self.memory)?;
        table.clock += 1;
        let entry = Entry {
            path: path.to_owned(),
            fingerprint: weights.fingerprint(),
            rank: weights.rank(),
            bytes: weights.bytes(),
            weights: Some(weights),
            used: table.clock,
            requests: 0,
        };
        let info = entry.info(name);
        if let Some(old) = table.entries.insert(name.to_owned(), entry) {
            table.retired.extend(old.weights);
        }
        table.release();
        drop((table, reading));
        let AdapterInfo { rank, bytes, generation, .. } = info;
        tracing::info!(adapter = name, rank, bytes, generation, "an adapter was loaded");
        Ok(info)
    }

    /// Unregisters the adapter `name`. Requests that use it continue.
    pub(crate) fn unload(&self, name: &str) -> Result<(), AdapterError> {
        let mut table = self.lock();
        let Some(entry) = table.entries.remove(name) else {
            return Err(AdapterError::Unknown { name: name.to_owned() });
        };
        table.retired.extend(entry.weights);
        table.release();
        drop(table);
        tracing::info!(adapter = name, "an adapter was unloaded");
        Ok(())
    }

    /// The adapter `name` for a request, which holds it until it ends.
    pub(crate) async fn acquire(&self, name: &str) -> Result<Acquired, AdapterError> {
        if let Ok(acquired) = self.lock().acquire(name)? {
            return Ok(acquired);
        }
        let reading = Arc::clone(&self.reading).lock_owned().await;
        // Another request may have read it, and it may have been loaded from another path.
        let (path, fingerprint) = match self.lock().acquire(name)? {
            Ok(acquired) => return Ok(acquired),
            Err(on_disk) => on_disk,
        };
        let (weights, _reading) = self.read(reading, name, &path).await?;
        if weights.fingerprint() != fingerprint {
            return Err(AdapterError::Changed { name: name.to_owned(), path });
        }
        let mut table = self.lock();
        table.make_room(name, weights.bytes(), self.memory)?;
        // It cannot have been replaced meanwhile, because replacing holds `reading`, but it may
        // have been unloaded.
        let unknown = || AdapterError::Unknown { name: name.to_owned() };
        table.entries.get_mut(name).ok_or_else(unknown)?.weights = Some(weights);
        tracing::debug!(adapter = name, "an adapter was read again");
        let acquired = table.acquire(name)?;
        acquired.map_err(|_| unknown())
    }

    /// The generation of the adapter `name`.
    pub(crate) fn generation(&self, name: &str) -> Result<u64, AdapterError> {
        let table = self.lock();
        let entry = table.entries.get(name);
        entry.map(Entry::generation).ok_or_else(|| AdapterError::Unknown { name: name.to_owned() })
    }

    /// Notes that the KV in a namespace was computed with the adapter `name`.
    pub(crate) fn note(&self, namespace: Namespace, name: &str) {
        let namespaces = &mut self.lock().namespaces;
        if !namespaces.contains_key(&namespace) {
            if namespaces.len() >= NAMESPACES_MAX {
                namespaces.clear();
            }
            namespaces.insert(namespace, name.into());
        }
    }

    /// The name of the adapter of a namespace, if it was noted.
    pub(crate) fn name_of(&self, namespace: &Namespace) -> Option<Arc<str>> {
        self.lock().namespaces.get(namespace).cloned()
    }

    /// The registered adapter `name`.
    pub(crate) fn info(&self, name: &str) -> Option<AdapterInfo> {
        self.lock().entries.get(name).map(|entry| entry.info(name))
    }

    /// The registered adapters, in the order of their names.
    pub(crate) fn list(&self) -> Vec<AdapterInfo> {
        let mut table = self.lock();
        table.release();
        table.entries.iter().map(|(name, entry)| entry.info(name)).collect()
    }

    /// Number of times that weights have left the memory to make room for others.
    pub(crate) fn evictions(&self) -> u64 {
        self.lock().evictions
    }

    fn check_name(&self, name: &str) -> Result<(), AdapterError> {
        let is_valid = !name.is_empty()
            && name.len() <= NAME_BYTES_MAX
            && !name.chars().any(char::is_control)
            && name != self.model;
        match is_valid {
            true => Ok(()),
            false => {
                let got = name.chars().take(NAME_BYTES_MAX).collect::<String>();
                Err(AdapterError::InvalidName { got, model: self.model.clone() })
            }
        }
    }

    fn check_new(&self, name: &str, replace: bool) -> Result<(), AdapterError> {
        let table = self.lock();
        let is_known = table.entries.contains_key(name);
        if is_known && !replace {
            return Err(AdapterError::Exists { name: name.to_owned() });
        }
        match !is_known && table.entries.len() >= ADAPTERS_MAX {
            true => Err(AdapterError::TooMany { max: ADAPTERS_MAX }),
            false => Ok(()),
        }
    }

    /// Reads files on a blocking thread. If the future is dropped, they are read nonetheless, and
    /// `reading` is held until that is done.
    async fn read(
        &self,
        reading: Reading,
        name: &str,
        path: &Path,
    ) -> Result<(Adapter, Reading), AdapterError> {
        let Some(loader) = self.loader.clone() else { return Err(AdapterError::Unsupported) };
        let (path, memory) = (path.to_owned(), self.memory);
        let read = move || (loader.load(&path, memory), reading);
        let read = self.runtime.spawn_blocking(read).await;
        let failed = |reason| AdapterError::Load { name: name.to_owned(), reason };
        match read {
            Ok((read, reading)) => Ok((read.map_err(failed)?, reading)),
            Err(error) => Err(failed(stolon_backend::AdapterLoadError::Invalid(error.to_string()))),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // No code panics while it holds the lock.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// The adapter `name` for a request; if it is not in memory, the path of its files and the
    /// fingerprint that they had.
    fn acquire(
        &mut self,
        name: &str,
    ) -> Result<Result<Acquired, (PathBuf, [u8; 32])>, AdapterError> {
        let Some(entry) = self.entries.get_mut(name) else {
            return Err(AdapterError::Unknown { name: name.to_owned() });
        };
        let Some(weights) = entry.weights.clone() else {
            return Ok(Err((entry.path.clone(), entry.fingerprint)));
        };
        self.clock += 1;
        entry.used = self.clock;
        entry.requests += 1;
        Ok(Ok(Acquired { weights, generation: entry.generation() }))
    }

    /// Removes idle weights, the least recently used first, until `needed` bytes for the adapter
    /// `name` fit next to the remaining weights. The weights that are replaced do not count if they
    /// are idle.
    fn make_room(&mut self, name: &str, needed: u64, memory: u64) -> Result<(), AdapterError> {
        self.release();
        let is_replaced = |other: &String, entry: &Entry| other == name && entry.is_idle();
        loop {
            let kept = self.entries.iter().filter(|(other, entry)| !is_replaced(other, entry));
            let loaded = kept.filter_map(|(_, entry)| entry.weights.as_ref());
            let in_memory: u64 = loaded.chain(&self.retired).map(Adapter::bytes).sum();
            if in_memory.saturating_add(needed) <= memory {
                return Ok(());
            }
            let others = self.entries.iter_mut().filter(|(other, _)| *other != name);
            let idle = others.map(|(_, entry)| entry).filter(|entry| entry.is_idle());
            let Some(victim) = idle.min_by_key(|entry| entry.used) else {
                let name = name.to_owned();
                return Err(AdapterError::OutOfMemory { name, needed, in_use: in_memory, memory });
            };
            victim.weights = None;
            self.evictions += 1;
        }
    }

    /// Releases retired weights that no request holds any longer.
    fn release(&mut self) {
        self.retired.retain(|weights| weights.clones() > 1);
    }
}

impl Entry {
    fn generation(&self) -> u64 {
        self.fingerprint.first_chunk().map_or(0, |start| u64::from_le_bytes(*start))
    }

    /// Whether the weights are in memory and no request holds them.
    fn is_idle(&self) -> bool {
        self.weights.as_ref().is_some_and(|weights| weights.clones() == 1)
    }

    fn info(&self, name: &str) -> AdapterInfo {
        AdapterInfo {
            name: name.to_owned(),
            path: self.path.clone(),
            generation: self.generation(),
            rank: self.rank,
            bytes: self.bytes,
            in_memory: self.weights.is_some(),
            in_use: self.weights.as_ref().is_some_and(|weights| weights.clones() > 1),
            requests: self.requests,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use stolon_backend::AdapterLoadError;
    use tokio::sync::mpsc::UnboundedSender;

    use super::*;

    /// Reads until it is told to end, and finds nothing.
    #[derive(Debug)]
    struct Slow {
        begun: UnboundedSender<()>,
        end: Mutex<mpsc::Receiver<()>>,
    }

    impl AdapterLoader for Slow {
        fn load(&self, _: &Path, _: u64) -> Result<Adapter, AdapterLoadError> {
            self.begun.send(()).expect("a test");
            let _ = self.end.lock().expect("no panic").recv();
            Err(AdapterLoadError::NotFound("nothing".to_owned()))
        }
    }

    /// Goal: a caller that begins to read and goes away does not make room for another read before
    /// its own has ended.
    #[tokio::test]
    async fn files_are_read_one_at_a_time() {
        let (begun, mut begins) = tokio::sync::mpsc::unbounded_channel();
        let (end, ends) = mpsc::channel();
        let loader = Arc::new(Slow { begun, end: Mutex::new(ends) });
        let table = AdapterTable::new(Some(loader), "model".to_owned(), 1, Handle::current());
        let table = Arc::new(table);
        let own = Arc::clone(&table);
        let loading = tokio::spawn(async move { own.load("a", Path::new("a"), false).await });
        begins.recv().await.expect("it reads");
        loading.abort();
        assert!(loading.await.expect_err("aborted").is_cancelled());
        assert!(table.reading.try_lock().is_err(), "the files are still being read");
        end.send(()).expect("a reader");
        drop(table.reading.lock().await);
    }
}
