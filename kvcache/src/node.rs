//! The nodes that readers walk: an immutable edge and a pointer to a table of children.
//!
//! Life of a node:
//! 1. The writer's arena builds it, private and complete, its children included.
//! 2. One store into a slot of its parent's table publishes it.
//! 3. Its own table pointer is the only thing that changes while it is live; see [`table`].
//! 4. One store replaces or clears its slot. From then on it never changes again: a reader still
//!    on it sees what was true just before that store.
//! 5. The reclaimer frees it when no reader can hold it. Its table is retired on its own, because
//!    splits and merges hand tables from one node to the next.
#![allow(unsafe_code, reason = "readers follow raw pointers that the reclaimer keeps alive")]

pub(crate) mod edge;
pub(crate) mod table;

use crate::hash;
use crate::reclaim::Retired;
use crate::sync::{AtomicPtr, Ordering, Witness, publish_order};
use edge::Edge;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use table::ChildTable;

/// The writer's number of a node: an index into its arena. Numbers are used again; inside the
/// writer none outlives its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeId(pub(crate) u32);

impl NodeId {
    /// No node.
    pub(crate) const NONE: NodeId = NodeId(u32::MAX);

    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }

    pub(crate) fn is_none(self) -> bool {
        self == NodeId::NONE
    }
}

/// One node of the tree as readers see it.
#[derive(Debug)]
pub(crate) struct Node {
    /// The run of whole blocks on the way into this node; empty only at the base root.
    pub(crate) edge: Edge,
    /// Lets the writer find its own records of a node that a walk has found.
    pub(crate) id: NodeId,
    /// The children, null when there are none. Stored by the writer with Release, loaded by
    /// readers with Acquire. The node does not own the table.
    children: AtomicPtr<ChildTable>,
    /// What the writer shows of its records. Relaxed stores by the writer, relaxed loads by dumps:
    /// numbers to look at, on which nothing depends.
    pub(crate) shown: Shown,
    witness: Witness,
}

/// The writer's records of a node, for dumps.
#[derive(Debug, Default)]
pub(crate) struct Shown {
    locks: AtomicU32,
    hits: AtomicU32,
    last_use: std::sync::atomic::AtomicU64,
}

impl Shown {
    pub(crate) fn set(&self, locks: u32, hits: u32, last_use: u64) {
        self.locks.store(locks, Relaxed);
        self.hits.store(hits, Relaxed);
        self.last_use.store(last_use, Relaxed);
    }

    /// Locks, hits and the tick of the last use.
    pub(crate) fn get(&self) -> (u32, u32, u64) {
        (self.locks.load(Relaxed), self.hits.load(Relaxed), self.last_use.load(Relaxed))
    }
}

impl Retired for Node {
    #[cfg(all(loom, not(crossbeam_loom)))]
    fn mark_freed(&self) {
        self.witness.free();
    }
}

impl Node {
    pub(crate) fn new(edge: Edge, id: NodeId, children: *mut ChildTable) -> Node {
        let children = AtomicPtr::new(children);
        Node { edge, id, children, shown: Shown::default(), witness: Witness::new() }
    }

    /// The table now. Pairs with [`Node::set_children`]: who sees the pointer sees the table.
    #[inline(always)]
    pub(crate) fn children(&self) -> *mut ChildTable {
        self.children.load(Ordering::Acquire)
    }

    /// Publishes another table. Writer only.
    pub(crate) fn set_children(&self, table: *mut ChildTable) {
        self.children.store(table, publish_order());
    }

    /// The child under `key` whose edge `measure` gives more than 0 for, and what it gave.
    ///
    /// # Safety
    ///
    /// What can be reached from this node is kept alive for `'g`, by a guard or because the
    /// caller is the writer.
    #[inline(always)]
    pub(crate) unsafe fn child<'g>(
        &'g self,
        key: u64,
        measure: impl Fn(&Edge) -> usize,
    ) -> Option<(&'g Node, usize)> {
        let table = ptr::NonNull::new(self.children())?;
        // SAFETY: loaded from a reachable node, so alive for 'g by this function's contract.
        let table: &'g ChildTable = unsafe { table.as_ref() };
        table.witness.look();
        let mut found = None;
        table.candidates(key, |candidate| {
            // SAFETY: loaded from a slot of a live table, so alive for 'g as well.
            let node: &'g Node = unsafe { candidate.as_ref() };
            node.witness.look();
            let measured = measure(&node.edge);
            if measured > 0 {
                found = Some((node, measured));
            }
            measured > 0
        });
        found
    }

    /// Walks down from this node as far as `positions` are cached, whole blocks only, and calls
    /// `visit` with each node met and how many blocks of its edge matched. Returns the positions
    /// matched.
    ///
    /// # Safety
    ///
    /// As for [`Node::child`].
    #[inline(always)]
    pub(crate) unsafe fn walk<'g>(
        &'g self,
        root_hash: u64,
        positions: &[u32],
        block_size: usize,
        mut visit: impl FnMut(&'g Node, usize),
    ) -> usize {
        let mut node = self;
        let mut parent_hash = root_hash;
        let mut matched = 0;
        while positions.len() - matched >= block_size {
            let rest = &positions[matched..];
            let key = hash::chain(parent_hash, hash::digest(&rest[..block_size]));
            let measure = |edge: &Edge| edge.common_blocks(rest, block_size);
            // SAFETY: the caller keeps everything reachable alive for 'g.
            let Some((child, blocks)) = (unsafe { node.child(key, measure) }) else {
                break;
            };
            matched += blocks * block_size;
            visit(child, blocks);
            if blocks < child.edge.block_count() {
                break;
            }
            parent_hash = child.edge.last_hash();
            node = child;
        }
        matched
    }

    /// As [`Node::walk`], for a caller that has the blocks' hashes already and trusts them.
    /// Returns the blocks matched.
    ///
    /// # Safety
    ///
    /// As for [`Node::child`].
    #[inline(always)]
    pub(crate) unsafe fn walk_hashes(&self, hashes: &[u64]) -> usize {
        let mut node = self;
        let mut matched = 0;
        while let Some(&key) = hashes.get(matched) {
            let measure = |edge: &Edge| edge.common_hashes(&hashes[matched..]);
            // SAFETY: the caller keeps everything reachable alive for 'g.
            let Some((child, blocks)) = (unsafe { node.child(key, measure) }) else {
                break;
            };
            matched += blocks;
            if blocks < child.edge.block_count() {
                break;
            }
            node = child;
        }
        matched
    }

    /// The children at this instant, in no order.
    ///
    /// # Safety
    ///
    /// As for [`Node::child`].
    pub(crate) unsafe fn each_child<'g>(&'g self, mut visit: impl FnMut(&'g Node)) {
        let Some(table) = ptr::NonNull::new(self.children()) else { return };
        // SAFETY: loaded from a reachable node, so alive for 'g by this function's contract.
        let table: &'g ChildTable = unsafe { table.as_ref() };
        for (_, child) in table.children() {
            // SAFETY: loaded from a slot of a live table, so alive for 'g as well.
            visit(unsafe { child.as_ref() });
        }
    }
}
