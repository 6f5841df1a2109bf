// The shape of the picture of the prefix tree, computed from the server's outline: no DOM here.
//
// Tokens run from left to right: a node begins where its parent ends, and its width grows with its
// number of tokens. Nodes above each other are alternatives. So a prefix that many prompts
// share is one tall block, followed by a short block for each continuation.

/** Smallest width of a node in pixels, unless a chain is so long that it would not fit. */
const LEAST_WIDTH = 120;
/** Height of a row in pixels: at least that of a label, so that each node has one. */
const LEAST_HEIGHT = 20;
const MOST_HEIGHT = 60;
/** Maximum number of keys that a memory keeps of removed nodes, which may come back. */
const MOST_KEYS = 5000;

/** The state of a node: `used` by a running request, `pinned`, or only `cached`. */
export function stateOf(node) {
  if (node.locks > node.pinned) return "used";
  return node.pinned > 0 ? "pinned" : "cached";
}

/**
 * The nodes of an outline with links: `parent`, `children`, `path` (tokens from the start of the
 * prompt to its end), `key` (by which `memory` knows it) and, where nodes are not listed, a child
 * with their number as `rest`. Returns those without a parent; `above` is the key of their parent
 * if the outline is of a part of the tree.
 */
export function build(outline, memory, above = "") {
  const nodes = outline.nodes.map((node) => ({ ...node, state: stateOf(node), children: [] }));
  const byId = new Map(nodes.map((node) => [node.id, node]));
  for (const node of nodes) node.parent = node.parent === null ? null : nodes[node.parent];
  const roots = [];
  for (const node of nodes) {
    node.above = node.parent?.key ?? above;
    node.key = memory.recognize(node, byId);
    (node.parent?.children ?? roots).push(node);
    node.path = (node.parent?.path ?? outline.tokens_before) + node.tokens;
    node.depth = (node.parent?.depth ?? 0) + 1;
  }
  memory.remember(nodes);
  for (const node of nodes) arrange(node.children, node, node);
  arrange(roots, outline, null);
  return roots;
}

/** Sorts siblings by the time when they were first seen, and adds a node for those not listed. */
function arrange(siblings, { hidden_nodes, hidden_tokens }, parent) {
  siblings.sort((a, b) => a.key - b.key);
  if (hidden_nodes === 0) return;
  const depth = (parent?.depth ?? 0) + 1;
  siblings.push({
    key: `${parent?.key ?? ""}+`, rest: hidden_nodes, tokens: hidden_tokens, parent, depth,
    children: [], state: "rest",
  });
}

/**
 * Gives each node a key that it keeps while it grows or is split, so that it stays in its place.
 * Its id, the hash of its last block, changes then.
 */
export class Memory {
  #next = 0;
  /** Keys by id. */
  #keys = new Map();
  /** The ids of the latest nodes by `likeness`. */
  #alike = new Map();
  /** The ids of the latest nodes. */
  #latest = new Set();
  /** The keys of the nodes that are being recognized. */
  #taken = new Set();

  recognize(node, byId) {
    const free = (id) => this.#keys.has(id) && !this.#taken.has(this.#keys.get(id));
    const was = (id) => {
      const now = byId.get(id);
      return free(id) && (now === undefined || now.parent === node);
    };
    let id = this.#latest.has(node.id) && free(node.id) ? node.id : undefined;
    id ??= this.#alike.get(likeness(node))?.find(was);
    if (id === undefined && free(node.id)) id = node.id;
    const key = id === undefined ? this.#next++ : this.#keys.get(id);
    this.#taken.add(key);
    return key;
  }

  remember(nodes) {
    this.#taken.clear();
    this.#alike.clear();
    this.#latest = new Set(nodes.map((node) => node.id));
    if (this.#keys.size > MOST_KEYS) this.#keys.clear();
    for (const node of nodes) {
      this.#keys.set(node.id, node.key);
      const alike = this.#alike.get(likeness(node)) ?? [];
      this.#alike.set(likeness(node), [...alike, node.id]);
    }
  }
}

/** The features of a node that stay the same when it grows or is split. */
const likeness = (node) => `${node.above} ${node.namespace ?? ""} ${node.text ?? ""}`;

/** All nodes of a tree, a parent before its children, from top to bottom. */
export function* walk(roots) {
  for (const node of roots) {
    yield node;
    yield* walk(node.children);
  }
}

/**
 * Gives each node `left`, `top`, `width` and `height` in pixels, and returns the total height.
 * Widths are proportional to tokens, at least a few pixels, such that the longest path fits.
 */
export function layout(roots, width, mostHeight) {
  const all = [...walk(roots)];
  const leaves = all.filter((node) => node.children.length === 0).length;
  const row = Math.max(LEAST_HEIGHT, Math.min(MOST_HEIGHT, mostHeight / Math.max(leaves, 1)));
  const deepest = all.reduce((most, node) => Math.max(most, node.depth), 1);
  const least = Math.min(LEAST_WIDTH, width / deepest / 2);
  const widthOf = (node, scale) =>
    node.rest ? least / 2 : Math.max(least, node.tokens * scale);
  const longest = (nodes, scale) =>
    nodes.reduce((most, n) => Math.max(most, widthOf(n, scale) + longest(n.children, scale)), 0);
  let [low, high] = [0, width];
  for (let step = 0; step < 30; step++) {
    const middle = (low + high) / 2;
    if (longest(roots, middle) > width) high = middle;
    else low = middle;
  }
  let next = 0;
  const place = (node, left) => {
    node.left = left;
    node.width = widthOf(node, low);
    node.top = next;
    if (node.children.length === 0) next += row;
    for (const child of node.children) place(child, left + node.width);
    node.height = next - node.top;
  };
  for (const root of roots) place(root, 0);
  return next;
}

/** The node that an arrow key leads to from another, or `null`. */
export function neighbor(roots, node, key) {
  const siblings = node.parent ? node.parent.children : roots;
  const at = siblings.indexOf(node);
  switch (key) {
    case "ArrowRight": return node.children[0] ?? null;
    case "ArrowLeft": return node.parent;
    case "ArrowDown": return siblings[at + 1] ?? nextBelow(roots, node);
    case "ArrowUp": return siblings[at - 1] ?? null;
    case "Home": return roots[0] ?? null;
    case "End": return [...walk(roots)].at(-1) ?? null;
    default: return null;
  }
}

/** The first node of the same depth, or of the nearest smaller one, that comes after a subtree. */
function nextBelow(roots, node) {
  for (let above = node.parent; above; above = above.parent) {
    const siblings = above.parent ? above.parent.children : roots;
    const next = siblings[siblings.indexOf(above) + 1];
    if (next) return next;
  }
  return null;
}
