// The name of the model that answers, or a choice if the server has several, such as adapters.

import { byId, el } from "./dom.js";

/** Key of the browser's storage for the chosen model. */
const CHOSEN = "stolon-model";

let entries = [];
let choose = () => {};

/** Prepares the choice. `onChange` is called with the entry of `/v1/models` that was chosen. */
export function start(onChange) {
  choose = onChange;
  byId("model-choice").addEventListener("change", ({ target }) => {
    try {
      localStorage.setItem(CHOSEN, target.value);
    } catch {
      // Without storage, the choice lasts until the page is loaded again.
    }
    choose(entries[target.selectedIndex]);
  });
}

/** Shows the server's models. Returns the one that is used: the chosen one, or the first. */
export function offer(data) {
  entries = data;
  const box = byId("model-choice");
  const entry = data.find(({ id }) => id === chosen()) ?? data[0];
  box.replaceChildren(...data.map(({ id }) =>
    el("option", { value: id, selected: id === entry.id }, id)));
  box.hidden = !areSeveral();
  byId("model").hidden = areSeveral();
  byId("model").textContent = entry.id;
  return entry;
}

/** Whether there is a choice. */
export const areSeveral = () => entries.length > 1;

function chosen() {
  try {
    return localStorage.getItem(CHOSEN);
  } catch {
    return null;
  }
}
