//! The class `PrefixCache`: the prefix tree with its block pool, for programs that have an engine
//! of their own.
//!
//! Lookups read the tree without a lock, and without the interpreter's lock (GIL). Changes take
//! turns on a lock, for which no thread waits while it holds the GIL.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use stolon_kvcache::{
    CacheEvent, EventReceiver, Namespace, NumberedEvent, PinId, SequenceBlocks, TreeBuilder,
    TreeReader,
};

use crate::error::{Failure, raise};
use crate::options::parsed;
use crate::process::ProcessBound;

/// Token ids of a prompt.
struct Tokens(Vec<u32>);

impl<'a, 'py> FromPyObject<'a, 'py> for Tokens {
    type Error = PyErr;

    /// An array of 32 or 64 bits, such as numpy's, or any sequence of integers.
    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Tokens> {
        let py = object.py();
        let narrow = |id: i64| {
            let message = || format!("tokens: expected ids from 0 to {}, got {id}", u32::MAX);
            u32::try_from(id).map_err(|_| invalid(message()))
        };
        if let Ok(buffer) = PyBuffer::<u32>::get(&object) {
            return Ok(Tokens(buffer.to_vec(py)?));
        }
        if let Ok(buffer) = PyBuffer::<i32>::get(&object) {
            let ids = buffer.to_vec(py)?.into_iter().map(|id| narrow(id.into()));
            return Ok(Tokens(ids.collect::<PyResult<_>>()?));
        }
        if let Ok(buffer) = PyBuffer::<i64>::get(&object) {
            let ids = buffer.to_vec(py)?.into_iter().map(narrow);
            return Ok(Tokens(ids.collect::<PyResult<_>>()?));
        }
        Ok(Tokens(object.extract()?))
    }
}

/// The namespace of prompts with this salt.
fn namespace(salt: Option<&str>) -> Namespace {
    salt.map_or_else(Namespace::default, |salt| Namespace::builder().salt(salt).build())
}

#[derive(Clone, Debug)]
struct Shared {
    cache: Arc<Mutex<stolon_kvcache::PrefixCache>>,
    reader: TreeReader,
}

impl Shared {
    /// Changes the cache, without the interpreter's lock.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        change: impl FnOnce(&mut stolon_kvcache::PrefixCache) -> T + Send,
    ) -> T {
        py.detach(|| change(&mut self.cache.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

/// A prefix cache of block ids: it remembers which blocks of an engine's KV memory hold which
/// prefix of tokens.
#[pyclass(frozen, module = "stolon._native")]
#[derive(Debug)]
pub(crate) struct PrefixCache {
    shared: ProcessBound<Shared>,
}

/// `stolon.BlockCounts`.
#[derive(Debug, IntoPyObject)]
struct Counts {
    free: usize,
    reserved: usize,
    cached: usize,
    evictable: usize,
}

#[pymethods]
impl PrefixCache {
    #[new]
    fn new(
        block_size: usize,
        num_blocks: usize,
        eviction_policy: &str,
        pin_budget: Option<usize>,
    ) -> PyResult<PrefixCache> {
        let policy = parsed("eviction_policy", eviction_policy)?;
        let mut builder = TreeBuilder::new(block_size).eviction_policy(policy);
        if let Some(blocks) = pin_budget {
            builder = builder.pin_budget(blocks);
        }
        let cache = builder.build_cache(num_blocks).map_err(invalid)?;
        let reader = cache.reader();
        let shared = Shared { cache: Arc::new(Mutex::new(cache)), reader };
        Ok(PrefixCache { shared: ProcessBound::new(shared) })
    }

    /// The number of leading tokens that are cached.
    fn match_len(&self, py: Python<'_>, tokens: Tokens, salt: Option<&str>) -> PyResult<usize> {
        let reader = &self.shared.get(py)?.reader;
        Ok(py.detach(|| reader.query_match_len(&namespace(salt), &tokens.0)))
    }

    /// [`PrefixCache::match_len`] of several prompts.
    fn match_lens(
        &self,
        py: Python<'_>,
        prompts: Vec<Tokens>,
        salt: Option<&str>,
    ) -> PyResult<Vec<usize>> {
        let reader = &self.shared.get(py)?.reader;
        Ok(py.detach(|| {
            let namespace = namespace(salt);
            prompts.iter().map(|tokens| reader.query_match_len(&namespace, &tokens.0)).collect()
        }))
    }

    /// Locks the cached prefix of the tokens, and reserves blocks for the rest.
    fn acquire(&self, py: Python<'_>, tokens: Tokens, salt: Option<&str>) -> PyResult<Lease> {
        let shared = self.shared.get(py)?;
        let begun = shared.with(py, |cache| cache.begin(&namespace(salt), &tokens.0));
        let sequence = begun.map_err(|error| full(py, error))?;
        let held = Held { sequence: Mutex::new(Some(sequence)), shared: shared.clone() };
        Ok(Lease { held: ProcessBound::new(held) })
    }

    /// Removes cached blocks that no lease holds, at most `count`. Returns their ids.
    fn evict(&self, py: Python<'_>, count: usize) -> PyResult<Vec<u32>> {
        let evicted = self.shared.get(py)?.with(py, |cache| {
            let counts = cache.pool_counts();
            cache.make_room((counts.free + counts.fenced).saturating_add(count))
        });
        Ok(evicted.into_iter().map(|block| block.id.0).collect())
    }

    /// Removes everything that no lease holds. Returns the ids of the freed blocks.
    fn flush(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        let evicted = self.shared.get(py)?.with(py, |cache| cache.flush());
        Ok(evicted.into_iter().map(|block| block.id.0).collect())
    }

    /// Protects the cached prefix of the tokens from eviction. Returns the number of the pin.
    fn pin(&self, py: Python<'_>, tokens: Tokens, salt: Option<&str>) -> PyResult<u64> {
        let pinned = self.shared.get(py)?.with(py, |cache| cache.pin(&namespace(salt), &tokens.0));
        Ok(pinned.map_err(invalid)?.0)
    }

    /// Ends a pin. Returns whether it existed.
    fn unpin(&self, py: Python<'_>, id: u64) -> PyResult<bool> {
        Ok(self.shared.get(py)?.with(py, |cache| cache.unpin(PinId(id))))
    }

    /// The changes of the cache from now on.
    fn events(&self, py: Python<'_>, capacity: usize) -> PyResult<CacheEvents> {
        let receiver = self.shared.get(py)?.with(py, |cache| cache.subscribe(capacity));
        let receiver = receiver.map_err(invalid)?;
        Ok(CacheEvents { receiver: ProcessBound::new(receiver) })
    }

    /// The chained hash of each whole block of the tokens, as events have it.
    fn block_hashes(
        &self,
        py: Python<'_>,
        tokens: Tokens,
        salt: Option<&str>,
    ) -> PyResult<Vec<u64>> {
        let reader = &self.shared.get(py)?.reader;
        Ok(py.detach(|| reader.block_hashes(&namespace(salt), &tokens.0)))
    }

    /// The numbers of blocks by state.
    fn counts(&self, py: Python<'_>) -> PyResult<Counts> {
        Ok(self.shared.get(py)?.with(py, |cache| {
            let (pool, tree) = (cache.pool_counts(), cache.tree_counts());
            Counts {
                free: pool.free,
                reserved: pool.reserved,
                cached: tree.cached,
                evictable: tree.evictable,
            }
        }))
    }

    /// Checks the accounting of all blocks.
    fn audit(&self, py: Python<'_>) -> PyResult<()> {
        let audited = self.shared.get(py)?.with(py, |cache| cache.audit());
        audited.map_err(|error| raise(py, "StolonError", error.to_string(), None))
    }
}

/// An `InvalidValueError`.
fn invalid(error: impl std::fmt::Display) -> PyErr {
    Failure::Invalid(error.to_string()).into()
}

fn full(py: Python<'_>, error: impl std::fmt::Display) -> PyErr {
    raise(py, "CacheFullError", error.to_string(), None)
}

/// The blocks of one sequence: a locked cached prefix, and blocks of its own after it.
#[pyclass(frozen, module = "stolon._native")]
#[derive(Debug)]
pub(crate) struct Lease {
    held: ProcessBound<Held>,
}

#[derive(Debug)]
struct Held {
    /// `None` when it was released. It is locked after the cache.
    sequence: Mutex<Option<SequenceBlocks>>,
    shared: Shared,
}

impl Lease {
    /// Uses the sequence together with the cache.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut stolon_kvcache::PrefixCache, &mut SequenceBlocks) -> T + Send,
    ) -> PyResult<T> {
        let held = self.held.get(py)?;
        let result = held.shared.with(py, |cache| {
            let mut sequence = held.sequence.lock().unwrap_or_else(PoisonError::into_inner);
            sequence.as_mut().map(|sequence| work(cache, sequence))
        });
        result.ok_or_else(|| invalid("expected a lease that holds blocks, got a released one"))
    }
}

#[pymethods]
impl Lease {
    /// The number of leading tokens whose KV is cached.
    fn cached_len(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |_, sequence| sequence.cached_len())
    }

    /// The number of tokens.
    fn len(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |_, sequence| sequence.positions().len())
    }

    /// The ids of the blocks of all tokens.
    fn blocks(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.with(py, |_, sequence| sequence.table().map(|block| block.0).collect())
    }

    /// Appends tokens, and reserves blocks for them.
    fn grow(&self, py: Python<'_>, tokens: Tokens) -> PyResult<()> {
        let grown = self.with(py, |cache, sequence| cache.grow(sequence, &tokens.0))?;
        grown.map_err(|error| full(py, error))
    }

    /// Puts the whole blocks among the first `written` tokens into the cache. Returns by how many
    /// blocks its cached part has grown.
    fn insert(&self, py: Python<'_>, written: Option<usize>) -> PyResult<usize> {
        let inserted = self.with(py, |cache, sequence| {
            let written = written.unwrap_or(sequence.positions().len());
            cache.commit(sequence, written)
        })?;
        inserted.map_err(invalid)
    }

    /// Unlocks the prefix and frees the other blocks. It may be called again.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.held.get(py)?;
        py.detach(|| drop(held.sequence.lock().unwrap_or_else(PoisonError::into_inner).take()));
        Ok(())
    }
}

/// The changes of a prefix cache, in their order.
#[pyclass(frozen, module = "stolon._native")]
#[derive(Debug)]
pub(crate) struct CacheEvents {
    receiver: ProcessBound<EventReceiver>,
}

/// `stolon.CacheEvent`.
#[derive(Debug, IntoPyObject)]
struct EventRow {
    number: u64,
    kind: &'static str,
    hashes: Vec<u64>,
    tokens: Vec<u32>,
    parent: Option<u64>,
    missed: u64,
}

impl From<NumberedEvent> for EventRow {
    fn from(NumberedEvent { number, event }: NumberedEvent) -> EventRow {
        let row = EventRow {
            number,
            kind: "cleared",
            hashes: Vec::new(),
            tokens: Vec::new(),
            parent: None,
            missed: 0,
        };
        match event {
            CacheEvent::Stored { parent, hashes, positions, .. } => {
                EventRow { kind: "stored", parent, hashes, tokens: positions, ..row }
            }
            CacheEvent::Removed { hashes } => EventRow { kind: "removed", hashes, ..row },
            CacheEvent::Cleared => row,
            CacheEvent::Reset { missed } => EventRow { kind: "reset", missed, ..row },
        }
    }
}

#[pymethods]
impl CacheEvents {
    /// Takes all events that have happened.
    fn drain(&self, py: Python<'_>) -> PyResult<Vec<EventRow>> {
        let receiver = self.receiver.get(py)?;
        let events = py.detach(|| receiver.drain());
        Ok(events.into_iter().map(EventRow::from).collect())
    }
}
