//! `GET /v1/cache/tree`: the prefix tree.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stolon::{CacheStats, NodeDump, PositionRun, RegionToken, TokenSpan};

/// The query of `GET /v1/cache/tree`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
pub struct TreeQuery {
    /// How to show the tree. Default `json`.
    #[serde(default)]
    pub format: TreeFormat,
    /// Whether to show the first tokens of each node, which are parts of prompts. Default false.
    #[serde(default)]
    pub tokens: bool,
}

/// How to show the prefix tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TreeFormat {
    /// Statistics and a list of nodes.
    #[default]
    Json,
    /// A graph in Graphviz's DOT language.
    Dot,
}

/// `GET /v1/cache/tree` as JSON: the prefix tree.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Tree {
    /// Version of the tree; it grows with each change.
    pub version: u64,
    /// Statistics of the prefix cache.
    #[schemars(schema_with = "super::super::schemas::counters::<CacheStats>")]
    pub stats: CacheStats,
    /// The nodes; parents come before their children.
    pub nodes: Vec<TreeNode>,
}

/// A node of the prefix tree: a run of tokens that some prompts have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TreeNode {
    /// Index of the parent in the list of nodes; `null` for a node at the root.
    pub parent: Option<usize>,
    /// Hash of the cache salt, which itself is not shown.
    pub namespace: String,
    /// KV blocks of the node.
    pub blocks: usize,
    /// Tokens of the node.
    pub tokens: usize,
    /// The node's first tokens and images, at most eight, if they were requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_tokens: Option<Vec<FirstToken>>,
    /// Whether a request can resume after the node's last token, for a model with a recurrent state.
    /// Left out if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub checkpoint: bool,
    /// Running requests and pins that hold the node or one below it. Such a node is not evicted.
    pub locks: u32,
    /// Requests that matched the node.
    pub hits: u32,
    /// When the node was last used, in changes of the cache since its start.
    pub last_use: u64,
}

impl TreeNode {
    /// Describes a node, with its first tokens if `tokens` is true.
    pub(crate) fn new(node: &NodeDump, tokens: bool) -> Self {
        Self {
            parent: node.parent,
            namespace: format!("{:?}", node.namespace),
            blocks: node.block_count,
            tokens: node.position_count,
            first_tokens: tokens.then(|| FirstToken::of(&node.first_positions)),
            checkpoint: node.checkpoint,
            locks: node.locks,
            hits: node.hits,
            last_use: node.last_use,
        }
    }
}

/// A token at the beginning of a node, or a span that is not text, such as an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum FirstToken {
    /// A token id.
    Id(u32),
    /// An image.
    Span {
        /// The string that is shown instead of a text, such as `[image, 64 positions]`.
        span: String,
        /// How many tokens of the node it is.
        positions: usize,
    },
}

impl FirstToken {
    /// The tokens and spans of a list of positions.
    pub(crate) fn of(positions: &[u32]) -> Vec<Self> {
        let mut shown = Vec::new();
        for run in TokenSpan::runs(positions) {
            let positions = match run {
                PositionRun::Tokens(tokens) => {
                    shown.extend(tokens.iter().map(|token| Self::Id(*token)));
                    continue;
                }
                PositionRun::Image { positions } => positions,
                PositionRun::Value(_) => 1,
            };
            shown.push(Self::Span { span: span_label(&run), positions });
        }
        shown
    }
}

/// The text that shows a span, such as `[image, 64 positions]` or `[coordinate 5]`.
pub(crate) fn span_label(span: &PositionRun<'_>) -> String {
    match *span {
        PositionRun::Value(token) => RegionToken::of(token).map(|region| region.to_string()),
        _ => span.label(),
    }
    .unwrap_or_default()
}

impl fmt::Display for FirstToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => write!(f, "{id}"),
            Self::Span { span, .. } => f.write_str(span),
        }
    }
}
