// The page: wires its parts together.

import { keys, setKeys } from "./api.js";
import * as cache from "./cache.js";
import * as charts from "./charts.js";
import * as chat from "./chat.js";
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
      byId("connection").textContent = "";
      return;
    } catch (error) {
      byId("connection").textContent =
        error.status === 401 ? "The chat needs an API key." : error.message;
      if (error.status === 401) return;
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

charts.start();
cache.start(charts.add);
chat.start(cache.soon);
connect();
