//! The tree and the pool as one value. Blocks pass between the two inside its methods only, so a
//! caller can neither lose a block nor free one twice.

use crate::{
    AuditError, BlockId, BlockLease, BlockPool, CacheSnapshot, CheckpointLease, CommitError,
    ConfigError, EventReceiver, EvictedBlock, EvictedBlocks, GrowError, Namespace, PinError, PinId,
    PinInfo, PoolCounts, PrefixLease, Shortage, StepFence, StepTicket, TreeBuilder, TreeCounts,
    TreeReader, TreeStats, TreeWriter,
};

/// A prefix cache over the blocks of an engine's KV memory: the tree and the block pool together.
///
/// Life of a request:
/// 1. [`begin`](PrefixCache::begin) locks the cached prefix of its prompt and reserves blocks for
///    the rest. It evicts other cached blocks if too few are free.
/// 2. The engine computes the positions after [`SequenceBlocks::cached_len`], within a
///    [step](PrefixCache::begin_step), and writes their KV to the blocks of the
///    [table](SequenceBlocks::table) from there on.
/// 3. [`commit`](PrefixCache::commit) publishes the full blocks, so that other requests match them.
/// 4. [`grow`](PrefixCache::grow) appends the tokens that are generated, with blocks for them.
/// 5. Dropping the [`SequenceBlocks`] at any time unlocks the prefix and frees the private blocks.
///
/// The cache has one owner; put it behind a mutex or into an actor to share it.
/// [Readers](PrefixCache::reader) need no lock. An engine that keeps the tree and the pool on
/// different threads uses [`TreeWriter`] and [`BlockPool`] directly.
#[derive(Debug)]
pub struct PrefixCache {
    writer: TreeWriter,
    pool: BlockPool,
    fence: StepFence,
}

/// The blocks of one sequence, returned by [`PrefixCache::begin`]: a locked cached prefix, and
/// private blocks after it.
///
/// Dropping it returns everything that it holds, on any thread and also during a panic.
#[derive(Debug)]
pub struct SequenceBlocks {
    /// The whole sequence. A commit publishes positions from here, so they cannot differ from those
    /// that the blocks were reserved for.
    positions: Vec<u32>,
    prefix: PrefixLease,
    private: BlockLease,
}

impl SequenceBlocks {
    /// Number of positions, from the start of the sequence, whose KV is in the cache: a multiple of
    /// the block size. A request does not compute them, and their blocks must not be written to.
    pub fn cached_len(&self) -> usize {
        self.prefix.len()
    }

    /// The positions of the sequence: those it was begun with, and those by which it has grown.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// The sequence's block table: first the cached blocks, then the private ones.
    pub fn table(&self) -> impl ExactSizeIterator<Item = BlockId> + '_ {
        let cached = self.prefix.blocks().len();
        let block = move |index: usize| match index.checked_sub(cached) {
            Some(private) => self.private.blocks()[private],
            None => self.prefix.blocks()[index],
        };
        (0..cached + self.private.len()).map(block)
    }

    /// The private blocks, to which the sequence may write. They are the end of the table.
    pub fn private(&self) -> &[BlockId] {
        self.private.blocks()
    }

    /// The namespace of the sequence.
    pub fn namespace(&self) -> &Namespace {
        self.prefix.namespace()
    }
}

impl PrefixCache {
    /// Creates an empty cache over `block_count` blocks of `block_size` positions that evicts the
    /// least recently used leaf first. [`TreeBuilder::build_cache`] offers more settings.
    ///
    /// # Errors
    ///
    /// [`ConfigError::BlockSize`] if `block_size` is not a power of two from 1 to 256, and
    /// [`ConfigError::BlockCount`] if `block_count` is more than 2^28.
    pub fn new(block_size: usize, block_count: usize) -> Result<PrefixCache, ConfigError> {
        TreeBuilder::new(block_size).build_cache(block_count)
    }

    pub(crate) fn from_parts(writer: TreeWriter, pool: BlockPool, fence: StepFence) -> PrefixCache {
        PrefixCache { writer, pool, fence }
    }

    /// Returns a new reader, which queries the cache on any thread without a lock.
    pub fn reader(&self) -> TreeReader {
        self.writer.reader()
    }

    // ---- sequences ----

    /// Locks the longest cached prefix of `positions` and reserves blocks for the rest of them.
    /// Evicts cached blocks if too few are free, provided that this makes enough room. (To save
    /// the content of evicted blocks elsewhere, call [`make_room`](PrefixCache::make_room) before.)
    ///
    /// An engine that needs the logits of a prompt's last position passes the prompt without that
    /// position, so that it is computed even if the whole prompt is cached, and calls
    /// [`grow`](PrefixCache::grow).
    ///
    /// # Errors
    ///
    /// [`Shortage`] if there are too few blocks, even if everything that is not locked were
    /// evicted, or not before a running step has ended. After an error nothing is evicted or
    /// locked.
    pub fn begin(
        &mut self,
        namespace: &Namespace,
        positions: &[u32],
    ) -> Result<SequenceBlocks, Shortage> {
        let prefix = self.writer.acquire(namespace, positions);
        let private = self.reserve(self.blocks_for(positions.len()) - prefix.blocks().len())?;
        Ok(SequenceBlocks { positions: positions.to_vec(), prefix, private })
    }

    /// Appends `positions` to the sequence and reserves the blocks that they need. Evicts as
    /// [`begin`](PrefixCache::begin) does.
    ///
    /// # Errors
    ///
    /// [`GrowError::Shortage`] as for `begin`, and [`GrowError::OtherCache`] for a sequence of
    /// another cache. The sequence stays as it was.
    pub fn grow(
        &mut self,
        sequence: &mut SequenceBlocks,
        positions: &[u32],
    ) -> Result<(), GrowError> {
        if !self.pool.has_lease(&sequence.private) {
            return Err(GrowError::OtherCache);
        }
        let needed = self.blocks_for(sequence.positions.len() + positions.len());
        let more = self.reserve(needed.saturating_sub(sequence.table().len()))?;
        sequence.private.append(more).map_err(|_| GrowError::OtherCache)?;
        sequence.positions.extend_from_slice(positions);
        Ok(())
    }

    /// Publishes the full blocks among the first `written` positions of the sequence, whose KV has
    /// been written.
    ///
    /// Where another sequence has published the same content before, the table gets the cached
    /// block, and the private one is freed after the running steps. A partial block, and blocks
    /// that would end inside an atomic token span, stay private.
    ///
    /// Returns the number of blocks by which the cached part of the table has grown.
    ///
    /// # Errors
    ///
    /// If the sequence is shorter, has an invalid position, or is of another cache. After an error
    /// nothing is changed.
    pub fn commit(
        &mut self,
        sequence: &mut SequenceBlocks,
        written: usize,
    ) -> Result<usize, CommitError> {
        let SequenceBlocks { positions, prefix, private } = sequence;
        let too_many = CommitError::TooMany { len: positions.len(), got: written };
        let positions = positions.get(..written).ok_or(too_many)?;
        self.writer.commit_from(prefix, positions, private)
    }

    // ---- checkpoints ----

    /// Reserves blocks for a checkpoint, which is a copy of the recurrent state of a sequence, for
    /// models that have one. The engine copies the state there and calls
    /// [`commit_checkpoint`](PrefixCache::commit_checkpoint). Evicts as
    /// [`begin`](PrefixCache::begin) does. The lease is empty in a cache without
    /// [`checkpoint_blocks`](TreeBuilder::checkpoint_blocks).
    ///
    /// # Errors
    ///
    /// [`Shortage`] as for `begin`.
    pub fn reserve_checkpoint(&mut self) -> Result<BlockLease, Shortage> {
        self.reserve(self.writer.checkpoint_blocks())
    }

    /// Publishes a checkpoint of the state after the first `len` positions of the sequence, which
    /// are committed. Returns it locked; `None` if these positions have been flushed, or `len` is
    /// not a multiple of the block size.
    ///
    /// # Errors
    ///
    /// If fewer positions of the sequence are committed, or the blocks are of another cache. After
    /// an error nothing is changed.
    pub fn commit_checkpoint(
        &mut self,
        sequence: &SequenceBlocks,
        len: usize,
        blocks: &mut BlockLease,
    ) -> Result<Option<CheckpointLease>, CommitError> {
        let too_many = CommitError::TooMany { len: sequence.cached_len(), got: len };
        let positions = sequence.positions.get(..len).filter(|_| len <= sequence.cached_len());
        let positions = positions.ok_or(too_many)?;
        self.writer.commit_checkpoint(sequence.namespace(), positions, blocks)
    }

    /// Locks the checkpoint from which a request for `positions` resumes; `None` if it must compute
    /// all of them. As [`TreeWriter::acquire_checkpoint`].
    pub fn acquire_checkpoint(
        &mut self,
        namespace: &Namespace,
        positions: &[u32],
    ) -> Option<CheckpointLease> {
        self.writer.acquire_checkpoint(namespace, positions, i32::MIN)
    }

    /// Begins a step, such as one forward pass of a batch. A block that is freed before the ticket
    /// is dropped is not handed out again until then, because the step may still access it.
    pub fn begin_step(&self) -> StepTicket {
        self.fence.begin()
    }

    // ---- making room ----

    /// Evicts cached blocks until `count` blocks are free, or will be when the running steps have
    /// ended. Fewer are free afterward if everything else is locked.
    ///
    /// Returns the evicted blocks with the content that they hold until they are reserved again.
    pub fn make_room(&mut self, count: usize) -> Vec<EvictedBlock> {
        let counts = self.pool.counts();
        let missing = count.saturating_sub(counts.free + counts.fenced);
        let evicted = self.writer.evict(missing);
        self.free(evicted)
    }

    /// Removes everything from the cache and ends all pins. Blocks that sequences hold can no
    /// longer be matched, and are freed after these sequences have ended. Returns the blocks that
    /// were freed.
    pub fn flush(&mut self) -> Vec<EvictedBlock> {
        let evicted = self.writer.flush();
        self.free(evicted)
    }

    /// Removes one namespace from the cache, as [`flush`](PrefixCache::flush) does for all.
    pub fn evict_namespace(&mut self, namespace: &Namespace) -> Vec<EvictedBlock> {
        let evicted = self.writer.evict_namespace(namespace);
        self.free(evicted)
    }

    /// Removes the cached blocks of the sequences that start with `positions`, as
    /// [`TreeWriter::evict_prefix`] does. Returns the blocks that were freed.
    pub fn evict_prefix(&mut self, namespace: &Namespace, positions: &[u32]) -> Vec<EvictedBlock> {
        let evicted = self.writer.evict_prefix(namespace, positions);
        self.free(evicted)
    }

    // ---- the tree ----

    /// As [`TreeWriter::pin`].
    ///
    /// # Errors
    ///
    /// If not even one block is cached, or if the pin budget would be exceeded.
    pub fn pin(&mut self, namespace: &Namespace, positions: &[u32]) -> Result<PinId, PinError> {
        self.writer.pin(namespace, positions)
    }

    /// Ends a pin. Returns whether it existed.
    pub fn unpin(&mut self, id: PinId) -> bool {
        self.writer.unpin(id)
    }

    /// Returns all pins, oldest first.
    pub fn pins(&mut self) -> Vec<PinInfo> {
        self.writer.pins()
    }

    /// As [`TreeWriter::set_priority`].
    pub fn set_priority(
        &mut self,
        namespace: &Namespace,
        positions: &[u32],
        priority: i32,
    ) -> usize {
        self.writer.set_priority(namespace, positions, priority)
    }

    /// As [`TreeWriter::set_namespace_quota`].
    ///
    /// # Errors
    ///
    /// [`ConfigError::NamespaceQuotas`] if too many namespaces have a quota of their own.
    pub fn set_namespace_quota(
        &mut self,
        namespace: &Namespace,
        block_count: Option<usize>,
    ) -> Result<(), ConfigError> {
        self.writer.set_namespace_quota(namespace, block_count)
    }

    /// As [`TreeWriter::subscribe`].
    ///
    /// # Errors
    ///
    /// [`ConfigError::EventCapacity`] if `capacity` is 0.
    pub fn subscribe(&mut self, capacity: usize) -> Result<EventReceiver, ConfigError> {
        self.writer.subscribe(capacity)
    }

    /// As [`TreeWriter::snapshot`].
    pub fn snapshot(&self) -> CacheSnapshot {
        self.writer.snapshot()
    }

    /// Returns the counters since the cache was created.
    pub fn stats(&self) -> &TreeStats {
        self.writer.stats()
    }

    // ---- accounting ----

    /// Returns the numbers of cached blocks by state.
    pub fn tree_counts(&mut self) -> TreeCounts {
        self.writer.counts()
    }

    /// Returns the numbers of all blocks by state.
    pub fn pool_counts(&self) -> PoolCounts {
        self.pool.counts()
    }

    /// Checks the tree and the pool, and that the tree owns exactly the blocks that the pool counts
    /// as committed. Takes time in proportion to the size of both.
    ///
    /// # Errors
    ///
    /// The first contradiction found.
    pub fn audit(&mut self) -> Result<(), AuditError> {
        self.writer.audit()?;
        self.pool.audit()?;
        let tree = self.writer.counts();
        let (expected, got) = (tree.cached + tree.detached, self.pool.counts().committed);
        if expected == got {
            return Ok(());
        }
        Err(AuditError::Counter { counter: "committed blocks", expected, got })
    }

    fn blocks_for(&self, position_count: usize) -> usize {
        position_count.div_ceil(self.writer.block_size())
    }

    fn reserve(&mut self, count: usize) -> Result<BlockLease, Shortage> {
        let shortage = match self.pool.reserve(count) {
            Ok(lease) => return Ok(lease),
            Err(shortage) => shortage,
        };
        let Some(missing) = shortage.evictions(&self.writer.counts()) else {
            return Err(shortage);
        };
        self.pool.release(self.writer.evict(missing));
        self.pool.reserve(count)
    }

    fn free(&mut self, evicted: EvictedBlocks) -> Vec<EvictedBlock> {
        self.pool.take_evicted(&evicted);
        evicted.blocks
    }
}
