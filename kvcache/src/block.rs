//! Block ids.

/// The id of a KV block: an index from 0 to the number of blocks in the engine's KV memory minus 1.
///
/// The tree stores ids and never interprets them. [`BlockPool`](crate::BlockPool) hands out the ids
/// `0..block_count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The id as a `usize`, to index the KV memory.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
