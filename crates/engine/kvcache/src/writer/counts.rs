//! The numbers of blocks by state.

use super::TreeWriter;
use crate::core::Core;

/// The sizes of the tree at one moment, returned by [`TreeWriter::counts`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TreeCounts {
    /// Number of blocks in the index: `evictable + locked`.
    pub cached: usize,
    /// Number of blocks in the index that evictions can remove, directly or after other blocks.
    pub evictable: usize,
    /// Number of blocks in the index that leases and pins hold. Demotable pins hold none.
    pub locked: usize,
    /// Number of blocks of all pins, demoted ones included. A block that several pins share counts
    /// for each of them.
    pub pinned: usize,
    /// Number of blocks that were removed from the index and not returned yet: by a flush or the
    /// eviction of a namespace while a lease held them, or for the quota of a namespace.
    pub detached: usize,
    /// Number of the detached blocks that nothing holds any longer. The next eviction returns them,
    /// before it removes anything from the index.
    pub freed: usize,
    /// Number of nodes, not counting the roots of namespaces.
    pub nodes: usize,
    /// Number of namespaces in which something is cached, not counting the base namespace.
    pub namespaces: usize,
}

impl TreeCounts {
    /// Number of blocks that evictions can return: `evictable + freed`.
    pub fn returnable(&self) -> usize {
        self.evictable + self.freed
    }
}

impl TreeWriter {
    /// Returns the numbers of blocks by state, after all dropped leases were processed.
    pub fn counts(&mut self) -> TreeCounts {
        self.drain();
        let roots = self.arena.child_count(Core::DIRECTORY);
        TreeCounts {
            cached: self.cached,
            evictable: self.cached - self.locked,
            locked: self.locked,
            pinned: self.pins.blocks,
            detached: self.detached_blocks + self.freed.len(),
            freed: self.freed.len(),
            nodes: self.arena.node_count() - roots,
            namespaces: roots,
        }
    }
}
