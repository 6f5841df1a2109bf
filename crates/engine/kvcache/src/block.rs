//! Block ids, and blocks that leave the tree.

use crate::Namespace;
use crate::pool::PoolQueue;
use std::ops::Deref;

/// The id of a KV block: an index from 0 to the number of blocks in the engine's KV memory minus 1.
///
/// The tree stores ids and never interprets them. [`BlockPool`](crate::BlockPool) hands out the ids
/// `0..block_count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct BlockId(pub u32);

impl BlockId {
    /// The id as a `usize`, to index the KV memory.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A block that has left the tree, with the content that it still holds. An engine with a second
/// tier of memory can copy the content there before it releases [`EvictedBlocks`], and find it again
/// by its hash.
///
/// Compares with a [`BlockId`] by its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct EvictedBlock {
    /// The block.
    pub id: BlockId,
    /// The namespace of its content.
    pub namespace: Namespace,
    /// The chained hash of its content and of everything before it, as
    /// [`TreeReader::block_hashes`](crate::TreeReader::block_hashes) computes it. It is a 64-bit
    /// hash that is not cryptographic: a program that relies on it alone should use a secret
    /// [`TreeBuilder::hash_seed`](crate::TreeBuilder::hash_seed).
    pub hash: u64,
}

/// Blocks that have left the tree. Only the tree makes this value and it cannot be cloned, so
/// [`BlockPool::release`](crate::BlockPool::release) frees each block once, and none that the tree
/// still has.
///
/// Dereferences to a slice of [`EvictedBlock`]s.
#[derive(Debug, Default)]
#[must_use = "blocks that are not released are never free again"]
pub struct EvictedBlocks {
    pub(crate) blocks: Vec<EvictedBlock>,
    /// The pool that the blocks came from; `None` if they were committed by their ids.
    pub(crate) pool: Option<PoolQueue>,
}

impl Deref for EvictedBlocks {
    type Target = [EvictedBlock];

    fn deref(&self) -> &[EvictedBlock] {
        &self.blocks
    }
}

impl<const N: usize> PartialEq<[BlockId; N]> for EvictedBlocks {
    fn eq(&self, ids: &[BlockId; N]) -> bool {
        self.blocks == *ids
    }
}

/// What [`TreeWriter::evict_prefixes`](crate::TreeWriter::evict_prefixes) has evicted from one
/// leaf: the last blocks of a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EvictedPrefix {
    /// The namespace of the prefix.
    pub namespace: Namespace,
    /// All positions up to the end of the last evicted block.
    pub positions: Vec<u32>,
    /// The blocks of all positions.
    pub blocks: Vec<BlockId>,
    /// The priority that the evicted blocks had.
    pub priority: i32,
    /// Index of the first evicted block in `blocks`. Those before it are still cached, or were
    /// evicted by the same call.
    pub evicted: usize,
}

impl PartialEq<BlockId> for EvictedBlock {
    fn eq(&self, id: &BlockId) -> bool {
        self.id == *id
    }
}
