//! Handlers of `/v1/cache/outline` and `/v1/cache/prefix/{id}`.
//!
//! A tree can have as many nodes as the KV pool has blocks, too many for a page to draw. An outline
//! chooses the most important ones and counts the rest, so that its size is bounded.

use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use futures::FutureExt;
use serde_json::json;
use stolon::{Engine, Namespace, PositionRun, TokenSpan, TreeDump};

use crate::api::cache::span_label;
use crate::api::outline::{
    MAX_OUTLINE_NODES, Outline, OutlineNode, OutlineQuery, Prefix, PrefixQuery,
};
use crate::handlers::app::App;
use crate::wire::error::ApiError;
use crate::wire::parts::{PathId, Query};

/// Maximum number of tokens of a prefix that are shown as text.
const MAX_TEXT_TOKENS: usize = 4096;

/// `GET /v1/cache/outline`: the largest nodes of the prefix tree.
pub(crate) async fn outline(
    State(app): State<Arc<App>>,
    Query(query): Query<OutlineQuery>,
) -> Result<Json<Outline>, ApiError> {
    if !(1..=MAX_OUTLINE_NODES).contains(&query.nodes) {
        let expected = format!("1 to {MAX_OUTLINE_NODES}");
        return Err(ApiError::expected("nodes", &expected, &json!(query.nodes)));
    }
    let under = query.under.as_deref().map(|id| parse_id("under", id)).transpose()?;
    let mut pins = PinsByHash::new();
    for pin in app.engine.cache().pins().await? {
        pins.entry(pin.last_hash).or_default().push(pin.id.0);
    }
    let engine = app.engine.clone();
    let dump =
        app.dumps.run(|| async move { Ok(Arc::new(engine.cache().dump()?)) }.boxed()).await?;
    let engine = app.engine.clone();
    let work = dump.nodes.len() + 8 * query.nodes;
    let outline = app.parser.run(None, work, move || {
        let root = match under {
            Some(hash) => Some(dump.nodes.iter().position(|node| node.last_hash == hash)?),
            None => None,
        };
        let text = query.tokens.then_some(&engine);
        Some(Selection::new(&dump, &pins, root, query.nodes).describe(text))
    });
    let missing = || absent(query.under.as_deref().unwrap_or_default());
    Ok(Json(outline.await?.ok_or_else(missing)?))
}

/// `GET /v1/cache/prefix/{id}`: the prefix that ends with a node of the tree.
pub(crate) async fn prefix(
    State(app): State<Arc<App>>,
    PathId(id): PathId<String>,
    Query(query): Query<PrefixQuery>,
) -> Result<Json<Prefix>, ApiError> {
    let hash = parse_id("id", &id)?;
    let blocks = app.engine.stats().blocks_cached;
    let engine = app.engine.clone();
    let found = app.parser.run(None, blocks + MAX_TEXT_TOKENS, move || {
        let Some(found) = engine.cache().cached_prefix(hash)? else { return Ok(None) };
        let tokens = found.positions.len();
        let from = query.from.min(tokens);
        let shown = &found.positions[from..tokens.min(from.saturating_add(MAX_TEXT_TOKENS))];
        let text = query.tokens.then(|| shown_text(&engine, shown));
        let token_ids = query.tokens.then_some(found.positions);
        let namespace = shown_namespace(&found.namespace);
        Ok(Some(Prefix { id: hex(hash), namespace, tokens, token_ids, text }))
    });
    let found: Result<_, stolon::Error> = found.await?;
    found?.map(Json).ok_or_else(|| absent(&id))
}

/// The text of positions, in which images are shown as `[image, 64 positions]`.
pub(crate) fn shown_text(engine: &Engine, positions: &[u32]) -> String {
    let shown = TokenSpan::runs(positions).map(|run| match run {
        PositionRun::Tokens(tokens) => engine.detokenize(tokens, false).unwrap_or_default(),
        span => span_label(&span),
    });
    shown.collect()
}

fn absent(id: &str) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, format!("no prefix that ends with block {id} is cached"))
}

fn parse_id(param: &str, id: &str) -> Result<u64, ApiError> {
    let digits = id.len() == 16 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    match u64::from_str_radix(id, 16) {
        Ok(hash) if digits => Ok(hash),
        _ => Err(ApiError::expected(param, "16 hexadecimal digits", &json!(id))),
    }
}

fn hex(hash: u64) -> String {
    format!("{hash:016x}")
}

fn shown_namespace(namespace: &Namespace) -> Option<String> {
    (!namespace.is_base()).then(|| format!("{namespace:?}"))
}

/// The ids of the pins that end with a block, by its hash.
type PinsByHash = HashMap<u64, Vec<u64>>;

/// The nodes of a tree that an outline lists.
struct Selection<'a> {
    dump: &'a TreeDump,
    pins: &'a PinsByHash,
    /// Number of tokens of each node and of all nodes below it.
    subtree_tokens: Vec<usize>,
    /// Number of nodes of each subtree, its root included.
    subtree_nodes: Vec<usize>,
    /// Number of pins that end in each node or below it.
    pinned: Vec<u32>,
    /// Indices of the nodes that are listed, parents before children.
    chosen: Vec<usize>,
    /// The only node at the top, if the outline is about a part of the tree.
    root: Option<usize>,
}

impl<'a> Selection<'a> {
    /// Chooses at most `count` nodes, of the whole tree or below `root`.
    fn new(dump: &'a TreeDump, pins: &'a PinsByHash, root: Option<usize>, count: usize) -> Self {
        let nodes = &dump.nodes;
        let mut subtree_tokens: Vec<_> = nodes.iter().map(|node| node.position_count).collect();
        let mut subtree_nodes = vec![1; nodes.len()];
        let pins_at = |hash| pins.get(&hash).map_or(0, |ids| ids.len() as u32);
        let mut pinned: Vec<u32> = nodes.iter().map(|node| pins_at(node.last_hash)).collect();
        let mut children = vec![Vec::new(); nodes.len()];
        // Children come after their parents, so that each sum is complete when it is added.
        for (index, node) in nodes.iter().enumerate().rev() {
            let Some(parent) = node.parent else { continue };
            subtree_tokens[parent] += subtree_tokens[index];
            subtree_nodes[parent] += subtree_nodes[index];
            pinned[parent] += pinned[index];
            children[parent].push(index);
        }
        let rank = |index: usize| (nodes[index].locks > 0, subtree_tokens[index], index);
        let mut next: BinaryHeap<_> = match root {
            Some(root) => [rank(root)].into(),
            None => {
                let first = nodes.iter().enumerate().filter(|(_, node)| node.parent.is_none());
                first.map(|(index, _)| rank(index)).collect()
            }
        };
        let mut chosen = Vec::new();
        while chosen.len() < count {
            let Some((_, _, index)) = next.pop() else { break };
            chosen.push(index);
            next.extend(children[index].iter().map(|&child| rank(child)));
        }
        chosen.sort_unstable();
        Self { dump, pins, subtree_tokens, subtree_nodes, pinned, chosen, root }
    }

    /// The outline, with the first words of the nodes if there is an engine to decode them.
    fn describe(&self, text: Option<&Engine>) -> Outline {
        let nodes = &self.dump.nodes;
        let places: HashMap<usize, usize> =
            self.chosen.iter().enumerate().map(|(place, &index)| (index, place)).collect();
        // Nodes and tokens that are not listed, by the place of their parent; `None` at the top.
        let mut hidden: HashMap<Option<usize>, (usize, usize)> = HashMap::new();
        for (index, node) in nodes.iter().enumerate() {
            let parent = node.parent.map(|parent| places.get(&parent).copied());
            let top = parent.is_none() && self.root.is_none();
            if places.contains_key(&index) || (!top && parent.flatten().is_none()) {
                continue;
            }
            let sum = hidden.entry(parent.flatten()).or_default();
            sum.0 += self.subtree_nodes[index];
            sum.1 += self.subtree_tokens[index];
        }
        let rest = |place| hidden.get(&place).copied().unwrap_or_default();
        let describe = |(place, &index): (usize, &usize)| {
            let node = &nodes[index];
            let (hidden_nodes, hidden_tokens) = rest(Some(place));
            let words = |engine: &Engine| shown_text(engine, &node.first_positions);
            OutlineNode {
                id: hex(node.last_hash),
                parent: node.parent.and_then(|parent| places.get(&parent).copied()),
                namespace: shown_namespace(&node.namespace),
                tokens: node.position_count,
                subtree_tokens: self.subtree_tokens[index],
                locks: node.locks,
                pinned: self.pinned[index],
                pins: self.pins.get(&node.last_hash).cloned().unwrap_or_default(),
                hits: node.hits,
                last_use: node.last_use,
                hidden_nodes,
                hidden_tokens,
                text: text.map(words),
            }
        };
        let (hidden_nodes, hidden_tokens) = rest(None);
        let mut above = self.root.and_then(|root| nodes[root].parent);
        let mut tokens_before = 0;
        while let Some(index) = above {
            tokens_before += nodes[index].position_count;
            above = nodes[index].parent;
        }
        Outline {
            version: self.dump.version,
            latest_use: nodes.iter().map(|node| node.last_use).max().unwrap_or_default(),
            total_nodes: nodes.len(),
            total_tokens: nodes.iter().map(|node| node.position_count).sum(),
            tokens_before,
            hidden_nodes,
            hidden_tokens,
            nodes: self.chosen.iter().enumerate().map(describe).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
