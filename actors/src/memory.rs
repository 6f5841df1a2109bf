//! The scheduler's view of the cache and the blocks: a trait, so that it runs behind actors in
//! the engine and directly on the data in tests and simulations.

pub(crate) mod actors;
pub(crate) mod direct;
pub(crate) mod pool;

use std::future::Future;
use std::sync::Arc;

use stolon_kvcache::{BlockId, BlockLease, Namespace, PrefixLease};

use crate::kept_rows::PromptRow;

/// A part of the core that did not answer: it has failed, and its generation ends with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is gone")]
pub(crate) struct Gone(pub(crate) &'static str);

/// What locking a prefix gave.
#[derive(Debug)]
pub(crate) struct Acquired {
    /// The tokens, handed back.
    pub(crate) tokens: Vec<u32>,
    /// The longest match, locked.
    pub(crate) lease: PrefixLease,
    /// Blocks that can be evicted now that it is locked.
    pub(crate) evictable: usize,
}

/// What looking for a prompt's last row of logits gave.
#[derive(Debug)]
pub(crate) struct FoundRow {
    /// The tokens, handed back.
    pub(crate) tokens: Vec<u32>,
    /// `[vocab_size]`.
    pub(crate) logits: Option<Arc<[f32]>>,
}

/// One sequence's full blocks, on their way into the tree.
#[derive(Debug)]
pub(crate) struct CommitItem {
    /// The sequence's tokens; moved here and back, never copied.
    pub(crate) tokens: Vec<u32>,
    /// Positions to be cached, from 0; a multiple of the block size.
    pub(crate) len: usize,
    /// What the sequence holds of the tree already.
    pub(crate) lease: PrefixLease,
    /// Blocks of the positions after the lease.
    pub(crate) blocks: Vec<BlockId>,
}

/// What a commit gave.
#[derive(Debug)]
pub(crate) struct Committed {
    /// The tokens, handed back.
    pub(crate) tokens: Vec<u32>,
    /// The lease, extended over the committed positions.
    pub(crate) lease: PrefixLease,
    /// Blocks the tree had no use for, because it has the same positions in others.
    pub(crate) duplicates: Vec<BlockId>,
}

/// Blocks as they stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockCounts {
    /// Nobody's, ready to be reserved.
    pub(crate) free: usize,
    /// Private to sequences.
    pub(crate) reserved: usize,
    /// Owned by the tree.
    pub(crate) cached: usize,
    /// Those of them that nobody holds.
    pub(crate) evictable: usize,
}

/// What an audit checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoreAudit {
    /// Blocks there are: free, reserved and committed ones.
    pub blocks_total: usize,
    /// Nobody's.
    pub blocks_free: usize,
    /// Private to sequences; 0 when none runs.
    pub blocks_reserved: usize,
    /// Owned by the tree.
    pub blocks_committed: usize,
    /// Those of them that nobody holds; all of them when nothing runs.
    pub blocks_evictable: usize,
    /// Sequences running.
    pub running: usize,
    /// Sequences waiting.
    pub waiting: usize,
}

/// The cache and the blocks. One caller at a time; each call is answered before the next.
pub(crate) trait Memory: Send {
    /// Locks the longest cached prefix of the first `limit` tokens.
    fn acquire(
        &mut self,
        namespace: &Namespace,
        tokens: Vec<u32>,
        limit: usize,
    ) -> impl Future<Output = Result<Acquired, Gone>> + Send;

    /// Puts full blocks into the tree, in order.
    fn commit(
        &mut self,
        items: Vec<CommitItem>,
    ) -> impl Future<Output = Result<Vec<Committed>, Gone>> + Send;

    /// `count` blocks for one sequence, evicting what is needed; `None` when there are not so
    /// many to be had now.
    fn reserve(
        &mut self,
        count: usize,
    ) -> impl Future<Output = Result<Option<BlockLease>, Gone>> + Send;

    /// Keeps a prompt's last row of logits for as long as its block stays in the tree.
    fn keep_row(&mut self, row: PromptRow) -> Result<(), Gone>;

    /// The last row of logits of the prompt `tokens`, whose last whole block is `block`; the
    /// tokens are handed back.
    fn find_row(
        &mut self,
        block: BlockId,
        namespace: &Namespace,
        tokens: Vec<u32>,
    ) -> impl Future<Output = Result<FoundRow, Gone>> + Send;

    /// Gives back blocks that the tree did not take.
    fn release(&mut self, blocks: Vec<BlockId>) -> Result<(), Gone>;

    /// Counts, after everything dropped so far has come back.
    fn counts(&mut self) -> impl Future<Output = Result<BlockCounts, Gone>> + Send;

    /// Takes in everything that has come back since. Nothing is held at this moment.
    fn settle(&mut self) -> impl Future<Output = Result<(), Gone>> + Send;

    /// Empties the tree as far as nobody holds it.
    fn flush(&mut self) -> impl Future<Output = Result<(), Gone>> + Send;

    /// Checks the blocks and the tree against each other.
    fn audit(&mut self) -> impl Future<Output = Result<Result<CoreAudit, String>, Gone>> + Send;
}
