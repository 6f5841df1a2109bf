//! The writer's hold on the live nodes: who is whose parent, and every change that readers can
//! see. Each public method publishes with one store, then retires what the store unlinked.
//!
//! The arena knows nothing of locks, recency or block ownership.
#![allow(unsafe_code, reason = "follows and retires the raw pointers of live nodes")]

use crate::Namespace;
use crate::core::Core;
use crate::node::edge::Edge;
use crate::node::table::{ChildTable, SMALL_MAX};
use crate::node::{Node, NodeId};
use crate::sync::Arc;
#[cfg(loom)]
use crate::sync::planted;
use std::ptr::{self, NonNull};

/// All live nodes of one tree, by number. There is one arena a tree, owned by the writer.
#[derive(Debug)]
pub(crate) struct Arena {
    pub(crate) core: Arc<Core>,
    entries: Vec<Entry>,
    /// Numbers to use again.
    free: Vec<NodeId>,
    /// Numbers that have a node, the base and the directory not counted.
    node_count: usize,
}

#[derive(Debug)]
struct Entry {
    /// The published node; `None` while the number is unused.
    node: Option<NonNull<Node>>,
    parent: NodeId,
    /// Children in the node's table.
    children: u32,
}

// SAFETY: the pointers lead to nodes that the arena owns together with `core`; nodes are `Send`
// and `Sync`, and no method gives a pointer out.
unsafe impl Send for Arena {}

impl Arena {
    pub(crate) fn new(core: Arc<Core>) -> Arena {
        let entries = [&core.base, &core.directory].map(|root| Entry {
            node: Some(NonNull::from(root)),
            parent: NodeId::NONE,
            children: 0,
        });
        Arena { core, entries: entries.into(), free: Vec::new(), node_count: 0 }
    }

    // ---- reading ----

    fn node(&self, id: NodeId) -> &Node {
        let node = self.entries[id.index()].node.expect("the number of a live node");
        // SAFETY: entries hold live nodes: a node's entry is cleared before it is retired, which
        // takes `&mut self`. The roots live in `core`.
        unsafe { node.as_ref() }
    }

    fn table(&self, id: NodeId) -> Option<&ChildTable> {
        let table = NonNull::new(self.node(id).children())?;
        // SAFETY: a live node's table is retired only through `&mut self`.
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

    /// Whether the node is a root: the base, the directory, or a namespace's.
    pub(crate) fn is_root(&self, id: NodeId) -> bool {
        id.0 < 2 || self.parent(id) == Core::DIRECTORY
    }

    /// The only child of a node that has one.
    pub(crate) fn only_child(&self, id: NodeId) -> Option<NodeId> {
        (self.child_count(id) == 1).then(|| self.children(id).first().copied())?
    }

    pub(crate) fn children(&self, id: NodeId) -> Vec<NodeId> {
        let Some(table) = self.table(id) else { return Vec::new() };
        table
            .children()
            .map(|(_, node)| {
                // SAFETY: slots of a live node's table hold live nodes.
                unsafe { node.as_ref() }.id
            })
            .collect()
    }

    /// How many nodes [`Arena::ids`] tells.
    pub(crate) fn node_count(&self) -> usize {
        self.node_count
    }

    /// All live nodes but the base and the directory.
    pub(crate) fn ids(&self) -> impl Iterator<Item = NodeId> + '_ {
        let entries = self.entries.iter().enumerate().skip(2);
        entries.filter(|(_, entry)| entry.node.is_some()).map(|(index, _)| NodeId(index as u32))
    }

    /// One past the largest number in use.
    pub(crate) fn id_limit(&self) -> usize {
        self.entries.len()
    }

    /// The root of `namespace`, if it holds anything.
    pub(crate) fn root(&self, namespace: &Namespace) -> Option<NodeId> {
        // SAFETY: only the writer retires nodes, and it is borrowed here.
        unsafe { self.core.root(namespace) }.map(|node| node.id)
    }

    /// As [`Node::walk`], from the root `root`, giving the nodes' numbers.
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

    /// The namespace whose root `id` is.
    pub(crate) fn namespace_of(&self, id: NodeId) -> Namespace {
        Namespace::from_words(self.edge(id).positions())
    }

    /// Bytes that the live nodes and tables take on the heap, and those of the arena itself.
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

    /// Shows the writer's records of a node to dumps.
    pub(crate) fn show(&self, id: NodeId, locks: u32, hits: u32, last_use: u64) {
        self.node(id).shown.set(locks, hits, last_use);
    }

    /// Loads the memory that taking the leaf `id` out will need, and nothing else. The loads of
    /// several leaves do not depend on each other, so their cache misses overlap.
    pub(crate) fn warm(&self, id: NodeId) -> u64 {
        let edge = self.edge(id);
        let (key, last) = (edge.first_hash(), edge.blocks().next_back());
        let near = self.table(self.parent(id)).map_or(0, |table| table.key_near(key));
        let below = self.node(id).children().addr() as u64;
        near ^ below ^ last.map_or(0, |block| u64::from(block.0))
    }

    // ---- changing ----

    /// Adds a leaf with `edge` under `parent`.
    pub(crate) fn add_leaf(&mut self, parent: NodeId, edge: Edge) -> NodeId {
        let id = self.new_id(parent);
        let key = edge.first_hash();
        let leaf = self.make(id, edge, ptr::null_mut());
        self.add_child(parent, key, leaf);
        self.core.bump();
        id
    }

    /// Adds a namespace root with one leaf under it, in one store. Returns root and leaf.
    pub(crate) fn add_namespace(&mut self, namespace: &Namespace, edge: Edge) -> (NodeId, NodeId) {
        let directory = Core::DIRECTORY;
        let root_hash = namespace.root_hash(self.core.seed);
        let root_id = self.new_id(directory);
        let leaf_id = self.new_id(root_id);
        let leaf_key = edge.first_hash();
        let leaf = self.make(leaf_id, edge, ptr::null_mut());
        let table = Box::into_raw(Box::new(ChildTable::new(&[(leaf_key, leaf)])));
        self.entries[root_id.index()].children = 1;
        let root = self.make(root_id, Edge::namespace(namespace.words(), root_hash), table);
        self.add_child(directory, root_hash, root);
        self.core.bump();
        (root_id, leaf_id)
    }

    /// Cuts `id` after `at` of its blocks. The rear keeps the number `id` and the children; the
    /// front gets a number of its own, which is returned, and `sibling` as a second child if
    /// given. One store for all of it.
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
        debug_assert!(0 < at && at < old.edge.block_count(), "a split leaves two parts");
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
        self.core.bump();
        self.retire_node(old);
        (front_id, sibling_id)
    }

    /// Puts a node with `edge` in the place of the chain `run` (from the top down, each the only
    /// child of the one before), with the number and the children of the lowest.
    pub(crate) fn replace_run(&mut self, run: &[NodeId], edge: Edge) {
        let (Some(&top), Some(&bottom)) = (run.first(), run.last()) else { return };
        let parent = self.parent(top);
        let key = edge.first_hash();
        debug_assert_eq!(key, self.edge(top).first_hash(), "the chain starts as before");
        let old: Vec<NonNull<Node>> = run
            .iter()
            .map(|id| self.entries[id.index()].node.expect("the number of a live node"))
            .collect();
        let tables: Vec<_> =
            run[..run.len() - 1].iter().map(|&id| self.node(id).children()).collect();
        let children = self.node(bottom).children();
        let new = self.make(bottom, edge, children);
        self.swap_child(parent, key, old[0].as_ptr(), new);
        self.core.bump();
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

    /// Takes a childless node out of the tree.
    pub(crate) fn remove_leaf(&mut self, id: NodeId) {
        debug_assert_eq!(self.child_count(id), 0, "leaves go first");
        let parent = self.parent(id);
        let node = self.entries[id.index()].node.expect("the number of a live node");
        let key = self.edge(id).first_hash();
        // A wide table that lost all its children has left a table behind.
        let table = self.node(id).children();
        self.remove_child(parent, key, node.as_ptr());
        self.core.bump();
        self.release_id(id);
        self.retire_node(node);
        self.retire_table(table);
    }

    /// Takes everything below `root` out of the index with one store and retires it all. The
    /// numbers become free, but those that `keep` names: these stay taken, without a node, and
    /// with their parents as far as they are kept too.
    pub(crate) fn clear_below(&mut self, root: NodeId, keep: impl Fn(NodeId) -> bool) {
        let table = self.node(root).children();
        self.node(root).set_children(ptr::null_mut());
        self.core.bump();
        self.entries[root.index()].children = 0;
        let mut tables = vec![table];
        while let Some(table) = tables.pop() {
            let Some(live) = NonNull::new(table) else { continue };
            // SAFETY: just unlinked and not retired yet.
            let nodes: Vec<_> = unsafe { live.as_ref() }.children().map(|(_, n)| n).collect();
            for node in nodes {
                // SAFETY: likewise.
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

    /// Takes a number that has no node, for a record that is in no index.
    pub(crate) fn take_id(&mut self, parent: NodeId) -> NodeId {
        self.new_id(parent)
    }

    /// Gives a number without a node back.
    pub(crate) fn release_id(&mut self, id: NodeId) {
        self.forget_node(id);
        self.free.push(id);
    }

    // ---- inside ----

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

    /// Builds a node and makes it the one that `id` names; it is not published yet.
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

    /// Publishes a fresh table for `parent` with its children as `change` leaves them.
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
        let guard = self.core.reclaimer.pin();
        // SAFETY: callers have unlinked the node with the store before and forgotten its pointer.
        unsafe { self.core.reclaimer.retire(&guard, node.as_ptr()) };
    }

    fn retire_table(&mut self, table: *mut ChildTable) {
        if table.is_null() {
            return;
        }
        let guard = self.core.reclaimer.pin();
        // SAFETY: callers have put another table in its place, or unlinked the only live node
        // that had it; retired nodes that still point to it are seen by older guards only.
        unsafe { self.core.reclaimer.retire(&guard, table) };
    }
}
