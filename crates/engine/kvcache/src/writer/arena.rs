//! The live nodes and their parents, and every change that readers can see. Each method of this
//! file that changes the tree publishes with one store, and then retires what the store has
//! unlinked. The methods of `read.rs` change nothing.
//!
//! The arena knows nothing about locks, recency or the ownership of blocks.
#![allow(unsafe_code, reason = "follows and retires the raw pointers of live nodes")]

mod read;

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

    /// Frees unlinked nodes and tables that no reader can reach any longer.
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
        // call, and no entry refers to it any longer, so it is added once and not accessed again.
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
