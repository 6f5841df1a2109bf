//! The part of the tree that readers and the writer share: the two roots, the version and the
//! epochs. It is freed when the last handle is dropped.
#![allow(unsafe_code, reason = "reads under a guard; frees the tree with its last handle")]

use crate::checkpoint::CheckpointSpan;
use crate::node::edge::Edge;
use crate::node::table::ChildTable;
use crate::node::{Node, NodeId};
use crate::reclaim::{Epochs, Unlinked};
use crate::sync::{AtomicU64, Mutex, Ordering, lock};
use crate::{CachedPrefix, Namespace, NodeDump, PrefixMatch, TreeDump};
use std::ptr;

/// The shared part of one tree.
#[derive(Debug)]
pub(crate) struct Core {
    /// Root of the base namespace. It always exists, so its queries need no look-up.
    pub(crate) base: Node,
    /// Its children are the roots of all other namespaces; their edges are the namespaces'
    /// digests.
    pub(crate) directory: Node,
    /// Number of published changes. Increased with Release after each change and loaded with
    /// Acquire, so a reader of a number sees the changes up to it.
    pub(crate) version: AtomicU64,
    /// The epochs in which queries pin.
    pub(crate) epochs: Epochs,
    /// Nodes and tables that the writer had unlinked but not freed when it was dropped.
    pub(crate) left_over: Mutex<Vec<Unlinked>>,
    pub(crate) block_size: usize,
    /// The hash before the first block of the base namespace.
    pub(crate) seed: u64,
    /// `None` in a tree without checkpoints.
    pub(crate) checkpoint: Option<CheckpointSpan>,
}

impl Core {
    /// The node number of `base`.
    pub(crate) const BASE: NodeId = NodeId(0);
    /// The node number of `directory`.
    pub(crate) const DIRECTORY: NodeId = NodeId(1);

    pub(crate) fn new(block_size: usize, seed: u64, checkpoint: Option<CheckpointSpan>) -> Core {
        Core {
            base: Node::new(Edge::default(), Self::BASE, ptr::null_mut()),
            directory: Node::new(Edge::default(), Self::DIRECTORY, ptr::null_mut()),
            version: AtomicU64::new(0),
            epochs: Epochs::new(),
            left_over: Mutex::new(Vec::new()),
            block_size,
            seed,
            checkpoint,
        }
    }

    /// The root of `namespace`, if anything is cached in it.
    ///
    /// # Safety
    ///
    /// As for [`Node::child`].
    #[inline(always)]
    pub(crate) unsafe fn root<'g>(&'g self, namespace: &Namespace) -> Option<&'g Node> {
        if namespace.is_base() {
            return Some(&self.base);
        }
        let words = namespace.words();
        let key = namespace.root_hash(self.seed);
        let same = |edge: &Edge| usize::from(edge.positions() == words);
        // SAFETY: the caller keeps every reachable node alive for 'g.
        unsafe { self.directory.child(key, same) }.map(|(root, _)| root)
    }

    /// How many of the first `positions` are cached in `namespace`: whole blocks that do not end
    /// inside an atomic token span.
    #[inline]
    pub(crate) fn match_len(&self, namespace: &Namespace, positions: &[u32]) -> usize {
        let guard = self.epochs.pin();
        // SAFETY: the guard keeps everything alive that is reachable from now on.
        let Some(root) = (unsafe { self.root(namespace) }) else { return 0 };
        let root_hash = namespace.root_hash(self.seed);
        // SAFETY: the guard keeps every reachable node alive to the end of this function.
        let raw = unsafe { root.walk(root_hash, positions, self.block_size, |_, _| ()) };
        drop(guard);
        crate::token_span::whole_spans(positions, raw, self.block_size)
    }
}

impl Core {
    /// How many of the first `positions` are cached in `namespace`, and the length of the longest
    /// prefix of them, shorter than `positions`, that has a checkpoint.
    pub(crate) fn resume(&self, namespace: &Namespace, positions: &[u32]) -> PrefixMatch {
        let Some(span) = &self.checkpoint else {
            let cached = self.match_len(namespace, positions);
            return PrefixMatch { cached, resume: cached };
        };
        let guard = self.epochs.pin();
        // SAFETY: the guard keeps everything alive that is reachable from now on.
        let Some(root) = (unsafe { self.root(namespace) }) else { return PrefixMatch::default() };
        let root_hash = namespace.root_hash(self.seed);
        // SAFETY: the guard keeps every reachable node alive to the end of this function.
        let found = unsafe { root.walk_checkpoints(root_hash, positions, self.block_size, span) };
        drop(guard);
        let cached = crate::token_span::whole_spans(positions, found.cached, self.block_size);
        PrefixMatch { cached, ..found }
    }
}

impl Core {
    /// See [`TreeReader::continuation`](crate::TreeReader::continuation).
    pub(crate) fn continuation(
        &self,
        namespace: &Namespace,
        positions: &[u32],
        limit: usize,
    ) -> Vec<u32> {
        let _guard = self.epochs.pin();
        // SAFETY: the guard keeps everything alive that is reachable from now on.
        let Some(root) = (unsafe { self.root(namespace) }) else { return Vec::new() };
        let root_hash = namespace.root_hash(self.seed);
        let mut last = (root, root.edge.block_count());
        let visit = |node, blocks| last = (node, blocks);
        // SAFETY: the guard keeps every reachable node alive to the end of this function.
        let matched = unsafe { root.walk(root_hash, positions, self.block_size, visit) };
        let (mut node, blocks) = last;
        let mut begun = &positions[matched..];
        let mut continuation = Vec::new();
        if blocks < node.edge.block_count() {
            let rest = &node.edge.positions()[blocks * self.block_size..];
            let Some(rest) = rest.strip_prefix(begun) else { return continuation };
            continuation.extend_from_slice(&rest[..rest.len().min(limit)]);
            begun = &[];
        }
        while continuation.len() < limit {
            // SAFETY: the guard keeps every reachable node alive to the end of this function.
            let Some(next) = (unsafe { node.last_used_child(begun) }) else { break };
            let rest = &next.edge.positions()[begun.len()..];
            continuation.extend_from_slice(&rest[..rest.len().min(limit - continuation.len())]);
            (node, begun) = (next, &[]);
        }
        let text = continuation.iter().take_while(|&&at| !crate::token_span::is_span(at)).count();
        continuation.truncate(text);
        continuation
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        for unlinked in std::mem::take(&mut *lock(&self.left_over)) {
            // SAFETY: this is the last handle, so no other thread can reach the tree or what was
            // unlinked from it.
            unsafe { unlinked.free() };
        }
        let mut tables: Vec<*mut ChildTable> =
            vec![self.base.children(), self.directory.children()];
        while let Some(table) = tables.pop() {
            if table.is_null() {
                continue;
            }
            // SAFETY: this is the last handle, so no other thread can reach the tree, and each
            // live table belongs to exactly one live node.
            let table = unsafe { Box::from_raw(table) };
            for (_, node) in table.children() {
                // SAFETY: as above, and each live node is in exactly one slot of a live table.
                let node = unsafe { Box::from_raw(node.as_ptr()) };
                tables.push(node.children());
            }
        }
    }
}

impl Core {
    /// Counts one published change.
    pub(crate) fn count_change(&self) {
        self.version.fetch_add(1, Ordering::Release);
    }

    /// As [`Core::match_len`], for all of `prompts` under one guard.
    pub(crate) fn match_lens(
        &self,
        namespace: &Namespace,
        prompts: &[&[u32]],
        out: &mut Vec<usize>,
    ) {
        let _guard = self.epochs.pin();
        // SAFETY: the guard keeps every reachable node alive to the end of this function.
        let root = unsafe { self.root(namespace) };
        let root_hash = namespace.root_hash(self.seed);
        out.extend(prompts.iter().map(|positions| {
            let Some(root) = root else { return 0 };
            // SAFETY: the guard keeps every reachable node alive to the end of this function.
            let raw = unsafe { root.walk(root_hash, positions, self.block_size, |_, _| ()) };
            crate::token_span::whole_spans(positions, raw, self.block_size)
        }));
    }

    /// How many of the first blocks with these chained hashes are cached.
    #[inline]
    pub(crate) fn match_hashes(&self, namespace: &Namespace, hashes: &[u64]) -> usize {
        let _guard = self.epochs.pin();
        // SAFETY: the guard keeps every reachable node alive to the end of this function.
        let Some(root) = (unsafe { self.root(namespace) }) else { return 0 };
        // SAFETY: the guard keeps every reachable node alive to the end of this function.
        unsafe { root.walk_hashes(hashes) }
    }

    /// Describes all nodes.
    pub(crate) fn dump(&self) -> TreeDump {
        let _guard = self.epochs.pin();
        let version = self.version.load(Ordering::Acquire);
        let mut dump = TreeDump { version, nodes: Vec::new() };
        let mut pending: Vec<(&Node, Option<usize>, Namespace)> = Vec::new();
        // SAFETY: the guard keeps every reachable node alive to the end of this function.
        unsafe { self.each_first(|node, namespace| pending.push((node, None, namespace))) };
        while let Some((node, parent, namespace)) = pending.pop() {
            let hashes = node.edge.kv_hashes();
            if let (Some(parent), []) = (parent, hashes) {
                dump.nodes[parent].checkpoint = true;
                continue;
            }
            let index = dump.nodes.len();
            // SAFETY: the guard keeps every reachable node alive to the end of this function.
            unsafe { node.each_child(|child| pending.push((child, Some(index), namespace))) };
            let positions = &node.edge.positions()[..hashes.len() * self.block_size];
            let (locks, hits, last_use) = node.shown.get();
            dump.nodes.push(NodeDump {
                parent,
                namespace,
                last_hash: hashes.last().copied().unwrap_or_default(),
                block_count: hashes.len(),
                position_count: positions.len(),
                first_positions: NodeDump::first_of(positions),
                checkpoint: hashes.len() < node.edge.block_count(),
                locks,
                hits,
                last_use,
            });
        }
        dump
    }

    /// Finds the block with this chained hash and returns all positions up to its end.
    pub(crate) fn cached_prefix(&self, hash: u64) -> Option<CachedPrefix> {
        let _guard = self.epochs.pin();
        // Each node with the index of its parent in this list.
        let mut nodes: Vec<(&Node, Option<usize>, Namespace)> = Vec::new();
        // SAFETY: the guard keeps every reachable node alive to the end of this function.
        unsafe { self.each_first(|node, namespace| nodes.push((node, None, namespace))) };
        let mut index = 0;
        while let Some(&(node, _, namespace)) = nodes.get(index) {
            let hashes = node.edge.hashes();
            if let Some(block) = hashes.iter().position(|&other| other == hash) {
                let own = &node.edge.positions()[..(block + 1) * self.block_size];
                let mut parts = vec![own];
                let mut above = nodes[index].1;
                while let Some(parent) = above {
                    parts.push(nodes[parent].0.edge.positions());
                    above = nodes[parent].1;
                }
                parts.reverse();
                return Some(CachedPrefix { namespace, positions: parts.concat() });
            }
            // SAFETY: the guard keeps every reachable node alive to the end of this function.
            unsafe { node.each_child(|child| nodes.push((child, Some(index), namespace))) };
            index += 1;
        }
        None
    }

    /// Visits the nodes that start at position 0, with their namespaces.
    ///
    /// # Safety
    ///
    /// The caller holds a guard for as long as it uses the nodes.
    unsafe fn each_first<'g>(&'g self, mut visit: impl FnMut(&'g Node, Namespace)) {
        // SAFETY: the caller holds a guard, which keeps every reachable node alive.
        unsafe { self.base.each_child(|node| visit(node, Namespace::default())) };
        let each_root = |root: &'g Node| {
            let namespace = Namespace::from_words(root.edge.positions());
            // SAFETY: the caller holds a guard, which keeps every reachable node alive.
            unsafe { root.each_child(|node| visit(node, namespace)) };
        };
        // SAFETY: the caller holds a guard, which keeps every reachable node alive.
        unsafe { self.directory.each_child(each_root) };
    }
}
