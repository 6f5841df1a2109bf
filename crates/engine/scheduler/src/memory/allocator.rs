//! Reserving and returning blocks: the one place that decides when the tree has to evict.
//!
//! The allocator owns the [`BlockPool`] and reaches the prefix tree through [`TreeAccess`]. It
//! does no I/O and knows no actor: the block allocator's actor implements [`TreeAccess`] with
//! messages, [`DirectMemory`](super::DirectMemory) with plain calls, and the loom models with a
//! lock, so all three run this code. Between two calls to the tree, others may change it; nothing
//! here relies on an earlier answer being still exact.

use std::future::Future;

use stolon_kvcache::{
    BlockPool, EvictedBlocks, EvictedPrefix, Namespace, PoolCounts, Shortage, TreeCounts,
    TreeWriter,
};

use super::{LogitsKey, Reserved};
use crate::cached_logits::{CachedLogits, PromptLogits};
use crate::stats::AuditReport;

/// The requests that the allocator makes of the prefix tree.
pub trait TreeAccess {
    /// Why the tree could not answer.
    type Error;

    /// Evicts the demanded blocks with [`evict`] and returns them, with the prefixes that they
    /// ended if `note` is set.
    fn evict(
        &mut self,
        demand: EvictionDemand,
        note: bool,
    ) -> impl Future<Output = Result<Evicted, Self::Error>> + Send;

    /// Removes everything that no request holds and returns its blocks.
    fn flush(&mut self) -> impl Future<Output = Result<EvictedBlocks, Self::Error>> + Send;

    /// Removes part of the tree with [`remove`] and returns its blocks.
    fn remove(
        &mut self,
        removal: Removal,
    ) -> impl Future<Output = Result<EvictedBlocks, Self::Error>> + Send;

    /// Verifies the tree's invariants, then counts its blocks. The inner error describes the first
    /// inconsistency.
    fn audit(
        &mut self,
    ) -> impl Future<Output = Result<Result<TreeCounts, String>, Self::Error>> + Send;
}

/// Which blocks are to be evicted. The tree counts its blocks and evicts some in one message.
#[derive(Clone, Copy, Debug)]
pub enum EvictionDemand {
    /// The blocks that a reservation lacks; none if the tree cannot supply all of them.
    Lacking(Shortage),
    /// Blocks that left the index for the quota of their namespace, and blocks that were flushed
    /// while a sequence used them and are not used any longer.
    Detached,
}

/// The blocks that the tree has evicted.
#[derive(Debug, Default)]
pub struct Evicted {
    /// The blocks.
    pub blocks: EvictedBlocks,
    /// The prefixes that they ended, if requested.
    pub prefixes: Vec<EvictedPrefix>,
}

/// Evicts the demanded blocks from a tree.
pub fn evict(writer: &mut TreeWriter, demand: EvictionDemand, note: bool) -> Evicted {
    let counts = writer.counts();
    let count = match demand {
        EvictionDemand::Lacking(shortage) => shortage.evictions(&counts).unwrap_or(0),
        EvictionDemand::Detached => counts.freed,
    };
    if count == 0 {
        return Evicted::default();
    }
    let mut prefixes = Vec::new();
    let blocks = match note {
        true => writer.evict_prefixes(count, &mut prefixes),
        false => writer.evict(count),
    };
    Evicted { blocks, prefixes }
}

/// The part of the cache that [`BlockAllocator::remove`] removes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Removal {
    /// All of a namespace, its pins, and what its sessions hold. Blocks that running requests hold
    /// can no longer be matched and are freed when these requests have ended.
    Namespace(Namespace),
    /// The sequences of a namespace that start with these tokens, rounded down to whole blocks, and
    /// those of the prefix's blocks that no other cached sequence shares. Blocks that running
    /// requests, pins and sessions hold stay.
    Prefix(Namespace, Vec<u32>),
}

/// Removes part of a tree.
pub fn remove(writer: &mut TreeWriter, removal: &Removal) -> EvictedBlocks {
    match removal {
        Removal::Namespace(namespace) => writer.evict_namespace(namespace),
        Removal::Prefix(namespace, tokens) => writer.evict_prefix(namespace, tokens),
    }
}

/// Owns the block pool, and the cached logits, which live as long as their block is in the tree.
#[derive(Debug)]
pub struct BlockAllocator {
    pool: BlockPool,
    logits: CachedLogits,
    note_evicted: bool,
}

impl BlockAllocator {
    /// An allocator over `pool` that caches logits of up to `logit_cache_bytes` bytes.
    pub fn new(pool: BlockPool, logit_cache_bytes: usize) -> BlockAllocator {
        let logits = CachedLogits::new(logit_cache_bytes);
        BlockAllocator { pool, logits, note_evicted: false }
    }

    /// Reports what is evicted with each reservation.
    #[must_use]
    pub fn noting_evicted(self, note_evicted: bool) -> BlockAllocator {
        BlockAllocator { note_evicted, ..self }
    }

    /// Reserves `count` blocks, evicting only if that yields enough of them, and looks up the
    /// logits of `logits`.
    ///
    /// # Errors
    /// The errors of the tree.
    pub async fn reserve<T: TreeAccess>(
        &mut self,
        tree: &mut T,
        count: usize,
        logits: Option<&LogitsKey>,
    ) -> Result<Reserved, T::Error> {
        let find = |key: &LogitsKey| self.logits.get(key.block, &key.namespace, &key.tokens);
        let logits = logits.and_then(find);
        let shortage = match self.pool.reserve(count) {
            Ok(lease) => return Ok(Reserved { lease: Some(lease), logits, evicted: Vec::new() }),
            Err(shortage) => shortage,
        };
        // No block is missing if enough of them become free when the step in flight ends.
        if shortage.missing() == 0 {
            return Ok(Reserved { logits, ..Reserved::default() });
        }
        let evicted = tree.evict(EvictionDemand::Lacking(shortage), self.note_evicted).await?;
        self.take_evicted(evicted.blocks);
        let lease = self.pool.reserve(count).ok();
        Ok(Reserved { lease, logits, evicted: evicted.prefixes })
    }

    /// Returns blocks to the pool that have left the index already; see
    /// [`EvictionDemand::Detached`]. Reservations take those before anything that can still be
    /// matched is evicted.
    ///
    /// # Errors
    /// The errors of the tree.
    pub async fn settle<T: TreeAccess>(&mut self, tree: &mut T) -> Result<(), T::Error> {
        let evicted = tree.evict(EvictionDemand::Detached, false).await?;
        self.take_evicted(evicted.blocks);
        Ok(())
    }

    /// Removes everything from the tree that no request holds.
    ///
    /// # Errors
    /// The errors of the tree.
    pub async fn flush<T: TreeAccess>(&mut self, tree: &mut T) -> Result<(), T::Error> {
        self.logits.clear();
        self.pool.release(tree.flush().await?);
        Ok(())
    }

    /// Removes part of the cache, except for what running requests use. Returns the number of
    /// blocks that were freed.
    ///
    /// # Errors
    /// The errors of the tree.
    pub async fn remove<T: TreeAccess>(
        &mut self,
        tree: &mut T,
        removal: Removal,
    ) -> Result<usize, T::Error> {
        let removed = tree.remove(removal).await?;
        let count = removed.len();
        self.take_evicted(removed);
        Ok(count)
    }

    /// Verifies the pool and the tree, and that every block is in exactly one of them.
    ///
    /// # Errors
    /// The errors of the tree. The inner error describes the first inconsistency.
    pub async fn audit<T: TreeAccess>(
        &mut self,
        tree: &mut T,
    ) -> Result<Result<AuditReport, String>, T::Error> {
        Ok(tree.audit().await?.and_then(|tree| audit(&mut self.pool, &tree)))
    }

    /// Caches the logits of a prompt's last position.
    pub fn cache_logits(&mut self, logits: PromptLogits) {
        self.logits.insert(logits);
    }

    /// Counts the blocks of the pool.
    pub fn pool_counts(&self) -> PoolCounts {
        self.pool.counts()
    }

    /// Blocks that have left the tree are free again, and their cached logits are dropped.
    fn take_evicted(&mut self, blocks: EvictedBlocks) {
        self.logits.remove_blocks(blocks.iter().map(|block| block.id));
        self.pool.release(blocks);
    }
}

fn audit(pool: &mut BlockPool, tree: &TreeCounts) -> Result<AuditReport, String> {
    pool.audit().map_err(|error| error.to_string())?;
    let total = pool.block_count();
    let counts = pool.counts();
    let free = counts.free + counts.fenced;
    let (reserved, committed) = (counts.reserved, counts.committed);
    if free + reserved + committed != total {
        return Err(format!(
            "blocks: {free} free + {reserved} reserved + {committed} committed, expected {total}"
        ));
    }
    if committed != tree.cached + tree.detached {
        return Err(format!(
            "blocks: the pool counts {committed} committed, the tree {} cached and {} detached",
            tree.cached, tree.detached
        ));
    }
    Ok(AuditReport {
        blocks_total: total,
        blocks_free: free,
        blocks_reserved: reserved,
        blocks_partial: 0,
        blocks_committed: committed,
        blocks_evictable: tree.returnable(),
        running: 0,
        waiting: 0,
    })
}
