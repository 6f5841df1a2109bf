//! The name of a KV block. Plain data; every crate of the workspace speaks it.

/// A block of the KV store: an index below the store's block count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The index as a `usize`, for slicing the KV store.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
