//! [`Held`]: what a sequence holds of the KV pool while it runs.

use stolon_kvcache::{BlockId, BlockLease, PrefixLease};

use super::Sequence;
use crate::states::HeldState;

/// The blocks and positions of a running sequence.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// Locks the committed positions that it reads; `None` without a prefix cache.
    pub(crate) lease: Option<PrefixLease>,
    /// Its reserved blocks, for the positions after the lease.
    pub(crate) reserved: Option<BlockLease>,
    /// Block table: the blocks of both leases in order of position.
    pub(crate) table: Vec<BlockId>,
    /// Number of positions that are computed: their keys and values are in the KV store, and its
    /// recurrent state covers them.
    pub(crate) computed: usize,
    /// Its recurrent state, for a model that has one.
    pub(crate) state: HeldState,
    /// Number of the last step that it was part of.
    pub(crate) last_step: u64,
}

impl Held {
    /// Number of positions that other requests can match.
    pub(crate) fn committed(&self) -> usize {
        self.lease.as_ref().map_or(0, PrefixLease::len)
    }

    /// Rebuilds the block table from the leases.
    pub(crate) fn rebuild_table(&mut self) {
        self.table.clear();
        if let Some(lease) = &self.lease {
            self.table.extend_from_slice(lease.blocks());
        }
        if let Some(reserved) = &self.reserved {
            self.table.extend_from_slice(reserved.blocks());
        }
    }

    /// Goes on in the last block of the turn before, if the sequence is a turn of a session that
    /// continues it. That block takes the place of the first reserved one.
    pub(crate) fn continue_turn(&mut self, sequence: &Sequence) {
        let Some((block, count)) = sequence.partial_block(self) else { return };
        self.computed += count;
        if let Some(mut reserved) = self.reserved.replace(block) {
            drop(reserved.split(1));
            self.add_reserved(reserved);
        }
    }

    /// Appends reserved blocks.
    pub(crate) fn add_reserved(&mut self, blocks: BlockLease) {
        self.table.extend_from_slice(blocks.blocks());
        match &mut self.reserved {
            Some(reserved) => {
                let appended = reserved.append(blocks);
                debug_assert!(appended.is_ok(), "an engine has one pool");
            }
            None => self.reserved = Some(blocks),
        }
    }
}
