//! The blocks and what is kept with them, and plain functions on them and the tree's counts.

use stolon_kvcache::{BlockId, BlockPool, TreeCounts};

use super::{BlockCounts, CoreAudit};
use crate::kept_rows::KeptRows;

/// The blocks, and what is kept with those in the tree.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub(crate) pool: BlockPool,
    pub(crate) rows: KeptRows,
}

impl Blocks {
    /// Takes blocks back that have left the tree.
    pub(crate) fn take_back(&mut self, blocks: Vec<BlockId>) {
        self.rows.forget(&blocks);
        self.pool.release(blocks);
    }
}

/// Blocks as they stand.
pub(crate) fn counts(pool: &BlockPool, tree: &TreeCounts) -> BlockCounts {
    let counts = pool.counts();
    BlockCounts {
        free: counts.free,
        reserved: counts.reserved,
        cached: tree.cached,
        evictable: tree.evictable,
    }
}

/// Checks that every block is somewhere, and only there.
pub(crate) fn audit(pool: &mut BlockPool, tree: &TreeCounts) -> Result<CoreAudit, String> {
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
    Ok(CoreAudit {
        blocks_total: total,
        blocks_free: free,
        blocks_reserved: reserved,
        blocks_committed: committed,
        blocks_evictable: tree.evictable,
        running: 0,
        waiting: 0,
    })
}
