//! A picture of the tree, for a page that shows it and for debugging. Taken by a reader, so the
//! writer goes on meanwhile: each node is as it was at some instant during the walk.

use crate::Namespace;
use std::fmt::Write;

/// The nodes of a tree, parents before children.
#[derive(Clone, Debug, Default)]
pub struct TreeDump {
    /// The tree's version when the walk began.
    pub version: u64,
    /// The nodes.
    pub nodes: Vec<NodeDump>,
}

/// One node of a [`TreeDump`].
#[derive(Clone, Debug)]
pub struct NodeDump {
    /// Index of the parent in [`TreeDump::nodes`]; `None` right below a root.
    pub parent: Option<usize>,
    /// The namespace.
    pub namespace: Namespace,
    /// Blocks of the node.
    pub block_count: usize,
    /// Positions of the node: tokens, and what atoms take.
    pub position_count: usize,
    /// The first positions of the node, at most eight.
    pub first_positions: Vec<u32>,
    /// Leases and pins on it or below.
    pub locks: u32,
    /// Acquires that went through it.
    pub hits: u32,
    /// Tick of the writer at its last use.
    pub last_use: u64,
}

impl TreeDump {
    /// The tree in Graphviz's language: `dot -Tsvg`. Locked nodes are drawn filled.
    pub fn to_graphviz(&self) -> String {
        let mut out =
            String::from("digraph prefix_tree {\n  node [shape=box];\n  root [label=\"\"];\n");
        for (index, node) in self.nodes.iter().enumerate() {
            let first = node.first_positions.iter().map(u32::to_string).collect::<Vec<_>>();
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
