//! The live nodes and their parents, and every change that readers can see. Each method that
//! changes the tree publishes with one store, and then retires what the store has unlinked.
//!
//! The arena knows nothing about locks, recency or the ownership of blocks.
#![allow(unsafe_code, reason = "follows and retires the raw pointers of live nodes")]

use crate::Namespace;
use crate::core::Core;
use crate::node::edge::Edge;
use crate::node::table::{ChildTable, SMALL_MAX};
use crate::node::{Node, NodeId};
use crate::reclaim::Garbage;
#[cfg(loom)]
use crate::sync::planted;
use crate::sync::{Arc, lock};
use std::ptr::{self, NonNull};

/// All live nodes of one tree, by number. The writer owns it.
#[derive(Debug)]
pub(crate) struct Arena {
    pub(crate) core: Arc<Core>,
    entries: Vec<Entry>,
    /// Numbers that are not in use.
    free: Vec<NodeId>,
    /// Number of live nodes, not counting the base root and the directory.
    node_count: usize,
    garbage: Garbage,
}

#[derive(Debug)]
struct Entry {
    /// The node that the number refers to. `None` while the number is unused, or belongs to a
    /// record without a node.
    node: Option<NonNull<Node>>,
    parent: NodeId,
    /// Number of children in the node's table.
    children: u32,
}

// SAFETY: the pointers refer to nodes that the arena owns together with `core`. Nodes are `Send`
// and `Sync`, and no method returns a pointer.
unsafe impl Send for Arena {}

impl Arena {
    pub(crate) fn new(core: Arc<Core>) -> Arena {
        let entries = [&core.base, &core.directory].map(|root| Entry {
            node: Some(NonNull::from(root)),
            parent: NodeId::NONE,
            children: 0,
        });
        let garbage = Garbage::new(&core.epochs);
        Arena { core, entries: entries.into(), free: Vec::new(), node_count: 0, garbage }
    }

    // ---- reading ----

    fn node(&self, id: NodeId) -> &Node {
        let node = self.entries[id.index()].node.expect("the number of a live node");
        // SAFETY: entries refer to live nodes, because a node's entry is cleared before the node is
        // retired, which requires `&mut self`. The roots are part of `core`.
        unsafe { node.as_ref() }
    }

    fn table(&self, id: NodeId) -> Option<&ChildTable> {
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
            + self.entries.capacity() * size_of::<Entry>()
            + self.free.capacity() * size_of::<NodeId>()
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

    // ---- changing ----

    /// Frees unlinked nodes and tables that no reader can reach any more.
    pub(crate) fn collect_garbage(&mut self) {
        self.garbage.collect();
    }

    /// Adds a leaf with `edge` under `parent`.
    pub(crate) fn add_leaf(&mut self, parent: NodeId, edge: Edge) -> NodeId {
        let id = self.new_id(parent);
        let key = edge.first_hash();
        let leaf = self.make(id, edge, ptr::null_mut());
        self.add_child(parent, key, leaf);
        self.core.count_change();
        id
    }

    /// Adds the root of a namespace with one leaf below it, in one store. Returns root and leaf.
    pub(crate) fn add_namespace(&mut self, namespace: &Namespace, edge: Edge) -> (NodeId, NodeId) {
        let directory = Core::DIRECTORY;
        let root_hash = namespace.root_hash(self.core.seed);
        let root_id = self.new_id(directory);
        let leaf_id = self.new_id(root_id);
        let leaf_key = edge.first_hash();
        let leaf = self.make(leaf_id, edge, ptr::null_mut());
        let table = Box::into_raw(Box::new(ChildTable::new(&[(leaf_key, leaf)])));
        self.entries[root_id.index()].children = 1;
        let root = self.make(root_id, Edge::namespace(&namespace.words(), root_hash), table);
        self.add_child(directory, root_hash, root);
        self.core.count_change();
        (root_id, leaf_id)
    }

    /// Splits `id` after its first `at` blocks. The rear keeps the number `id` and the children.
    /// The front gets a new number, which is returned, and a second child with the edge `sibling`
    /// if one is given. All of this is published with one store.
    pub(crate) fn split(
        &mut self,
        id: NodeId,
        at: usize,
        sibling: Option<Edge>,
    ) -> (NodeId, Option<NodeId>) {
        let block_size = self.core.block_size;
        let parent = self.parent(id);
        let front_id = self.new_id(parent);
        let old = self.node(id);
        debug_assert!(0 < at && at < old.edge.block_count(), "both parts of a split have blocks");
        let front_edge = old.edge.part(0, at, block_size);
        let rear_edge = old.edge.part(at, old.edge.block_count(), block_size);
        let (key, rear_key) = (front_edge.first_hash(), rear_edge.first_hash());
        let children = old.children();
        #[cfg(loom)]
        let children = match planted::is(planted::Bug::SplitDropsChildren) {
            true => ptr::null_mut(),
            false => children,
        };
        let old = self.entries[id.index()].node.expect("the number of a live node");

        let rear = self.make(id, rear_edge, children);
        self.entries[id.index()].parent = front_id;
        let mut below = vec![(rear_key, rear)];
        let sibling_id = sibling.map(|edge| {
            let sibling_id = self.new_id(front_id);
            let key = edge.first_hash();
            below.push((key, self.make(sibling_id, edge, ptr::null_mut())));
            sibling_id
        });
        let table = Box::into_raw(Box::new(ChildTable::new(&below)));
        self.entries[front_id.index()].children = below.len() as u32;
        let front = self.make(front_id, front_edge, table);
        self.swap_child(parent, key, old.as_ptr(), front);
        self.core.count_change();
        self.retire_node(old);
        (front_id, sibling_id)
    }

    /// Replaces the chain `run` (from the top down, each node the only child of the one before) by
    /// one node with `edge`. The new node has the number and the children of the lowest.
    pub(crate) fn replace_run(&mut self, run: &[NodeId], edge: Edge) {
        let (Some(&top), Some(&bottom)) = (run.first(), run.last()) else { return };
        let parent = self.parent(top);
        let key = edge.first_hash();
        debug_assert_eq!(key, self.edge(top).first_hash(), "the first block stays the same");
        let old: Vec<NonNull<Node>> = run
            .iter()
            .map(|id| self.entries[id.index()].node.expect("the number of a live node"))
            .collect();
        let tables: Vec<_> =
            run[..run.len() - 1].iter().map(|&id| self.node(id).children()).collect();
        let children = self.node(bottom).children();
        let new = self.make(bottom, edge, children);
        self.swap_child(parent, key, old[0].as_ptr(), new);
        self.core.count_change();
        self.entries[bottom.index()].parent = parent;
        for &id in &run[..run.len() - 1] {
            self.release_id(id);
        }
        for node in old {
            self.retire_node(node);
        }
        for table in tables {
            self.retire_table(table);
        }
    }

    /// Removes a node without children from the tree.
    pub(crate) fn remove_leaf(&mut self, id: NodeId) {
        debug_assert_eq!(self.child_count(id), 0, "the node has no children");
        let parent = self.parent(id);
        let node = self.entries[id.index()].node.expect("the number of a live node");
        let key = self.edge(id).first_hash();
        // The node may still have a wide table in which all slots were cleared.
        let table = self.node(id).children();
        self.remove_child(parent, key, node.as_ptr());
        self.core.count_change();
        self.release_id(id);
        self.retire_node(node);
        self.retire_table(table);
    }

    /// Removes everything below `root` from the tree with one store, and retires it. The numbers of
    /// the nodes become free, except those for which `keep` returns true: these stay in use without
    /// a node, and keep their parents as far as these are kept too.
    pub(crate) fn clear_below(&mut self, root: NodeId, keep: impl Fn(NodeId) -> bool) {
        let table = self.node(root).children();
        self.node(root).set_children(ptr::null_mut());
        self.core.count_change();
        self.entries[root.index()].children = 0;
        let mut tables = vec![table];
        while let Some(table) = tables.pop() {
            let Some(live) = NonNull::new(table) else { continue };
            // SAFETY: the table was just unlinked and is not retired yet.
            let nodes: Vec<_> = unsafe { live.as_ref() }.children().map(|(_, n)| n).collect();
            for node in nodes {
                // SAFETY: as above: unlinked and not retired yet.
                let shared = unsafe { node.as_ref() };
                let id = shared.id;
                tables.push(shared.children());
                if keep(id) {
                    let parent = self.parent(id);
                    self.forget_node(id);
                    let entry = &mut self.entries[id.index()];
                    entry.children = 0;
                    if !keep(parent) {
                        entry.parent = NodeId::NONE;
                    }
                } else {
                    self.release_id(id);
                }
                self.retire_node(node);
            }
            self.retire_table(table);
        }
    }

    /// Returns a number without a node, for a record outside the index.
    pub(crate) fn take_id(&mut self, parent: NodeId) -> NodeId {
        self.new_id(parent)
    }

    /// Frees a number.
    pub(crate) fn release_id(&mut self, id: NodeId) {
        self.forget_node(id);
        self.free.push(id);
    }

    // ---- helpers ----

    fn forget_node(&mut self, id: NodeId) {
        self.node_count -= usize::from(self.entries[id.index()].node.take().is_some());
    }

    fn new_id(&mut self, parent: NodeId) -> NodeId {
        let entry = Entry { node: None, parent, children: 0 };
        if let Some(id) = self.free.pop() {
            self.entries[id.index()] = entry;
            return id;
        }
        self.entries.push(entry);
        NodeId((self.entries.len() - 1) as u32)
    }

    /// Builds a node, to which `id` refers from now on. The caller publishes it.
    fn make(&mut self, id: NodeId, edge: Edge, children: *mut ChildTable) -> *mut Node {
        let node = Box::into_raw(Box::new(Node::new(edge, id, children)));
        let former = std::mem::replace(&mut self.entries[id.index()].node, NonNull::new(node));
        self.node_count += usize::from(former.is_none());
        node
    }

    fn swap_child(&mut self, parent: NodeId, key: u64, old: *mut Node, new: *mut Node) {
        if let Some(table) = self.table(parent) {
            table.swap(key, old, new);
        }
    }

    fn add_child(&mut self, parent: NodeId, key: u64, child: *mut Node) {
        match self.table(parent).filter(|table| table.has_room()) {
            Some(table) => table.insert(key, child),
            None => self.rebuild(parent, |all| all.push((key, child))),
        }
        self.entries[parent.index()].children += 1;
    }

    fn remove_child(&mut self, parent: NodeId, key: u64, child: *mut Node) {
        let children = self.child_count(parent) - 1;
        let in_place = self.table(parent).filter(|table| {
            table.is_wide() && children > SMALL_MAX / 2 && children * 16 >= table.capacity()
        });
        match in_place {
            Some(table) => table.swap(key, child, ptr::null_mut()),
            None => self.rebuild(parent, |all| all.retain(|&(_, other)| other != child)),
        }
        self.entries[parent.index()].children = children as u32;
    }

    /// Publishes a new table for `parent`, with its children after `change`.
    fn rebuild(&mut self, parent: NodeId, change: impl FnOnce(&mut Vec<(u64, *mut Node)>)) {
        let old = self.node(parent).children();
        let mut all: Vec<(u64, *mut Node)> = match self.table(parent) {
            Some(table) => table.children().map(|(key, node)| (key, node.as_ptr())).collect(),
            None => Vec::new(),
        };
        change(&mut all);
        let table = match all.is_empty() {
            true => ptr::null_mut(),
            false => Box::into_raw(Box::new(ChildTable::new(&all))),
        };
        self.node(parent).set_children(table);
        self.retire_table(old);
    }

    fn retire_node(&mut self, node: NonNull<Node>) {
        // SAFETY: the node came from a box. The caller has unlinked it with a store before this
        // call, and no entry refers to it any more, so it is added once and not accessed again.
        unsafe { self.garbage.add(node) };
    }

    fn retire_table(&mut self, table: *mut ChildTable) {
        let Some(table) = NonNull::new(table) else { return };
        // SAFETY: the table came from a box. The caller has replaced it by another table, or has
        // unlinked the only live node that had it; only readers with older guards can see retired
        // nodes that still point to it.
        unsafe { self.garbage.add(table) };
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        *lock(&self.core.left_over) = self.garbage.take();
    }
}
