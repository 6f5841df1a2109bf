//! The set of blocks that the tree owns, so that no block is cached in two places.

use crate::{BlockId, CommitError};

/// The blocks that the tree owns, inside and outside the index. Records and checks nothing if the
/// number of blocks of the KV memory is unknown.
#[derive(Debug)]
pub(super) struct OwnedBlocks {
    /// One bit for each block of the KV memory.
    bits: Vec<u64>,
    block_count: Option<usize>,
}

impl OwnedBlocks {
    pub(super) fn new(block_count: Option<usize>) -> OwnedBlocks {
        OwnedBlocks { bits: vec![0; block_count.unwrap_or(0).div_ceil(64)], block_count }
    }

    /// Adds all of `blocks`, or none of them if one is out of range or not new.
    pub(super) fn add(
        &mut self,
        blocks: impl Iterator<Item = BlockId> + Clone,
    ) -> Result<(), CommitError> {
        let Some(block_count) = self.block_count else { return Ok(()) };
        for (added, block) in blocks.clone().enumerate() {
            let refused = if block.index() >= block_count {
                CommitError::BlockOutOfRange { block, block_count }
            } else if self.set(block, true) {
                CommitError::BlockInUse { block }
            } else {
                continue;
            };
            self.remove(blocks.take(added));
            return Err(refused);
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, blocks: impl Iterator<Item = BlockId>) {
        if self.block_count.is_some() {
            blocks.for_each(|block| {
                self.set(block, false);
            });
        }
    }

    /// Number of owned blocks; `None` if they are not recorded.
    pub(super) fn count(&self) -> Option<usize> {
        let ones = self.bits.iter().map(|word| word.count_ones() as usize);
        self.block_count.map(|_| ones.sum())
    }

    /// Records whether the tree owns the block, and returns whether it did before.
    fn set(&mut self, block: BlockId, owned: bool) -> bool {
        let word = &mut self.bits[block.index() / 64];
        let bit = 1 << (block.index() % 64);
        let before = *word & bit != 0;
        *word = if owned { *word | bit } else { *word & !bit };
        before
    }
}
