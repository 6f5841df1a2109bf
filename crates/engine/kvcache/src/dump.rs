//! A description of the whole tree, for debugging and for pages that display it. A reader takes
//! it while the writer continues, so each node is described as it was at some instant of the walk.

use crate::{Namespace, PositionRun, TokenSpan};
use std::fmt::Write;

/// The nodes of a tree, in an order in which parents come before their children. Returned by
/// [`TreeReader::dump`](crate::TreeReader::dump).
#[derive(Clone, Debug, Default)]
pub struct TreeDump {
    /// The tree's version when the walk began; see
    /// [`TreeReader::tree_version`](crate::TreeReader::tree_version).
    pub version: u64,
    /// The nodes.
    pub nodes: Vec<NodeDump>,
}

/// One node of a [`TreeDump`]: a run of blocks without a branch.
#[derive(Clone, Debug)]
pub struct NodeDump {
    /// Index of the parent in [`TreeDump::nodes`]; `None` if the node starts at position 0.
    pub parent: Option<usize>,
    /// The namespace that the node belongs to.
    pub namespace: Namespace,
    /// The chained hash of the node's last block, as
    /// [`TreeReader::block_hashes`](crate::TreeReader::block_hashes) computes it.
    /// [`TreeReader::cached_prefix`](crate::TreeReader::cached_prefix) returns the prefix that it
    /// stands for.
    pub last_hash: u64,
    /// Number of blocks in the node.
    pub block_count: usize,
    /// Number of positions in the node: `block_count` times the block size.
    pub position_count: usize,
    /// The first positions of the node: at most eight, and the rest of an image if the eighth is
    /// inside one. [`TokenSpan::runs`] divides them.
    pub first_positions: Vec<u32>,
    /// Whether there is a checkpoint of the recurrent state after the node's last position. Its
    /// blocks are not counted in `block_count`.
    pub checkpoint: bool,
    /// Number of leases and pins that end in this node or below it.
    pub locks: u32,
    /// Number of acquires whose match went through the node.
    pub hits: u32,
    /// Tick of the last acquire or commit whose match went through the node.
    pub last_use: u64,
}

impl NodeDump {
    /// The positions of a node that a dump contains; see [`NodeDump::first_positions`].
    pub(crate) fn first_of(positions: &[u32]) -> Vec<u32> {
        let shown = positions.len().min(8);
        let is_cut = |&end: &usize| end > 0 && !TokenSpan::may_end_after(positions[end - 1]);
        let end = (shown..positions.len()).find(|end| !is_cut(end)).unwrap_or(positions.len());
        positions[..end].to_vec()
    }
}

/// A cached prefix, from position 0 to the end of one block. Returned by
/// [`TreeReader::cached_prefix`](crate::TreeReader::cached_prefix).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CachedPrefix {
    /// The namespace of the prefix.
    pub namespace: Namespace,
    /// All positions up to the end of the block.
    pub positions: Vec<u32>,
}

impl TreeDump {
    /// The tree in the DOT language of Graphviz, for `dot -Tsvg`. Locked nodes are filled.
    pub fn to_graphviz(&self) -> String {
        let mut out =
            String::from("digraph prefix_tree {\n  node [shape=box];\n  root [label=\"\"];\n");
        for (index, node) in self.nodes.iter().enumerate() {
            let first = TokenSpan::runs(&node.first_positions).map(|run| match run {
                PositionRun::Tokens(tokens) => {
                    tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
                }
                span => span.label().unwrap_or_default(),
            });
            let first: Vec<_> = first.collect();
            let style = if node.locks > 0 { ", style=filled" } else { "" };
            // Writing to a string cannot fail.
            let _ = writeln!(
                out,
                "  n{index} [label=\"{} ..\\n{} blocks, {} locks\\n{} hits, last {}\"{style}];",
                first.join(" "),
                node.block_count,
                node.locks,
                node.hits,
                node.last_use,
            );
            let from = node.parent.map_or("root".to_owned(), |parent| format!("n{parent}"));
            let label = match (node.parent, node.namespace.is_base()) {
                (None, false) => format!(" [label=\"{:?}\"]", node.namespace),
                _ => String::new(),
            };
            let _ = writeln!(out, "  {from} -> n{index}{label};");
        }
        out.push_str("}\n");
        out
    }
}
