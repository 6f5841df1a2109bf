//! Errors. Each variant is something that a caller can act on.

use crate::{BlockId, TreeCounts};
use thiserror::Error;

/// A setting has a value that is not supported.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The block size is zero, above 256, or not a power of two.
    #[error("block size: expected a power of two from 1 to 256, got {got}")]
    BlockSize {
        /// The requested block size, in positions.
        got: usize,
    },
    /// The KV memory has more blocks than are supported.
    #[error("block count: expected at most {max} blocks, got {got}")]
    BlockCount {
        /// The requested number of blocks.
        got: usize,
        /// The largest supported number.
        max: usize,
    },
    /// Too many namespaces have a quota of their own; see
    /// [`TreeWriter::set_namespace_quota`](crate::TreeWriter::set_namespace_quota).
    #[error("namespace quotas: expected at most {max} namespaces with a quota of their own")]
    NamespaceQuotas {
        /// The largest supported number of such namespaces.
        max: usize,
    },
    /// The event queue could not hold a single event.
    #[error("event queue: expected a capacity of at least 1 event, got {got}")]
    EventCapacity {
        /// The requested capacity, in events.
        got: usize,
    },
}

/// A commit was refused. Nothing has changed: all offered blocks still belong to the caller.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CommitError {
    /// The lease was acquired from another tree.
    #[error("commit: expected a lease of this tree, got one of another tree")]
    OtherTree,
    /// The private blocks are of another pool than those of the tree, or only one of the two is
    /// managed by a pool.
    #[error("commit: expected blocks of the pool that the tree's blocks are from, got others")]
    OtherPool,
    /// More positions are said to be written than the sequence has.
    #[error("commit: expected at most the {len} positions of the sequence, got {got}")]
    TooMany {
        /// Number of positions of the sequence.
        len: usize,
        /// Number of positions whose KV is said to be written.
        got: usize,
    },
    /// The positions do not start with the prefix that the lease locks.
    #[error("commit: expected positions that start with the {locked} positions of the lease")]
    OtherPrefix {
        /// Length of the lease's prefix, in positions.
        locked: usize,
    },
    /// A position has bit 31 set, but is not part of an atomic token span as
    /// [`TokenSpanInterner::append`](crate::TokenSpanInterner::append) writes it.
    #[error(
        "position {index}: expected a token id below 2^31 or an atomic token span, got {got:#x}"
    )]
    InvalidPosition {
        /// Index of the position.
        index: usize,
        /// Its value.
        got: u32,
    },
    /// An offered block is outside the KV memory; see
    /// [`TreeBuilder::block_count`](crate::TreeBuilder::block_count).
    #[error("commit: expected block ids below {block_count}, got {}", .block.0)]
    BlockOutOfRange {
        /// The block.
        block: BlockId,
        /// Number of blocks of the KV memory.
        block_count: usize,
    },
    /// An offered block was offered twice, or is the tree's block of another prefix.
    #[error("commit: expected blocks that are in no other place, got block {} again", .block.0)]
    BlockInUse {
        /// The block.
        block: BlockId,
    },
}

/// The pool has fewer free blocks than requested. Nothing was reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("expected {requested} free blocks, got {free} ({fenced} more after the running steps)")]
pub struct Shortage {
    /// Number of blocks requested.
    pub requested: usize,
    /// Number of blocks that are free now.
    pub free: usize,
    /// Number of blocks that become free when the running steps have ended.
    pub fenced: usize,
}

impl Shortage {
    /// The number of blocks that are missing even after the running steps have ended: how many to
    /// evict.
    pub fn missing(&self) -> usize {
        self.requested.saturating_sub(self.free + self.fenced)
    }

    /// The number of blocks to evict, so that as many are free as were requested. `None` if no
    /// block is missing after the running steps, or if the tree cannot evict that many.
    pub fn evictions(&self, tree: &TreeCounts) -> Option<usize> {
        let missing = self.missing();
        (missing > 0 && missing <= tree.returnable()).then_some(missing)
    }
}

/// The blocks of a sequence could not be extended. The sequence keeps what it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GrowError {
    /// There are too few blocks.
    #[error(transparent)]
    Shortage(#[from] Shortage),
    /// The sequence was begun in another cache.
    #[error("grow: expected a sequence of this cache, got one of another cache")]
    OtherCache,
}

/// An audit found a contradiction. Either this crate has a defect, or a caller passed in a block id
/// that it does not own.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AuditError {
    /// A counter differs from a recount.
    #[error("{counter}: a recount found {expected}, the counter is {got}")]
    Counter {
        /// What is counted.
        counter: &'static str,
        /// The result of the recount.
        expected: usize,
        /// The value of the counter.
        got: usize,
    },
    /// A block appears in two places.
    #[error("block {block:?}: expected one owner, got a second one")]
    SharedBlock {
        /// The block.
        block: BlockId,
    },
    /// A node violates an invariant of the tree.
    #[error("node {node}: expected {expected}")]
    Node {
        /// The writer's number of the node.
        node: u32,
        /// The invariant.
        expected: &'static str,
    },
    /// Blocks were released that were not in the required state. The pool refused them.
    #[error("pool: expected every returned block to be {expected}, got {count} others")]
    Misuse {
        /// The state that released blocks must be in.
        expected: &'static str,
        /// Number of blocks that were refused since the pool was created.
        count: usize,
    },
}
