//! The set of blocks that sessions hold.

use std::collections::HashMap;

use stolon_kvcache::BlockId;

use super::SessionHold;

/// The number of sessions that hold each block. Conversations often start alike, so a block that
/// many of them hold counts once.
#[derive(Debug, Default)]
pub(super) struct HeldBlocks {
    uses: HashMap<BlockId, u32>,
}

impl HeldBlocks {
    /// Number of different blocks.
    pub(super) fn len(&self) -> usize {
        self.uses.len()
    }

    pub(super) fn add(&mut self, blocks: impl Iterator<Item = BlockId>) {
        for block in blocks {
            *self.uses.entry(block).or_default() += 1;
        }
    }

    /// Removes one use of each of these blocks, which were added before.
    pub(super) fn remove(&mut self, blocks: impl Iterator<Item = BlockId>) {
        for block in blocks {
            let Some(uses) = self.uses.get_mut(&block) else {
                debug_assert!(false, "{block:?} was added before");
                continue;
            };
            *uses -= 1;
            if *uses == 0 {
                self.uses.remove(&block);
            }
        }
    }

    /// Whether these uses are exactly those of `holds`.
    pub(super) fn is_sum_of<'a>(&self, holds: impl Iterator<Item = &'a SessionHold>) -> bool {
        let mut recount = HeldBlocks::default();
        holds.for_each(|hold| recount.add(hold.blocks()));
        recount.uses == self.uses
    }
}
