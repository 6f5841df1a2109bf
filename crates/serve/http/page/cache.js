// The page's copy of the prefix cache: the outline of the tree, which is updated at the server's
// events, and the statistics, requested once a second. Both pause while the page is not visible.

import { keys, operator, send, serverSentEvents } from "./api.js";
import { announce, byId, plural } from "./dom.js";
import * as inspector from "./inspector.js";
import * as picture from "./picture.js";
import { build, Memory, walk } from "./tree.js";

/** Maximum number of nodes of the picture. The server counts the others together. */
const MOST_NODES = 250;
/** Minimum time between two outlines, in milliseconds. */
const PAUSE = 200;

const memory = new Memory();
/** The nodes that the picture is zoomed into, the innermost last: `id`, `key` and `above`. */
let zoomed = [];
let showStats = () => {};
/** Ends the stream of events and the polling of statistics. */
let connection = null;
let fetching = false;
let again = false;
let lastRunning = 0;

/** Prepares the picture. `stats` is called with each reply of /v1/cache/stats. */
export function start(stats) {
  showStats = stats;
  picture.start({ zoom, select: inspector.show, act: inspector.act });
  inspector.start({ zoom, changed: soon });
  byId("zoom-out").addEventListener("click", () => zoom(null));
  byId("flush").addEventListener("click", flush);
  document.addEventListener("visibilitychange", () => (document.hidden ? rest() : restart()));
}

/** Connects again, for example after the keys have changed. */
export function restart() {
  rest();
  if (document.hidden) return;
  connection = new AbortController();
  const { signal } = connection;
  soon();
  watchEvents(signal);
  watchStats(signal);
}

function rest() {
  connection?.abort();
  connection = null;
}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Asks for a new outline whenever the tree has changed. */
async function watchEvents(signal) {
  for (let wait = 1000; !signal.aborted; wait = Math.min(wait * 2, 15_000)) {
    try {
      const reply = await send("v1/cache/events?snapshot=false", { admin: true, signal });
      soon();
      for await (const _ of serverSentEvents(reply)) {
        wait = 1000;
        soon();
      }
    } catch (error) {
      if (isRefusal(error)) return;
    }
    await sleep(wait);
  }
}

/** Shows the statistics once a second, and the tree while requests hold parts of it. */
async function watchStats(signal) {
  while (!signal.aborted) {
    try {
      const reply = await operator("v1/cache/stats", { signal });
      showStats(reply);
      inspector.tick();
      const { running } = reply.stats;
      if (running || lastRunning) soon();
      lastRunning = running;
    } catch (error) {
      if (isRefusal(error)) return;
    }
    await sleep(1000);
  }
}

const isRefusal = (error) => error.status === 401 || error.status === 403;

/** Shows the tree as it is now, at once or shortly after the previous time. */
export async function soon() {
  again = true;
  if (fetching || !connection) return;
  fetching = true;
  while (again && connection) {
    again = false;
    await refresh(connection.signal);
    await sleep(PAUSE);
  }
  fetching = false;
}

async function refresh(signal) {
  const under = zoomed.at(-1);
  const outline = (part) =>
    operator(`v1/cache/outline?nodes=${MOST_NODES}&tokens=true${part}`, { signal });
  try {
    try {
      show(await outline(under ? `&under=${under.id}` : ""), under?.above);
    } catch (error) {
      if (error.status !== 404 || !under) throw error;
      // The node was removed, or it has grown and has another id.
      const roots = build(await outline(""), memory);
      const node = [...walk(roots)].find((node) => node.key === under.key);
      if (node) under.id = node.id;
      else zoomed.pop();
      again = true;
    }
    lock(null);
  } catch (error) {
    if (isRefusal(error)) lock(error);
  }
}

function show(outline, above) {
  const roots = build(outline, memory, above);
  const size = `Now ${plural(outline.total_tokens, "token")} in ` +
    `${plural(outline.total_nodes, "piece")}.`;
  byId("tree-size").textContent = outline.total_nodes ? size : "";
  byId("tree-empty").hidden = outline.total_nodes > 0;
  byId("zoom-out").hidden = zoomed.length === 0;
  picture.draw(roots, outline, zoomed.length > 0);
  inspector.update(roots, outline);
}

/** Shows why the tree cannot be shown, or hides the notice if it can. */
function lock(error) {
  byId("locked").hidden = !error;
  for (const id of ["tree", "tree-keys", "as-table", "flush", "figures"]) {
    byId(id).toggleAttribute("data-locked", Boolean(error));
  }
  if (!error) return;
  picture.draw([], { latest_use: 0 }, false);
  inspector.clear();
  byId("tree-empty").hidden = true;
  byId("tree-size").textContent = "";
  const needed = keys.admin
    ? "The server does not know this administrator's key."
    : "The tree shows what users have sent, so it needs the administrator's key.";
  byId("locked-text").textContent = error.status === 401
    ? needed
    : `The tree cannot be shown here: ${error.message}.`;
  byId("unlock").hidden = error.status !== 401;
}

/** Shows only a node and the nodes below it; `null` goes back one step. */
function zoom(node) {
  const into = node?.rest ? node.parent : node;
  if (node === null) zoomed.pop();
  else if (into && into.key !== zoomed.at(-1)?.key) {
    zoomed.push({ id: into.id, key: into.key, above: into.above });
  }
  else return;
  zoomed = zoomed.slice(-100);
  announce(zoomed.length ? "Zoomed in" : "Whole tree");
  soon();
}

async function flush() {
  const question = "Forget all prompts, the pinned ones too? The chats stay.";
  if (!confirm(question)) return;
  zoomed = [];
  try {
    await operator("v1/cache/flush", { body: {} });
    announce("The cache is empty.");
  } catch (error) {
    inspector.fail(error);
  }
  soon();
}

