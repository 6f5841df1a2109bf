// Whether the server answers. The page asks once a second. It notices within three seconds that a
// server does not answer, and then marks the figures as old.

import { byId } from "./dom.js";

const PAUSE = 1000;
/** Time within which /health has to answer, in milliseconds. It needs no computation. */
const PATIENCE = 1500;

let isGone = false;
let answered = new Date();
let timer = null;

/** Begins to watch. `returned` is called when a server answers again after a failure. */
export function start(returned) {
  const watch = async () => {
    clearTimeout(timer);
    timer = null;
    if (document.hidden) return;
    const reason = await ask();
    if (isGone && !reason) returned();
    show(reason);
    timer ??= setTimeout(watch, PAUSE);
  };
  document.addEventListener("visibilitychange", () => !document.hidden && watch());
  watch();
}

/** Why the server does not answer requests, or an empty text. */
async function ask() {
  try {
    const signal = AbortSignal.timeout(PATIENCE);
    const reply = await fetch("health", { signal, cache: "no-store", credentials: "omit" });
    if (reply.ok) {
      answered = new Date();
      return "";
    }
    const { reason } = await reply.json().catch(() => ({}));
    return `The server is not ready: ${reason ?? `status ${reply.status}`}.`;
  } catch {
    return `The server has not answered since ${answered.toLocaleTimeString()}.`;
  }
}

function show(reason) {
  isGone = reason !== "";
  byId("gone").hidden = !isGone;
  if (byId("gone").textContent !== reason) byId("gone").textContent = reason;
  document.body.classList.toggle("stale", isGone);
  for (const mark of document.querySelectorAll(".as-of")) {
    mark.hidden = !isGone;
    mark.textContent = `as of ${answered.toLocaleTimeString()}`;
  }
}
