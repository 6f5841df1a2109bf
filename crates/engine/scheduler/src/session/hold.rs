//! [`SessionHold`]: the KV of its last turn that a session keeps.

use stolon_kvcache::{BlockId, BlockLease, CheckpointLease, PrefixLease, TokenSpan};

use crate::memory::Acquired;

/// The KV of its last turn that a session keeps: the full blocks, which the prefix tree has, and
/// the block after them.
#[derive(Debug)]
pub struct SessionHold {
    prefix: PrefixLease,
    /// For a model with a recurrent state: the checkpoint from which the next turn resumes.
    checkpoint: Option<CheckpointLease>,
    partial: Option<PartialBlock>,
}

/// The last block of a turn if it is not full, which the prefix tree does not have. Its KV depends
/// on all positions before it, so it continues the prefix of its [`SessionHold`] and no other.
#[derive(Debug)]
struct PartialBlock {
    /// The positions that were computed, fewer than the block has.
    tokens: Box<[u32]>,
    /// The block. No other request can read it.
    block: BlockLease,
}

/// A prefix that ends with a full block.
impl From<PrefixLease> for SessionHold {
    fn from(prefix: PrefixLease) -> SessionHold {
        SessionHold { prefix, checkpoint: None, partial: None }
    }
}

impl From<Acquired> for SessionHold {
    fn from(Acquired { lease, checkpoint, .. }: Acquired) -> SessionHold {
        SessionHold::from(lease).with_checkpoint(checkpoint)
    }
}

impl SessionHold {
    /// The locked prefix of a turn, and the positions `after` it that were computed into the first
    /// of its `reserved` blocks. They are kept if they do not fill that block.
    pub fn new(prefix: PrefixLease, after: &[u32], reserved: Option<BlockLease>) -> SessionHold {
        let is_partial = (1..prefix.block_size()).contains(&after.len());
        let block = reserved.filter(|_| is_partial).map(|mut reserved| reserved.split(1));
        let block = block.filter(|block| !block.is_empty());
        let partial = block.map(|block| PartialBlock { tokens: after.into(), block });
        SessionHold { prefix, checkpoint: None, partial }
    }

    /// The same with the checkpoint from which the next turn resumes.
    #[must_use]
    pub fn with_checkpoint(self, checkpoint: Option<CheckpointLease>) -> SessionHold {
        SessionHold { checkpoint, ..self }
    }

    /// Number of positions.
    pub(super) fn len(&self) -> usize {
        self.prefix.len() + self.partial.as_ref().map_or(0, |partial| partial.tokens.len())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.prefix.is_empty() && !self.has_partial()
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        let partial = self.partial.iter().flat_map(|partial| partial.block.blocks());
        let checkpoint = self.checkpoint.iter().flat_map(CheckpointLease::blocks);
        self.prefix.blocks().iter().chain(checkpoint).chain(partial).copied()
    }

    pub(super) fn block_count(&self) -> usize {
        let checkpoint = self.checkpoint.as_ref().map_or(0, |lease| lease.blocks().len());
        self.prefix.blocks().len() + checkpoint + usize::from(self.has_partial())
    }

    pub(super) fn has_partial(&self) -> bool {
        self.partial.is_some()
    }

    /// Returns the partial block to its pool.
    pub(super) fn drop_partial(&mut self) {
        self.partial = None;
    }

    /// Takes the partial block if it continues `prefix` and if positions at its start are those of
    /// `rest`, which follow `prefix` in a request. Returns it with their number.
    pub(super) fn take_partial(
        &mut self,
        prefix: &PrefixLease,
        rest: &[u32],
    ) -> Option<(BlockLease, usize)> {
        let own = &self.partial.as_ref()?.tokens;
        // A locked block of the tree keeps its content, so the same blocks are the same positions.
        if prefix.blocks() != self.prefix.blocks() {
            return None;
        }
        let equal = own.iter().zip(rest).take_while(|(own, other)| own == other).count();
        let count = (1..=equal).rev().find(|&count| TokenSpan::may_end_after(rest[count - 1]))?;
        self.partial.take().map(|partial| (partial.block, count))
    }
}
