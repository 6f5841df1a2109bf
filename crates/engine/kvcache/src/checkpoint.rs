//! Checkpoints: copies of the recurrent state of a sequence, for models that have one.
//!
//! A recurrent layer keeps a state in place of the KV of positions. It cannot be cut, so a request
//! that shares a prefix can only resume where a copy of the state was stored. Such a checkpoint
//! occupies a fixed number of blocks of the same pool. In the tree it is an atomic token span of a
//! kind that no prompt has, directly after the prefix that it belongs to: a leaf, next to the
//! continuations of that prefix. So it is published, locked, counted against quotas and evicted as
//! all blocks are. It is evicted before its prefix, never after it, and always as a whole.

use crate::node::edge::Edge;
use crate::{BlockId, PrefixLease, hash, token_span};

/// How much of a prompt is cached, and from where a request for it can resume. Returned by
/// [`TreeReader::query_resume`](crate::TreeReader::query_resume).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixMatch {
    /// Number of leading positions whose KV is cached, as
    /// [`TreeReader::query_match_len`](crate::TreeReader::query_match_len) returns it.
    pub cached: usize,
    /// Number of leading positions that a request does not have to compute, at most `cached`. In a
    /// tree with [`checkpoint_blocks`](crate::TreeBuilder::checkpoint_blocks), it is the length of
    /// the longest cached prefix that is shorter than the prompt and has a checkpoint, or 0; in any
    /// other tree it is `cached`.
    pub resume: usize,
}

/// A locked checkpoint, returned by
/// [`TreeWriter::acquire_checkpoint`](crate::TreeWriter::acquire_checkpoint). While it lives,
/// neither the checkpoint nor its prefix is evicted.
#[derive(Debug)]
pub struct CheckpointLease {
    lease: PrefixLease,
    /// Number of blocks of the checkpoint.
    block_count: usize,
}

impl CheckpointLease {
    pub(crate) fn new(lease: PrefixLease, block_count: usize) -> CheckpointLease {
        CheckpointLease { lease, block_count }
    }

    /// Number of positions that the state covers: a multiple of the block size, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "it covers at least one block")]
    pub fn len(&self) -> usize {
        self.lease.len() - self.block_count * self.lease.block_size()
    }

    /// The blocks that hold the state.
    pub fn blocks(&self) -> &[BlockId] {
        let blocks = self.lease.blocks();
        &blocks[blocks.len() - self.block_count..]
    }
}

/// The placeholder positions, `count` of them, that stand for a checkpoint after its prefix. A
/// program that keeps a copy of a checkpoint outside of the tree stores it under the prefix and
/// these positions. No prompt contains them.
pub fn checkpoint_positions(count: usize) -> Box<[u32]> {
    token_span::checkpoint(count)
}

/// Length of `positions` without the placeholder positions of a checkpoint at their end.
pub fn len_before_checkpoint(positions: &[u32]) -> usize {
    let checkpoint = positions.iter().rev().take_while(|&&at| token_span::is_checkpoint(at));
    positions.len() - checkpoint.count()
}

/// What a tree must know to find checkpoints.
#[derive(Debug)]
pub(crate) struct CheckpointSpan {
    /// The positions of a checkpoint.
    pub(crate) positions: Box<[u32]>,
    /// The digest of its first block.
    digest: u64,
    pub(crate) block_count: usize,
    block_size: usize,
}

impl CheckpointSpan {
    pub(crate) fn new(block_count: usize, block_size: usize) -> CheckpointSpan {
        let positions = token_span::checkpoint(block_count * block_size);
        let digest = hash::digest(&positions[..block_size]);
        CheckpointSpan { positions, digest, block_count, block_size }
    }

    /// The key of a child that begins with a checkpoint, below a node whose last hash is `parent`.
    #[inline(always)]
    pub(crate) fn key(&self, parent: u64) -> u64 {
        hash::chain(parent, self.digest)
    }

    /// Whether a checkpoint begins at this block of an edge.
    #[inline(always)]
    pub(crate) fn is_at(&self, edge: &Edge, block: usize) -> bool {
        token_span::is_checkpoint(edge.positions()[block * self.block_size])
    }
}

/// Number of blocks of the checkpoint at the end of an edge, or 0.
pub(crate) fn checkpoint_blocks(edge: &Edge, block_size: usize) -> usize {
    let blocks = edge.positions().chunks_exact(block_size).rev();
    blocks.take_while(|block| token_span::is_checkpoint(block[0])).count()
}
