//! [`Held`]: the part of the KV pool that a sequence holds while it runs.

use std::ops::Range;

use stolon_kvcache::{BlockId, BlockLease, PrefixLease};

use super::Sequence;
use crate::states::HeldState;

/// The blocks and positions of a running sequence.
///
/// | positions | blocks | who writes |
/// |---|---|---|
/// | `0..committed` | of the tree, locked by `lease` | nobody |
/// | `committed..written` | reserved; keys and values are in the KV store | this sequence |
/// | from `written` on | reserved, as far as the table reaches; contents undefined | this sequence |
///
/// `written` grows only when a step or a load has ended, by the positions that it has written, and
/// nothing beyond it can be committed. So a sequence that wrongly takes evicted positions for
/// computed ones is stopped before other requests can match them.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// Locks the committed positions that it reads; `None` without a prefix cache.
    pub(crate) lease: Option<PrefixLease>,
    /// Its reserved blocks, for the positions after the lease.
    pub(crate) reserved: Option<BlockLease>,
    /// Block table: the blocks of both leases in order of position.
    pub(crate) table: Vec<BlockId>,
    /// Number of positions that are computed: their keys and values are in the KV store, and its
    /// recurrent state covers them. With a recurrent state, the tree may have more.
    pub(crate) computed: usize,
    /// Number of leading positions whose keys and values are in the KV store, at least `committed`.
    written: usize,
    /// Its recurrent state, for a model that has one.
    pub(crate) state: HeldState,
    /// Number of the last step that it was part of.
    pub(crate) last_step: u64,
}

impl Held {
    /// The blocks that a sequence holds when it starts, with `computed` positions that it does not
    /// compute.
    pub(crate) fn new(
        lease: Option<PrefixLease>,
        reserved: Option<BlockLease>,
        computed: usize,
    ) -> Held {
        let written = lease.as_ref().map_or(0, PrefixLease::len);
        let mut held = Held { lease, reserved, written, ..Held::default() };
        held.resume_at(computed);
        held
    }

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

    /// Continues in the last block of the previous turn, if the sequence is a turn of a session
    /// that continues it. That block takes the place of the first reserved one.
    pub(crate) fn continue_turn(&mut self, sequence: &Sequence) {
        let Some((block, count)) = sequence.partial_block(self) else { return };
        self.wrote(self.computed..self.computed + count);
        self.resume_at(self.computed + count);
        if let Some(mut reserved) = self.reserved.replace(block) {
            drop(reserved.split(1));
            self.add_reserved(reserved);
        }
    }

    /// A step or a load has written the keys and values of these positions.
    ///
    /// # Panics
    /// If there are positions before them that were never written.
    pub(crate) fn wrote(&mut self, positions: Range<usize>) {
        let Held { written, .. } = *self;
        assert!(positions.start <= written, "{positions:?} do not continue the {written} written");
        self.written = written.max(positions.end);
    }

    /// The sequence continues after `computed` positions, whose keys and values it does not compute.
    ///
    /// # Panics
    /// If not all of them were written.
    pub(crate) fn resume_at(&mut self, computed: usize) {
        let Held { written, .. } = *self;
        assert!(computed <= written, "{computed} positions are needed, {written} were written");
        self.computed = computed;
    }

    /// A step has computed the positions `start..end`. It has written those that are not committed.
    pub(crate) fn stepped(&mut self, start: usize, end: usize) {
        self.wrote(start.max(self.committed())..end);
        self.resume_at(end.max(self.computed));
    }

    /// Takes both leases to commit full blocks that the tree does not have yet, with the number of
    /// positions up to their end. `None` if there are none.
    ///
    /// # Panics
    /// If their keys and values were not written.
    pub(crate) fn take_full(
        &mut self,
        block_size: usize,
    ) -> Option<(usize, PrefixLease, BlockLease)> {
        let len = self.computed / block_size * block_size;
        let Held { written, .. } = *self;
        assert!(len <= written, "{len} positions are to be committed, {written} were written");
        if len <= self.committed() || self.reserved.is_none() {
            return None;
        }
        let lease = self.lease.take()?;
        Some((len, lease, self.reserved.take()?))
    }

    /// Takes back what [`Held::take_full`] has lent.
    pub(crate) fn committed_blocks(&mut self, lease: PrefixLease, reserved: BlockLease) {
        (self.lease, self.reserved) = (Some(lease), Some(reserved));
        self.rebuild_table();
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
