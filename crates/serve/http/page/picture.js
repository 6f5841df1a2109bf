// Draws the prefix tree, as blocks or as a table. Elements are kept from one drawing to the next,
// so that they move instead of jumping and the focus stays where it is.

import { brief, byId, count, el, label, plural } from "./dom.js";
import { layout, neighbor, walk } from "./tree.js";
import { age, textOf } from "./inspector.js";

const STATES = { cached: "cached", used: "in use", pinned: "pinned", rest: "not shown" };
/** Maximum height of the picture, as a share of the window's height. */
const MOST_HEIGHT = 0.42;
/** Typical width of a letter, and the least room for a label next to its node, in pixels. */
const [LETTER, LEAST_ROOM] = [7, 100];

let roots = [];
let outline = { latest_use: 0 };
let isZoomed = false;
let asTable = false;
/** The elements of the nodes by key, and the nodes by element. */
const elements = new Map();
const nodes = new WeakMap();
/** The key of the node that has the focus, or will get it with the picture. */
let focused = null;
/** The key of the node below the pointer. */
let pointed = null;
let actions;

/** Prepares the picture. `actions` has `zoom`, `select` and `act`. */
export function start(given) {
  actions = given;
  const tree = byId("tree");
  tree.addEventListener("keydown", onKey);
  tree.addEventListener("focusin", (event) => focus(nodes.get(event.target)));
  tree.addEventListener("pointerover", (event) => tip(event.target.closest(".node")));
  tree.addEventListener("pointerleave", () => tip(null));
  tree.addEventListener("dblclick", (event) => {
    const node = nodes.get(event.target.closest(".node"));
    if (node) actions.zoom(node);
  });
  byId("as-table").addEventListener("click", () => {
    asTable = !asTable;
    byId("as-table").setAttribute("aria-pressed", String(asTable));
    draw(roots, outline, isZoomed);
  });
  new ResizeObserver(() => place()).observe(tree);
}

/** Draws a tree that `build` has made from an outline. */
export function draw(newRoots, newOutline, zoomed) {
  [roots, outline, isZoomed] = [newRoots, newOutline, zoomed];
  byId("tree").hidden = byId("tree-keys").hidden = asTable || roots.length === 0;
  byId("table").hidden = !asTable || roots.length === 0;
  byId("rest-legend").hidden = ![...walk(roots)].some((node) => node.rest);
  if (asTable) drawTable();
  else place();
}

function place() {
  const tree = byId("tree");
  if (asTable) return;
  const active = document.activeElement?.closest("#tree .node");
  const height = layout(roots, tree.clientWidth, Math.max(innerHeight * MOST_HEIGHT, 200));
  tree.style.height = `${height}px`;
  const all = [...walk(roots)];
  const seen = new Set(all.map((node) => node.key));
  for (const [key, element] of elements) {
    if (seen.has(key)) continue;
    elements.delete(key);
    element.remove();
  }
  let previous = null;
  for (const node of all) {
    let element = elements.get(node.key);
    if (!element) {
      element = el("div", { role: "treeitem" }, el("span", { className: "words" }), " ",
        el("span", { className: "numbers" }));
      elements.set(node.key, element);
    }
    nodes.set(element, node);
    fill(element, node);
    // Elements are in the order of the tree, for screen readers.
    const next = previous ? previous.nextElementSibling : tree.firstElementChild;
    if (next !== element) tree.insertBefore(element, next);
    previous = element;
  }
  if (!elements.has(focused)) focused = roots[0]?.key ?? null;
  for (const [key, element] of elements) element.tabIndex = key === focused ? 0 : -1;
  // An element that was removed or moved has lost the focus.
  if (active && active !== document.activeElement) {
    elements.get(focused)?.focus({ preventScroll: true });
  }
}

function fill(element, node) {
  const style = element.style;
  style.left = `${node.left}px`;
  style.top = `${node.top}px`;
  style.width = `${Math.max(node.width - 1, 3)}px`;
  style.height = `${Math.max(node.height - 1, 3)}px`;
  const words = node.rest ? `+${count(node.rest)}` : label(node.text ?? "", 80);
  // Nothing is to the right of a node without children, so a label that is too long has room there.
  const room = byId("tree").clientWidth - node.left - node.width - 8;
  const isOutside = !node.children.length && room > LEAST_ROOM
    && words.length * LETTER > node.width;
  style.setProperty("--right", `${node.width}px`);
  style.setProperty("--room", `${room}px`);
  const size = (node.height > 34 ? " tall" : "") + (isOutside ? " outside" : "");
  element.className = `node ${node.state}${size}`;
  const siblings = node.parent ? node.parent.children : roots;
  element.setAttribute("aria-level", node.depth);
  element.setAttribute("aria-posinset", siblings.indexOf(node) + 1);
  element.setAttribute("aria-setsize", siblings.length);
  element.setAttribute("aria-selected", String(node.key === focused));
  if (node.children.length) element.setAttribute("aria-expanded", "true");
  else element.removeAttribute("aria-expanded");
  const [text, numbers] = element.children;
  text.textContent = words;
  numbers.textContent = node.rest ? "" : sizeOf(node);
  element.setAttribute("aria-label", `${words} ${describe(node)}`);
}

/** The size of a node, and how many continuations share it. */
function sizeOf({ tokens, children }) {
  const size = plural(tokens, "token");
  return children.length > 1 ? `${size}, shared by ${count(children.length)}` : size;
}

/** The size and the state of a node in one line. */
function describe(node) {
  const size = sizeOf(node);
  if (node.rest) return `smaller ${node.rest === 1 ? "piece" : "pieces"}, ${size}`;
  return [size, STATES[node.state], `found ${plural(node.hits, "time")}`].join(", ");
}

function focus(node) {
  if (!node) return;
  const before = elements.get(focused);
  focused = node.key;
  if (before) {
    before.tabIndex = -1;
    before.setAttribute("aria-selected", "false");
  }
  const element = elements.get(node.key);
  element.tabIndex = 0;
  element.setAttribute("aria-selected", "true");
  if (!node.rest) actions.select(node);
}

function onKey(event) {
  const node = nodes.get(event.target);
  if (!node || event.ctrlKey || event.metaKey || event.altKey) return;
  const to = neighbor(roots, node, event.key);
  if (to) elements.get(to.key).focus();
  else if (event.key === "Enter") actions.zoom(node);
  else if ((event.key === "Escape" || event.key === "Backspace") && isZoomed) actions.zoom(null);
  else if (["p", "P"].includes(event.key) && !node.rest) actions.act("pin");
  else if (["e", "E", "Delete"].includes(event.key) && !node.rest) actions.act("evict");
  else if (!event.key.startsWith("Arrow")) return;
  event.preventDefault();
}

/** Shows the facts of a node below the pointer. */
async function tip(element) {
  const box = byId("tip");
  const node = element && nodes.get(element);
  box.hidden = !node;
  pointed = node?.key ?? null;
  if (!node) return;
  const facts = el("strong", {}, (node.rest ? `${count(node.rest)} ` : "") + describe(node));
  const text = el("span", {}, node.rest ? "" : brief(node.text ?? "", 200));
  const use = node.rest ? ""
    : `held by ${plural(node.locks, "request or pin", "requests or pins")}, ${age(node, outline)}`;
  box.replaceChildren(facts, el("span", { className: "quiet" }, use), text);
  const at = element.getBoundingClientRect();
  const left = Math.min(at.left, innerWidth - box.offsetWidth - 8);
  const below = at.bottom + box.offsetHeight + 12 < innerHeight;
  box.style.left = `${Math.max(left, 8)}px`;
  box.style.top = `${below ? at.bottom + 6 : Math.max(at.top - box.offsetHeight - 6, 8)}px`;
  if (node.rest) return;
  const whole = await textOf(node).catch(() => null);
  if (whole !== null && pointed === node.key) text.textContent = brief(whole, 320);
}

function drawTable() {
  const box = byId("table");
  const scroll = box.scrollTop;
  const id = document.activeElement?.dataset?.row;
  const head = ["Text", "State", "Tokens", "From the beginning", "Held by", "Found", "Last use"];
  const row = (node) => {
    if (node.rest) {
      const name = el("th", { scope: "row" }, `+ ${plural(node.rest, "smaller piece")}`);
      const rest = Array.from({ length: 4 }, () => el("td"));
      return el("tr", {}, name, el("td"), el("td", {}, count(node.tokens)), ...rest);
    }
    const open = el("button", {
      type: "button", className: "link", "data-row": node.id, onclick: () => actions.select(node),
    }, label(node.text ?? "", 40) || "prefix");
    const name = el("th", { scope: "row" }, el("span", { className: "hidden-text" },
      `level ${node.depth} `), open);
    name.style.paddingLeft = `${Math.min(node.depth, 12) * 12}px`;
    const state = el("td", {}, el("i", { className: `swatch ${node.state}` }), STATES[node.state]);
    const cells = [count(node.tokens), count(node.path), count(node.locks), count(node.hits),
      age(node, outline)];
    return el("tr", {}, name, state, ...cells.map((cell) => el("td", {}, cell)));
  };
  const columns = head.map((name) => el("th", { scope: "col" }, name));
  box.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...columns)),
    el("tbody", {}, ...[...walk(roots)].map(row))));
  box.scrollTop = scroll;
  if (id) box.querySelector(`[data-row="${CSS.escape(id)}"]`)?.focus();
}
