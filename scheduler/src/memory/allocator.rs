//! Reserving and returning blocks: the one place that decides when the tree has to evict.
//!
//! The allocator owns the [`BlockPool`] and reaches the prefix tree through [`TreeAccess`]. It
//! does no I/O and knows no actor: the block allocator's actor implements [`TreeAccess`] with
//! messages, [`DirectMemory`](super::DirectMemory) with plain calls, and the loom models with a
//! lock, so all three run this code. Between two calls to the tree, others may change it; nothing
//! here relies on an earlier answer being still exact.

use std::future::Future;
use std::sync::Arc;

use stolon_kvcache::{
    BlockId, BlockPool, EvictedBlock, EvictedPrefix, Namespace, PoolCounts, TreeCounts, TreeWriter,
};

use super::{BlockCounts, Reserved};
use crate::cached_logits::{CachedLogits, PromptLogits};
use crate::stats::AuditReport;

/// The requests that the allocator makes of the prefix tree.
pub trait TreeAccess {
    /// Why the tree could not answer.
    type Error;

    /// Counts the tree's blocks.
    fn counts(&mut self) -> impl Future<Output = Result<TreeCounts, Self::Error>> + Send;

    /// Evicts up to `count` blocks and returns them, with the prefixes that they ended if `note` is
    /// set.
    fn evict(
        &mut self,
        count: usize,
        note: bool,
    ) -> impl Future<Output = Result<Evicted, Self::Error>> + Send;

    /// Removes everything that no request holds and returns its blocks.
    fn flush(&mut self) -> impl Future<Output = Result<Vec<EvictedBlock>, Self::Error>> + Send;

    /// Verifies the tree's invariants, then counts its blocks. The inner error describes the first
    /// inconsistency.
    fn audit(
        &mut self,
    ) -> impl Future<Output = Result<Result<TreeCounts, String>, Self::Error>> + Send;
}

/// What the tree has evicted.
#[derive(Debug, Default)]
pub struct Evicted {
    /// The blocks.
    pub blocks: Vec<EvictedBlock>,
    /// The prefixes that they ended, if they were asked for.
    pub prefixes: Vec<EvictedPrefix>,
}

/// Evicts up to `count` blocks of a tree.
pub fn evict(writer: &mut TreeWriter, count: usize, note: bool) -> Evicted {
    let mut prefixes = Vec::new();
    let blocks = match note {
        true => writer.evict_prefixes(count, &mut prefixes),
        false => writer.evict(count),
    };
    Evicted { blocks, prefixes }
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

    /// Reserves `count` blocks, evicting only if that yields enough of them.
    ///
    /// # Errors
    /// Those of the tree.
    pub async fn reserve<T: TreeAccess>(
        &mut self,
        tree: &mut T,
        count: usize,
    ) -> Result<Reserved, T::Error> {
        let shortage = match self.pool.reserve(count) {
            Ok(lease) => return Ok(Reserved { lease: Some(lease), evicted: Vec::new() }),
            Err(shortage) => shortage,
        };
        // No block is missing if enough of them become free when the step in flight ends.
        if shortage.missing() == 0 {
            return Ok(Reserved::default());
        }
        let Some(missing) = shortage.evictions(&tree.counts().await?) else {
            return Ok(Reserved::default());
        };
        let evicted = tree.evict(missing, self.note_evicted).await?;
        self.take_evicted(evicted.blocks);
        Ok(Reserved { lease: self.pool.reserve(count).ok(), evicted: evicted.prefixes })
    }

    /// Returns blocks to the pool that were flushed while a sequence still used them. The tree
    /// evicts those before anything that can still be matched.
    ///
    /// # Errors
    /// Those of the tree.
    pub async fn settle<T: TreeAccess>(&mut self, tree: &mut T) -> Result<(), T::Error> {
        let detached = tree.counts().await?.detached;
        if detached > 0 {
            let evicted = tree.evict(detached, false).await?;
            self.take_evicted(evicted.blocks);
        }
        Ok(())
    }

    /// Removes everything from the tree that no request holds.
    ///
    /// # Errors
    /// Those of the tree.
    pub async fn flush<T: TreeAccess>(&mut self, tree: &mut T) -> Result<(), T::Error> {
        self.logits.clear();
        self.pool.release(tree.flush().await?);
        Ok(())
    }

    /// Counts the blocks that can be reserved.
    ///
    /// # Errors
    /// Those of the tree.
    pub async fn counts<T: TreeAccess>(&mut self, tree: &mut T) -> Result<BlockCounts, T::Error> {
        let evictable = tree.counts().await?.evictable;
        Ok(BlockCounts { free: self.pool.counts().free, evictable })
    }

    /// Verifies the pool and the tree, and that every block is in exactly one of them.
    ///
    /// # Errors
    /// Those of the tree. The inner error describes the first inconsistency.
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

    /// Looks up the logits of the last position of `tokens`, whose last full block is `block`.
    pub fn find_logits(
        &mut self,
        block: BlockId,
        namespace: &Namespace,
        tokens: &[u32],
    ) -> Option<Arc<[f32]>> {
        self.logits.get(block, namespace, tokens)
    }

    /// Counts the blocks of the pool.
    pub fn pool_counts(&self) -> PoolCounts {
        self.pool.counts()
    }

    /// Blocks that have left the tree are free again, and their cached logits are dropped.
    pub fn take_evicted(&mut self, blocks: Vec<EvictedBlock>) {
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
            "blocks: the pool counts {committed} committed, the tree {} cached and {} flushed",
            tree.cached, tree.detached
        ));
    }
    Ok(AuditReport {
        blocks_total: total,
        blocks_free: free,
        blocks_reserved: reserved,
        blocks_committed: committed,
        blocks_evictable: tree.evictable,
        running: 0,
        waiting: 0,
    })
}
