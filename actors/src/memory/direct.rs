//! [`Memory`] without actors: the tree and the pool in one value, for simulations and
//! for tests of the scheduler.

use stolon_kvcache::{BlockId, BlockLease, Namespace, TreeWriter};

use super::pool::{self, Blocks};
use super::{Acquired, BlockCounts, CommitItem, Committed, CoreAudit, FoundRow, Gone, Memory};
use crate::kept_rows::PromptRow;
use crate::prefix_tree::commit;

/// The tree and the pool.
#[derive(Debug)]
pub(crate) struct DirectMemory {
    pub(crate) writer: TreeWriter,
    pub(crate) blocks: Blocks,
}

impl Memory for DirectMemory {
    async fn acquire(
        &mut self,
        namespace: &Namespace,
        tokens: Vec<u32>,
        limit: usize,
    ) -> Result<Acquired, Gone> {
        let lease = self.writer.acquire(namespace, &tokens[..limit]);
        Ok(Acquired { tokens, lease, evictable: self.writer.counts().evictable })
    }

    async fn commit(&mut self, items: Vec<CommitItem>) -> Result<Vec<Committed>, Gone> {
        Ok(items.into_iter().map(|item| commit(&mut self.writer, item)).collect())
    }

    async fn reserve(&mut self, count: usize) -> Result<Option<BlockLease>, Gone> {
        let missing = match self.blocks.pool.reserve(count) {
            Ok(lease) => return Ok(Some(lease)),
            Err(shortage) => shortage.missing(),
        };
        let tree = self.writer.counts();
        if missing == 0 || tree.evictable + tree.detached < missing {
            return Ok(None);
        }
        let evicted = self.writer.evict(missing);
        self.blocks.take_back(evicted);
        Ok(self.blocks.pool.reserve(count).ok())
    }

    fn keep_row(&mut self, row: PromptRow) -> Result<(), Gone> {
        self.blocks.rows.keep(row);
        Ok(())
    }

    async fn find_row(
        &mut self,
        block: BlockId,
        namespace: &Namespace,
        tokens: Vec<u32>,
    ) -> Result<FoundRow, Gone> {
        let logits = self.blocks.rows.get(block, namespace, &tokens);
        Ok(FoundRow { tokens, logits })
    }

    fn release(&mut self, blocks: Vec<BlockId>) -> Result<(), Gone> {
        self.blocks.pool.release(blocks);
        Ok(())
    }

    async fn counts(&mut self) -> Result<BlockCounts, Gone> {
        Ok(pool::counts(&self.blocks.pool, &self.writer.counts()))
    }

    async fn settle(&mut self) -> Result<(), Gone> {
        let flushed = self.writer.counts().detached;
        let evicted = self.writer.evict(flushed);
        self.blocks.take_back(evicted);
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), Gone> {
        self.blocks.rows.clear();
        self.blocks.pool.release(self.writer.flush());
        Ok(())
    }

    async fn audit(&mut self) -> Result<Result<CoreAudit, String>, Gone> {
        let checked = self.writer.audit().map_err(|error| error.to_string());
        Ok(checked.and_then(|_| pool::audit(&mut self.blocks.pool, &self.writer.counts())))
    }
}
