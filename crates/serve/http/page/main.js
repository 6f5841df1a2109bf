// The page: wires its parts together.

import { aboutApiKey, keys, setKeys } from "./api.js";
import * as cache from "./cache.js";
import * as charts from "./charts.js";
import * as chat from "./chat.js";
import * as connection from "./connection.js";
import { byId } from "./dom.js";

function openKeys() {
  byId("api-key").value = keys.api;
  byId("admin-key").value = keys.admin;
  byId("keys").returnValue = "cancel";
  byId("keys").showModal();
}

byId("open-keys").addEventListener("click", openKeys);
byId("unlock").addEventListener("click", () => {
  openKeys();
  byId("admin-key").focus();
});
byId("keys").addEventListener("close", () => {
  const choice = byId("keys").returnValue;
  if (choice === "save") setKeys(byId("api-key").value, byId("admin-key").value);
  else if (choice === "forget") setKeys("", "");
  byId("api-key").value = byId("admin-key").value = "";
  if (choice !== "cancel") connect();
});

let attempt = 0;

/** Connects, and tries again while the server cannot answer. */
async function connect() {
  const own = ++attempt;
  cache.restart();
  for (let wait = 1000; own === attempt; wait = Math.min(2 * wait, 10_000)) {
    try {
      await chat.connect();
      showConnection("");
      return;
    } catch (error) {
      if (own !== attempt) return;
      if (error.status === 401) return showConnection(aboutApiKey());
      // `connection` shows it if the server does not answer at all.
      showConnection(error.status === 0 || error.status === 503 ? "" : error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

function showConnection(problem) {
  byId("connection").textContent = problem;
  byId("open-keys").classList.toggle("primary", problem !== "");
}

const CACHE_HIDDEN = "stolon-cache-hidden";

/** Whether the screen has room for the chat or the cache, not for both. */
const narrow = matchMedia("(max-width: 860px)");

/** Shows the chat alone, or the prefix cache next to it; on a narrow screen in its place. */
function showCache(isShown) {
  const button = byId("toggle-cache");
  byId("cache").hidden = !isShown;
  byId("chat").hidden = isShown && narrow.matches;
  button.textContent = byId("chat").hidden ? "Chat" : "Cache";
  if (narrow.matches) {
    button.removeAttribute("aria-pressed");
    return;
  }
  button.setAttribute("aria-pressed", String(isShown));
  try {
    localStorage.setItem(CACHE_HIDDEN, isShown ? "" : "yes");
  } catch {
    // Without storage, the choice lasts until the page is loaded again.
  }
}

function isCacheHidden() {
  try {
    return localStorage.getItem(CACHE_HIDDEN) === "yes";
  } catch {
    return false;
  }
}

byId("toggle-cache").addEventListener("click", () => showCache(byId("cache").hidden));
byId("skip-to-cache").addEventListener("click", () => showCache(true));
narrow.addEventListener("change", () => showCache(!narrow.matches && !isCacheHidden()));
showCache(!narrow.matches && !isCacheHidden());
charts.start();
cache.start(charts.add);
chat.start(cache.soon);
connect();
connection.start(connect);
