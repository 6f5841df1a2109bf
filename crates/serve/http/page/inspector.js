// Shows one prefix, with the operator's actions: pin, unpin, evict, and warm again after an
// eviction.

import { operator } from "./api.js";
import { announce, byId, count, duration, plural } from "./dom.js";
import { walk } from "./tree.js";

/** Maximum number of nodes whose texts are kept. */
const MOST_TEXTS = 300;
/** Maximum length of a node's text that is kept, in characters. */
const MOST_TEXT = 20_000;

let shown = null;
/** Whether the shown node is in the latest picture. */
let isPresent = false;
/** The latest outline. */
let latest = null;
/** The token ids of the shown prefix, from when it was evicted until another is shown. */
let evicted = null;
let busy = false;
let actions;
const texts = new Map();
/** When the page first saw each tick of the cache's clock: pairs of a tick and a time. */
const ticks = [];

/** Prepares the inspector. `actions` has `zoom` and `changed`. */
export function start(given) {
  actions = given;
  byId("zoom-in").addEventListener("click", () => shown && actions.zoom(shown));
  for (const name of ["pin", "evict", "warm"]) {
    byId(name).addEventListener("click", () => act(name));
  }
}

/** Shows a node. */
export function show(node) {
  evicted = null;
  if (shown?.key !== node.key) {
    byId("action-error").hidden = true;
    byId("text").textContent = node.text ?? "";
    byId("text").scrollTop = 0;
  }
  shown = node;
  isPresent = true;
  describe();
  showText(node);
}

/** Removes all texts, because the page may no longer show them. */
export function clear() {
  shown = evicted = null;
  texts.clear();
  byId("text").textContent = byId("facts").textContent = "";
  byId("inspector").hidden = true;
}

async function showText(node) {
  // Without an answer, the first words stay.
  const text = await textOf(node).catch(() => null);
  if (text !== null && shown?.id === node.id) byId("text").textContent = text;
}

/** Takes the latest outline. */
export function update(roots, outline) {
  if (outline.latest_use !== ticks.at(-1)?.[0]) ticks.push([outline.latest_use, Date.now()]);
  if (ticks.length > 2000) ticks.splice(0, 1000);
  latest = outline;
  const now = shown && [...walk(roots)].find((node) => node.key === shown.key);
  isPresent = Boolean(now);
  if (!shown || evicted) return;
  if (now) {
    const hasChanged = now.id !== shown.id || now.tokens !== shown.tokens;
    shown = now;
    if (hasChanged) showText(now);
  }
  describe();
}

/** Shows how much time has passed. */
export function tick() {
  if (shown && !byId("inspector").hidden) describe();
}

/** The time since a node was used. The cache counts uses; the page notes when it saw each count. */
export function age(node, outline) {
  const at = ticks.findIndex(([tick]) => tick >= node.last_use);
  if (at > 0) {
    const seconds = Math.max(Math.round((Date.now() - ticks[at][1]) / 1000), 1);
    return `used ${duration(seconds * 1000).replace(".0", "")} ago`;
  }
  const uses = outline.latest_use - node.last_use;
  return uses ? `used ${plural(uses, "cache operation")} ago` : "used last";
}

function describe() {
  byId("inspector").hidden = false;
  const facts = [
    `${plural(shown.tokens, "token")} (${count(shown.path)} from the beginning of the prompt)`,
    `held by ${plural(shown.locks, "request or pin", "requests or pins")}`,
    `found ${plural(shown.hits, "time")}`,
    age(shown, latest),
  ];
  if (evicted) facts.unshift("forgotten");
  else if (!isPresent) facts.unshift("no longer in the picture");
  byId("facts").textContent = facts.join(" · ");
  byId("salt-field").hidden = !shown.namespace;
  byId("pin").textContent = shown.pins.length ? "Unpin" : "Pin";
  byId("zoom-in").hidden = byId("pin").hidden = byId("evict").hidden = Boolean(evicted);
  byId("warm").hidden = !canWarm();
}

/** The text of a node's own tokens. */
export async function textOf(node) {
  const key = `${node.id}/${node.tokens}`;
  if (!texts.has(key)) {
    const { text } = await prefix(node);
    texts.set(key, text.slice(0, MOST_TEXT));
    if (texts.size > MOST_TEXTS) texts.delete(texts.keys().next().value);
  }
  return texts.get(key);
}

const prefix = (node) =>
  operator(`v1/cache/prefix/${node.id}?tokens=true&from=${node.path - node.tokens}`);

/** Pins or unpins, evicts, or warms the shown prefix. */
export async function act(name) {
  if (!shown || busy) return;
  busy = true;
  byId("action-error").hidden = true;
  try {
    await { pin, evict, warm }[name]();
  } catch (error) {
    fail(error);
  }
  busy = false;
  describe();
  actions.changed();
}

/** Shows why an action failed. */
export function fail(error) {
  byId("action-error").textContent = `${error.message}.`;
  byId("action-error").hidden = false;
}

/** The shown prefix as the body of a request. */
async function body() {
  const tokens = evicted ?? (await prefix(shown)).token_ids;
  const salt = shown.namespace ? { cache_salt: byId("salt").value } : {};
  return { prompt: tokens, ...salt };
}

async function pin() {
  if (shown.pins.length) {
    for (const id of shown.pins) await operator("v1/cache/unpin", { body: { id } });
    announce("Unpinned");
    return;
  }
  const { tokens } = await operator("v1/cache/pin", {
    body: { ...(await body()), compute: false, reason: "pinned on the page" },
  });
  announce(`Pinned ${plural(tokens, "token")}`);
}

async function evict() {
  const request = await body();
  const { blocks } = await operator("v1/cache/evict", { body: request });
  if (!blocks) {
    const why = shown.locks ? "a request or a pin holds it" : "its salt is another, or it has gone";
    throw new Error(`Nothing was forgotten: ${why}`);
  }
  announce(`Evicted ${plural(blocks, "block")}`);
  // Blocks that requests and pins hold are not evicted.
  const { results } = await operator("v1/cache/query", { body: request });
  if (results[0].cached_tokens === results[0].prompt_tokens) return;
  evicted = request.prompt;
  byId("warm").hidden = !canWarm();
  if (canWarm() && document.activeElement === byId("evict")) byId("warm").focus();
}

/** Whether the evicted prefix can be computed again. Numbers from 2^31 on are parts of images. */
const canWarm = () => Boolean(evicted?.every((token) => token < 2 ** 31));

async function warm() {
  const { results } = await operator("v1/cache/warm", { body: await body() });
  evicted = null;
  announce(`Computed: ${plural(results[0].cached_tokens, "token")} are cached`);
}
