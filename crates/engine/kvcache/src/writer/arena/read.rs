//! Read access of the writer to the nodes of the tree.
#![allow(unsafe_code, reason = "follows the raw pointers of live nodes")]

use super::super::bytes_of;
use super::{Arena, Entry};
use crate::checkpoint::CheckpointSpan;
use crate::core::Core;
use crate::node::edge::Edge;
use crate::node::table::ChildTable;
use crate::node::{Node, NodeId};
use crate::{Namespace, PrefixMatch};
use std::ptr::NonNull;

impl Arena {
    pub(super) fn node(&self, id: NodeId) -> &Node {
        let node = self.entries[id.index()].node.expect("the number of a live node");
        // SAFETY: entries refer to live nodes, because a node's entry is cleared before the node is
        // retired, which requires `&mut self`. The roots are part of `core`.
        unsafe { node.as_ref() }
    }

    pub(super) fn table(&self, id: NodeId) -> Option<&ChildTable> {
        let table = NonNull::new(self.node(id).children())?;
        // SAFETY: the table of a live node is retired only through `&mut self`.
        Some(unsafe { table.as_ref() })
    }

    pub(crate) fn is_live(&self, id: NodeId) -> bool {
        self.entries.get(id.index()).is_some_and(|entry| entry.node.is_some())
    }

    pub(crate) fn edge(&self, id: NodeId) -> &Edge {
        &self.node(id).edge
    }

    pub(crate) fn parent(&self, id: NodeId) -> NodeId {
        self.entries[id.index()].parent
    }

    pub(crate) fn child_count(&self, id: NodeId) -> usize {
        self.entries[id.index()].children as usize
    }

    /// Whether the node is the base root, the directory, or the root of a namespace.
    pub(crate) fn is_root(&self, id: NodeId) -> bool {
        id.0 < 2 || self.parent(id) == Core::DIRECTORY
    }

    /// The child of a node that has exactly one.
    pub(crate) fn only_child(&self, id: NodeId) -> Option<NodeId> {
        (self.child_count(id) == 1).then(|| self.children(id).first().copied())?
    }

    pub(crate) fn children(&self, id: NodeId) -> Vec<NodeId> {
        let Some(table) = self.table(id) else { return Vec::new() };
        table
            .children()
            .map(|(_, node)| {
                // SAFETY: the slots of a live node's table refer to live nodes.
                unsafe { node.as_ref() }.id
            })
            .collect()
    }

    /// The number of nodes that [`Arena::ids`] returns.
    pub(crate) fn node_count(&self) -> usize {
        self.node_count
    }

    /// All live nodes except the base root and the directory.
    pub(crate) fn ids(&self) -> impl Iterator<Item = NodeId> + '_ {
        let entries = self.entries.iter().enumerate().skip(2);
        entries.filter(|(_, entry)| entry.node.is_some()).map(|(index, _)| NodeId(index as u32))
    }

    /// The largest number ever used, plus 1.
    pub(crate) fn id_limit(&self) -> usize {
        self.entries.len()
    }

    /// The root of `namespace`, if anything is cached in it.
    pub(crate) fn root(&self, namespace: &Namespace) -> Option<NodeId> {
        // SAFETY: only the writer retires nodes, and it is borrowed here.
        unsafe { self.core.root(namespace) }.map(|node| node.id)
    }

    /// As [`Node::walk`] from the root `root`, but passes the nodes' numbers to `visit`.
    pub(crate) fn walk(
        &self,
        root: NodeId,
        root_hash: u64,
        positions: &[u32],
        mut visit: impl FnMut(NodeId, usize),
    ) -> usize {
        let node = self.node(root);
        let visit = |node: &Node, blocks| visit(node.id, blocks);
        // SAFETY: only the writer retires nodes, and it is borrowed here.
        unsafe { node.walk(root_hash, positions, self.core.block_size, visit) }
    }

    /// The checkpoint directly below a node.
    pub(crate) fn checkpoint(&self, id: NodeId, span: &CheckpointSpan) -> Option<NodeId> {
        // SAFETY: only the writer retires nodes, and it is borrowed here.
        unsafe { self.node(id).checkpoint(span) }.map(|node| node.id)
    }

    /// As [`Node::walk_checkpoints`] from the root `root`.
    pub(crate) fn walk_checkpoints(
        &self,
        root: NodeId,
        root_hash: u64,
        positions: &[u32],
        span: &CheckpointSpan,
    ) -> PrefixMatch {
        let node = self.node(root);
        // SAFETY: only the writer retires nodes, and it is borrowed here.
        unsafe { node.walk_checkpoints(root_hash, positions, self.core.block_size, span) }
    }

    /// The namespace of the root `id`, which is not the directory.
    pub(crate) fn namespace_of(&self, id: NodeId) -> Namespace {
        Namespace::from_words(self.edge(id).positions())
    }

    /// Heap memory of the live nodes, their tables and the arena itself, in bytes.
    pub(crate) fn heap_bytes(&self) -> usize {
        let nodes = (0..self.entries.len() as u32).map(NodeId).filter(|&id| self.is_live(id));
        let each = nodes.map(|id| {
            let table =
                self.table(id).map_or(0, |table| size_of::<ChildTable>() + table.heap_bytes());
            size_of::<Node>() + self.edge(id).heap_bytes() + table
        });
        each.sum::<usize>()
            + bytes_of::<Entry>(self.entries.capacity())
            + bytes_of::<NodeId>(self.free.capacity())
    }

    /// Copies the writer's counters of a node to where dumps read them.
    pub(crate) fn show(&self, id: NodeId, locks: u32, hits: u32, last_use: u64) {
        self.node(id).shown.set(locks, hits, last_use);
    }

    /// Loads the memory that the removal of the leaf `id` will access. The loads of several leaves
    /// do not depend on each other, so their cache misses overlap. The result has no meaning.
    pub(crate) fn prefetch(&self, id: NodeId) -> u64 {
        let edge = self.edge(id);
        let (key, last) = (edge.first_hash(), edge.blocks().next_back());
        let near = self.table(self.parent(id)).map_or(0, |table| table.key_near(key));
        let below = self.node(id).children().addr() as u64;
        near ^ below ^ last.map_or(0, |block| u64::from(block.0))
    }

    /// Number of unlinked nodes and tables that are not freed yet.
    pub(crate) fn retired_count(&self) -> usize {
        self.garbage.len()
    }
}
