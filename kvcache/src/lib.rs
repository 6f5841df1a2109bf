//! A lock-free radix tree over KV blocks: one writer, any number of readers.

/// A block of the KV store: an index below the store's block count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);
