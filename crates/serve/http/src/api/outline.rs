//! `/v1/cache/outline` and `/v1/cache/prefix`: a bounded description of the prefix tree for pages
//! that draw it, and the prefix of one of its nodes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Maximum number of nodes of an outline.
pub const MAX_OUTLINE_NODES: usize = 2000;

/// The query of `GET /v1/cache/outline`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OutlineQuery {
    /// Maximum number of nodes, 1 to [`MAX_OUTLINE_NODES`]. Default 300.
    #[serde(default = "default_nodes")]
    pub nodes: usize,
    /// Id of a node: describe only this one and those below it.
    pub under: Option<String>,
    /// Whether to show the first words of each node, which are parts of prompts. Default false.
    #[serde(default)]
    pub tokens: bool,
}

fn default_nodes() -> usize {
    300
}

/// `GET /v1/cache/outline`: the largest nodes of the prefix tree, and the number of the others.
/// Nodes that requests or pins hold come first, then those with the most tokens below.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Outline {
    /// Version of the tree; it grows with each change.
    pub version: u64,
    /// The latest use of any node, in the unit of [`OutlineNode::last_use`].
    pub latest_use: u64,
    /// Nodes of the whole tree.
    pub total_nodes: usize,
    /// Tokens of the whole tree.
    pub total_tokens: usize,
    /// Tokens between the start of the prompt and the node of the query's `under`; 0 without it.
    pub tokens_before: usize,
    /// Nodes at the start of a prompt that are not listed, and those below them.
    pub hidden_nodes: usize,
    /// Tokens of these nodes.
    pub hidden_tokens: usize,
    /// The nodes; parents come before their children.
    pub nodes: Vec<OutlineNode>,
}

/// A node of an [`Outline`]: a run of tokens that some prompts have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct OutlineNode {
    /// Hash of the node's last block, 16 hexadecimal digits, as in `/v1/cache/events`.
    pub id: String,
    /// Index of the parent in the list of nodes; `null` for a node without one in the list.
    pub parent: Option<usize>,
    /// Hash of the cache salt, which itself is not shown; `null` for requests without one.
    pub namespace: Option<String>,
    /// Tokens of the node.
    pub tokens: usize,
    /// Tokens of the node and of all nodes below it, also of those that are not listed.
    pub subtree_tokens: usize,
    /// Running requests and pins that hold the node or one below it. Such a node is not evicted.
    pub locks: u32,
    /// Number of `locks` that are pins.
    pub pinned: u32,
    /// Ids of the pins that end with this node.
    pub pins: Vec<u64>,
    /// Requests that matched the node.
    pub hits: u32,
    /// When the node was last used, in changes of the cache since its start.
    pub last_use: u64,
    /// Nodes below this one that are not listed, while their parents are.
    pub hidden_nodes: usize,
    /// Tokens of these nodes.
    pub hidden_tokens: usize,
    /// The first words of the node, if they were requested: the text of at most eight tokens and
    /// images. An image is shown as `[image, 64 positions]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// The query of `GET /v1/cache/prefix/{id}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PrefixQuery {
    /// Whether to show the token ids and their text, which are parts of prompts. Default false.
    #[serde(default)]
    pub tokens: bool,
    /// Index of the token at which the text begins. Default 0.
    #[serde(default)]
    pub from: usize,
}

/// `GET /v1/cache/prefix/{id}`: a cached prefix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Prefix {
    /// Hash of its last block, 16 hexadecimal digits.
    pub id: String,
    /// Hash of the cache salt, which itself is not shown; `null` for requests without one.
    pub namespace: Option<String>,
    /// Tokens of the prefix.
    pub tokens: usize,
    /// All token ids of the prefix, if they were requested. Positions of images are numbers from
    /// 2^31 on, which have a meaning in this process only, and whose KV cannot be computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// The text from the token `from` on, of at most 4,096 tokens, if token ids were requested. An
    /// image is shown as `[image, 64 positions]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}
