//! The nodes that readers walk. A node has an immutable edge and a pointer to a table of children.
//!
//! Life of a node:
//! 1. The writer's arena builds it privately and completely, with its children.
//! 2. One store into a slot of its parent's table publishes it.
//! 3. Its own table pointer is the only thing that changes while it is live; see [`table`].
//! 4. One store replaces or clears its slot. From then on it never changes again: a reader that
//!    still looks at it sees the state just before that store.
//! 5. The writer frees it when no reader can hold a pointer to it; see [`crate::reclaim`]. Its table
//!    is retired separately, because splits and merges pass tables from one node to the next.
#![allow(unsafe_code, reason = "readers follow raw pointers that their guards keep alive")]

pub(crate) mod edge;
pub(crate) mod table;

use crate::checkpoint::CheckpointSpan;
use crate::reclaim::Retired;
use crate::sync::{AtomicPtr, Ordering, Witness, publish_order};
use crate::{PrefixMatch, TreeReader, hash};
use edge::Edge;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use table::ChildTable;

/// The number of a node: an index into the writer's arena. Numbers are reused. The writer keeps no
/// number for longer than the node exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
    /// The run of whole blocks of this node; empty only at the base root.
    pub(crate) edge: Edge,
    /// The index of the writer's own record of this node.
    pub(crate) id: NodeId,
    /// The table of children, null if there are none. Stored by the writer with Release and loaded
    /// by readers with Acquire. The node does not own the table.
    children: AtomicPtr<ChildTable>,
    /// A copy of some of the writer's counters, for dumps. Stored and loaded with Relaxed, because
    /// nothing depends on them.
    pub(crate) shown: Shown,
    witness: Witness,
}

/// The writer's counters of a node that dumps display.
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

    /// Returns the locks, the hits and the tick of the last use.
    pub(crate) fn get(&self) -> (u32, u32, u64) {
        (self.locks.load(Relaxed), self.hits.load(Relaxed), self.last_use.load(Relaxed))
    }
}

impl Retired for Node {
    #[cfg(loom)]
    fn mark_freed(&self) {
        self.witness.free();
    }
}

impl Node {
    pub(crate) fn new(edge: Edge, id: NodeId, children: *mut ChildTable) -> Node {
        let children = AtomicPtr::new(children);
        Node { edge, id, children, shown: Shown::default(), witness: Witness::new() }
    }

    /// The current table. The Acquire pairs with the Release in [`Node::set_children`], so the
    /// table is complete.
    #[inline(always)]
    pub(crate) fn children(&self) -> *mut ChildTable {
        self.children.load(Ordering::Acquire)
    }

    /// Publishes another table. Called by the writer only.
    pub(crate) fn set_children(&self, table: *mut ChildTable) {
        self.children.store(table, publish_order());
    }

    /// Returns the child under `key` for whose edge `measure` returns more than 0, and that result.
    /// (Several children may have the same key if their hashes collide.)
    ///
    /// # Safety
    ///
    /// Everything reachable from this node stays allocated for `'g`: either the caller holds a
    /// guard, or it is the writer, which alone retires nodes.
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

    /// Walks down from this node as far as `positions` are cached in whole blocks. Calls `visit`
    /// with each node on the way and the number of blocks of its edge that matched. Returns the
    /// number of positions matched.
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

    /// The checkpoint directly below this node.
    ///
    /// # Safety
    ///
    /// As for [`Node::child`].
    pub(crate) unsafe fn checkpoint(&self, span: &CheckpointSpan) -> Option<&Node> {
        let is_first = |edge: &Edge| usize::from(span.is_at(edge, 0));
        // SAFETY: the caller keeps everything reachable alive.
        let found = unsafe { self.child(span.key(self.edge.last_hash()), is_first) };
        found.map(|(node, _)| node)
    }

    /// As [`Node::walk`], and finds the longest prefix on the way that has a checkpoint and is
    /// shorter than `positions`.
    ///
    /// # Safety
    ///
    /// As for [`Node::child`].
    pub(crate) unsafe fn walk_checkpoints<'g>(
        &'g self,
        root_hash: u64,
        positions: &[u32],
        block_size: usize,
        span: &CheckpointSpan,
    ) -> PrefixMatch {
        let mut resume = 0;
        let mut matched = 0;
        let visit = |node: &'g Node, blocks: usize| {
            matched += blocks * block_size;
            if matched == positions.len() {
                return;
            }
            let found = match blocks < node.edge.block_count() {
                true => span.is_at(&node.edge, blocks),
                // SAFETY: the caller keeps everything reachable alive for 'g.
                false => unsafe { node.checkpoint(span) }.is_some(),
            };
            resume = if found { matched } else { resume };
        };
        // SAFETY: the caller keeps everything reachable alive for 'g.
        let cached = unsafe { self.walk(root_hash, positions, block_size, visit) };
        PrefixMatch { cached, resume }
    }

    /// As [`Node::walk`], for a caller that has the hashes of the blocks and trusts them. Returns
    /// the number of blocks matched.
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

    /// The child that begins with `begun`, and if there are several, the one that was used last.
    /// Looks at a bounded number of children.
    ///
    /// # Safety
    ///
    /// As for [`Node::child`].
    pub(crate) unsafe fn last_used_child<'g>(&'g self, begun: &[u32]) -> Option<&'g Node> {
        let table = ptr::NonNull::new(self.children())?;
        // SAFETY: loaded from a reachable node, so alive for 'g by this function's contract.
        let table: &'g ChildTable = unsafe { table.as_ref() };
        table.witness.look();
        let mut found: Option<&'g Node> = None;
        for (_, child) in table.children_in(TreeReader::CONTINUATIONS) {
            // SAFETY: loaded from a slot of a live table, so alive for 'g as well.
            let child: &'g Node = unsafe { child.as_ref() };
            child.witness.look();
            let is_later = |found: &Node| child.shown.get().2 > found.shown.get().2;
            let positions = child.edge.positions();
            let is_text = positions.first().is_some_and(|&at| !crate::token_span::is_span(at));
            if is_text && positions.starts_with(begun) && found.is_none_or(is_later) {
                found = Some(child);
            }
        }
        found
    }

    /// Calls `visit` with each current child, in no particular order.
    ///
    /// # Safety
    ///
    /// As for [`Node::child`].
    pub(crate) unsafe fn each_child<'g>(&'g self, mut visit: impl FnMut(&'g Node)) {
        let Some(table) = ptr::NonNull::new(self.children()) else { return };
        // SAFETY: loaded from a reachable node, so alive for 'g by this function's contract.
        let table: &'g ChildTable = unsafe { table.as_ref() };
        table.witness.look();
        for (_, child) in table.children() {
            // SAFETY: loaded from a slot of a live table, so alive for 'g as well.
            let child: &'g Node = unsafe { child.as_ref() };
            child.witness.look();
            visit(child);
        }
    }
}
