//! Copies of KV between the pool and places outside of it: loads and saves.
//!
//! A **load** is another way of computing the first positions of a prompt: their keys and values
//! are copied into blocks that the request has reserved. The request takes part in admission, in
//! prefill sharing and in commits as any other, so nothing else has to know of loads.
//!
//! A **save** copies blocks of the tree out. The scheduler locks the prefix with a lease, and holds
//! it until the last block was copied, over several steps if there are many.
//!
//! A sink may also take **evicted** blocks. They are free, but nothing is written into them before
//! the next step, which copies them first; no lease is needed.
//!
//! Both happen on the executor thread, at the beginning of a step, at most
//! [`LOAD_BYTES_PER_STEP`] and [`SAVE_BYTES_PER_STEP`], so that the other requests wait for some
//! ten milliseconds at most. A copy that fails leaves the tree as it was: the positions of a failed
//! load are computed instead, and a failed save yields nothing.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use stolon_backend::{Backend, BackendSpec};
use stolon_kvcache::{BlockId, EvictedPrefix, Namespace, PrefixLease};

use crate::error::EngineError;

/// Maximum number of bytes that are loaded in one step; at least one block. At a few GB/s, this
/// takes some ten milliseconds. A request waits for its loads, and there may be a long prefill in
/// each step, so a load should not need many steps.
pub(crate) const LOAD_BYTES_PER_STEP: usize = 128 << 20;

/// Maximum number of bytes that are saved in one step; at least one block. No request waits for it.
pub(crate) const SAVE_BYTES_PER_STEP: usize = 32 << 20;

/// Maximum number of saves that wait at one time. Later ones are refused.
pub(crate) const SAVES_MAX: usize = 64;

/// Keys and values of consecutive blocks of a prompt, from outside of the pool. The caller
/// vouches that they belong to the prompt's tokens and namespace and to the backend's KV format.
#[derive(Clone, Debug)]
pub struct StoredKv {
    block_size: usize,
    first_block: usize,
    blocks: Arc<[Bytes]>,
    /// Index of the first block that is not KV but part of a checkpoint of the recurrent state.
    checkpoint: Option<usize>,
    /// Dropped with the last clone.
    _held: Option<Arc<dyn Any + Send + Sync>>,
}

impl StoredKv {
    /// The bytes of consecutive blocks of `block_size` positions. The first one is the block with
    /// the index `first_block` of the prompt. Each item has
    /// [`block_bytes`](BackendSpec::block_bytes) bytes, as [`Backend::read_blocks`] has returned
    /// them.
    pub fn new(block_size: usize, first_block: usize, blocks: Vec<Bytes>) -> StoredKv {
        let (blocks, checkpoint) = (blocks.into(), None);
        StoredKv { block_size, first_block, blocks, checkpoint, _held: None }
    }

    /// The same for a model with a recurrent state: the last `block_count` blocks are the checkpoint
    /// of the state after the positions of those before it. Without a checkpoint, or with one of
    /// another size, stored KV is of no use for such a model.
    #[must_use]
    pub fn with_checkpoint(self, block_count: usize) -> StoredKv {
        let checkpoint = self.blocks.len().checked_sub(block_count);
        StoredKv { checkpoint: checkpoint.map(|index| self.first_block + index), ..self }
    }

    /// Keeps a value until the last clone is dropped: a permit for the memory, for example.
    #[must_use]
    pub fn holding(self, value: impl Send + Sync + 'static) -> StoredKv {
        StoredKv { _held: Some(Arc::new(value)), ..self }
    }

    /// Checks the sizes against those of the backend.
    pub(crate) fn check(&self, spec: &BackendSpec) -> Result<(), EngineError> {
        let wrong = self.blocks.iter().find(|block| block.len() != spec.block_bytes);
        let expected = spec.state.map(|_| self.range().end.checked_sub(spec.checkpoint_blocks()));
        if self.checkpoint != expected.flatten() {
            let expected = format!("a checkpoint of {} blocks", spec.checkpoint_blocks());
            let got = self.checkpoint.map_or(0, |first| self.range().end - first);
            return Err(EngineError::invalid("stored", expected, format!("one of {got}")));
        }
        if self.block_size == spec.block_size && wrong.is_none() {
            return Ok(());
        }
        let got = wrong.map_or(0, |block| block.len());
        let expected =
            format!("blocks of {} positions and {} bytes", spec.block_size, spec.block_bytes);
        let got = format!("blocks of {} positions and {got} bytes", self.block_size);
        Err(EngineError::invalid("stored", expected, got))
    }

    /// Number of positions per block.
    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    /// Whether it ends with a checkpoint.
    pub(crate) fn has_checkpoint(&self) -> bool {
        self.checkpoint.is_some()
    }

    /// The indices of its blocks of KV.
    pub(crate) fn kv_range(&self) -> Range<usize> {
        self.first_block..self.checkpoint.unwrap_or(self.range().end)
    }

    /// The indices of the blocks that it has, including the blocks of a checkpoint.
    pub fn range(&self) -> Range<usize> {
        self.first_block..self.first_block + self.blocks.len()
    }

    /// Number of leading positions of the prompt that are cached when this KV is in the pool.
    pub fn kv_end(&self) -> usize {
        self.kv_range().end * self.block_size
    }

    /// The bytes of the blocks, without their places.
    pub(crate) fn blocks(&self) -> &[Bytes] {
        &self.blocks
    }
}

/// Blocks to be copied into the pool.
#[derive(Debug)]
pub struct LoadTask {
    /// The blocks that are written.
    pub(crate) blocks: Vec<BlockId>,
    /// Where the bytes come from.
    pub(crate) kv: StoredKv,
    /// Index of the prompt's block that goes to the first of `blocks`.
    pub(crate) first_block: usize,
}

impl LoadTask {
    /// Copies the blocks. Returns whether all were copied.
    pub(crate) fn run(self, backend: &mut dyn Backend) -> bool {
        let from = self.first_block - self.kv.first_block;
        let from = self.kv.blocks()[from..].iter().map(Bytes::as_ref);
        let from: Vec<&[u8]> = from.take(self.blocks.len()).collect();
        let written = backend.write_blocks(&self.blocks, &from);
        if let Err(error) = &written {
            tracing::warn!(%error, "stored KV could not be loaded; it is computed instead");
        }
        written.is_ok()
    }
}

/// Copies blocks out. Returns nothing if that fails.
pub(crate) fn save_blocks(backend: &mut dyn Backend, blocks: &[BlockId]) -> Option<Vec<u8>> {
    let mut bytes = vec![0; blocks.len() * backend.spec().block_bytes];
    match backend.read_blocks(blocks, &mut bytes) {
        Ok(()) => Some(bytes),
        Err(error) => {
            tracing::warn!(%error, "blocks could not be copied out of the KV pool");
            None
        }
    }
}

/// Stores computed KV outside of the pool.
pub trait KvSink: fmt::Debug + Send + Sync {
    /// Returns which blocks of the prefix `tokens` are copied out of the pool, after a request of
    /// this `priority` has added the blocks `committed` to the prefix tree. `tokens` may be longer.
    /// Called on the scheduler's task, so it must not block.
    fn wanted(
        &self,
        namespace: &Namespace,
        tokens: &Arc<Vec<u32>>,
        committed: Range<usize>,
        priority: i32,
    ) -> Option<SaveRequest>;

    /// The lengths of prefixes, in positions, for which it stores checkpoints of recurrent states:
    /// the multiples of this number, which is a multiple of `block_size`.
    fn checkpoint_distance(&self, block_size: usize) -> usize {
        block_size
    }

    /// Whether [`KvSink::evicted`] is called. Asked once, when the engine starts.
    fn takes_evicted(&self) -> bool {
        false
    }

    /// Returns which blocks of a prefix are copied out of the pool before they are overwritten. Its
    /// last blocks were just evicted to make room. Called on the scheduler's task, so it must not
    /// block.
    fn evicted(&self, prefix: EvictedPrefix) -> Option<EvictedCopy> {
        let _ = prefix;
        None
    }

    /// Whether the sink stores pinned prefixes. If so, pins occupy no blocks that a running request
    /// needs: their prefixes are evicted if nothing else can be. Asked when the engine starts.
    fn stores_pins(&self) -> bool {
        false
    }

    /// A prefix was pinned whose blocks are all in the pool. For a model with a recurrent state, a
    /// second call names its last checkpoint, after the positions that it covers. Called by the
    /// actor of the prefix tree if [`KvSink::stores_pins`], so it must not block.
    fn pinned(&self, namespace: &Namespace, tokens: &Arc<Vec<u32>>) -> Option<StoredPin> {
        let _ = (namespace, tokens);
        None
    }
}

/// The reaction of a [`KvSink`] to a pinned prefix.
#[derive(Debug)]
pub struct StoredPin {
    /// The blocks that are not stored yet.
    pub save: Option<SaveRequest>,
    /// Dropped when the pin has ended.
    pub held: Box<dyn Any + Send>,
}

/// Finds KV that was stored outside of the pool. The engine asks it before a request is submitted,
/// and again for a waiting request that has lost what was cached of its prompt.
pub trait KvSource: fmt::Debug + Send + Sync {
    /// Decides which stored KV of a prompt is read, and begins to read it. Called in the caller's
    /// task or in a task of its own, so it must not block.
    fn prefetch(&self, prompt: &PromptLookup) -> Prefetch;
}

/// A prompt whose request is about to be submitted or waits, and what the engine knows about it.
#[derive(Clone, Debug)]
pub struct PromptLookup {
    /// The namespace of the request.
    pub namespace: Namespace,
    /// The tokens of the prompt.
    pub tokens: Arc<Vec<u32>>,
    /// Number of leading tokens whose KV is in the pool.
    pub cached: usize,
    /// Number of these that do not have to be computed: all, unless the model has a recurrent
    /// state.
    pub resume: usize,
    /// Number of positions that a checkpoint of the recurrent state takes, in whole blocks; 0 for a
    /// model without one. For other models, stored KV is of use with a checkpoint only, which is
    /// stored after its prefix under [`checkpoint_positions`](stolon_kvcache::checkpoint_positions).
    pub checkpoint_positions: usize,
    /// The priority of the request.
    pub priority: i32,
    /// Number of prompt positions that recent steps have computed per second; `None` before the
    /// first one.
    pub prefill_rate: Option<f64>,
    /// Whether the source was asked for the same request before. It does not count as another use
    /// of the stored KV.
    pub is_repeated: bool,
}

/// A waiting request asks again for stored KV of its prompt. The caller of the scheduler asks the
/// [`KvSource`], and gives the answer to [`Scheduler::stored_read`](crate::Scheduler::stored_read).
#[derive(Clone, Debug)]
pub struct RepeatedLookup {
    /// The id of the request.
    pub id: u64,
    /// Its prompt.
    pub prompt: PromptLookup,
    /// The maximum time for which the request waits for the answer.
    pub limit: Duration,
}

/// The reads and writes that a [`KvSource`] requests when a prompt is about to be computed.
#[derive(Debug, Default)]
pub struct Prefetch {
    /// Blocks of the pool that are to be stored now, because the prompt has used them again.
    pub save: Option<SaveRequest>,
    /// Stored KV of the prompt that is being read.
    pub load: Option<PendingKv>,
}

/// Stored KV that is being read.
pub struct PendingKv {
    /// Yields the KV; `None` if nothing could be read.
    pub kv: Pin<Box<dyn Future<Output = Option<StoredKv>> + Send>>,
    /// The maximum time for which the request waits for it.
    pub limit: Duration,
}

impl fmt::Debug for PendingKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingKv").field("limit", &self.limit).finish_non_exhaustive()
    }
}

/// A request to copy blocks of a prefix out of the pool after its last blocks were evicted. They
/// are copied at the beginning of the next step, all at once.
pub struct EvictedCopy {
    /// The blocks to copy, evicted or before the evicted ones.
    pub blocks: Vec<BlockId>,
    /// Receives the bytes of the blocks one after another. It is called once, on the scheduler's
    /// task, so it must not block; it is dropped if the copy fails.
    pub done: Box<dyn FnOnce(Vec<u8>) + Send>,
}

impl fmt::Debug for EvictedCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EvictedCopy").field("blocks", &self.blocks).finish_non_exhaustive()
    }
}

/// A request to copy cached blocks of a prefix out of the pool.
pub struct SaveRequest {
    /// The namespace of the prefix.
    pub namespace: Namespace,
    /// The tokens of the prefix, at least up to the end of `blocks`.
    pub tokens: Arc<Vec<u32>>,
    /// Indices of the blocks to copy. Fewer are copied if not all of them are cached.
    pub blocks: Range<usize>,
    /// Receives the bytes of the blocks one after another, from the first one on. They may be fewer
    /// than requested. It is called once, on the scheduler's task, so it must not block; it is
    /// dropped if the copy fails or nothing is cached.
    pub done: Box<dyn FnOnce(Vec<u8>) + Send>,
}

impl fmt::Debug for SaveRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SaveRequest").field("blocks", &self.blocks).finish_non_exhaustive()
    }
}

/// A save that has begun.
#[derive(Debug)]
pub(crate) struct Saving {
    pub(crate) request: SaveRequest,
    /// Locks the blocks until all are copied.
    pub(crate) lease: PrefixLease,
    /// The blocks that are not copied yet: a range of the lease's blocks.
    pub(crate) left: Range<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Saving {
    /// Begins to save the blocks of the request that `lease` has locked; `None` if there are none.
    pub(crate) fn new(request: SaveRequest, lease: PrefixLease) -> Option<Saving> {
        let left = request.blocks.start..lease.blocks().len().min(request.blocks.end);
        if left.is_empty() {
            return None;
        }
        Some(Saving { request, lease, left, bytes: Vec::new() })
    }

    /// The blocks of the next step.
    pub(crate) fn next(&self, block_bytes: usize) -> &[BlockId] {
        let count = (SAVE_BYTES_PER_STEP / block_bytes.max(1)).max(1).min(self.left.len());
        &self.lease.blocks()[self.left.start..self.left.start + count]
    }

    /// Takes the bytes of `count` blocks. Returns whether more are left.
    pub(crate) fn take(&mut self, count: usize, bytes: Vec<u8>) -> bool {
        self.left.start += count;
        if self.bytes.is_empty() {
            self.bytes = bytes;
        } else {
            self.bytes.extend(bytes);
        }
        !self.left.is_empty()
    }
}
