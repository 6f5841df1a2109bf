// The list of chats, in a box of its own, with a search for words in them.

import { brief, byId, duration, el, plural } from "./dom.js";

/** Maximum number of chats that are listed; the search narrows them down. */
const MOST_LISTED = 100;
/** Number of characters that are shown before and after a found word. */
const AROUND = 40;

let actions;

/** Prepares the box. `actions` has `all` and `current` (functions), `open` and `remove`. */
export function start(given) {
  actions = given;
  const box = byId("chats");
  byId("open-chats").addEventListener("click", () => {
    byId("search-chats").value = "";
    box.showModal();
    update();
  });
  byId("close-chats").addEventListener("click", () => box.close());
  // A click beside the box.
  box.addEventListener("click", (event) => event.target === box && box.close());
  byId("search-chats").addEventListener("input", update);
  byId("search-chats").addEventListener("keydown", (event) => {
    if (event.key === "Enter") byId("chat-list").querySelector("button")?.click();
  });
}

/** Shows the chats that have all words of the search. */
export function update() {
  const chats = actions.all();
  byId("chat-count").textContent = chats.length || "";
  if (!byId("chats").open) return;
  const words = byId("search-chats").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = chats.map((chat) => ({ chat, text: textOf(chat) }))
    .filter(({ text }) => words.every((word) => text.toLowerCase().includes(word)));
  byId("chats-found").textContent =
    !chats.length ? "No chats yet."
      : words.length ? `${found.length} of ${plural(chats.length, "chat")}` : "";
  byId("chat-list").replaceChildren(...found.slice(0, MOST_LISTED)
    .map(({ chat, text }) => entry(chat, around(text, words[0]))));
}

function entry(chat, extract) {
  const isCurrent = chat === actions.current();
  const age = duration(Math.max(Date.now() - chat.changed, 1000)).replace(/\.\d/, "");
  const open = el("button", {
    type: "button", className: "entry", "aria-current": isCurrent ? "true" : null,
    onclick: () => {
      byId("chats").close();
      actions.open(chat);
    },
  },
  el("span", { className: "entry-name" }, chat.name),
  el("span", { className: "quiet" }, `${plural(chat.turns.length, "question")}, ${age} ago`),
  extract ? el("span", { className: "quiet" }, extract) : null);
  const remove = el("button", {
    type: "button", "aria-label": `Delete the chat ${chat.name}`,
    onclick: () => {
      actions.remove(chat);
      update();
      byId("search-chats").focus();
    },
  }, "Delete");
  return el("li", {}, open, remove);
}

/** All words of a chat. */
const textOf = ({ name, turns }) =>
  [name, ...turns.flatMap(({ question, answer }) => [question, answer ?? ""])].join(" \n");

/** The text around the first place of a word. */
function around(text, word) {
  const at = word ? text.toLowerCase().indexOf(word, text.indexOf("\n")) : -1;
  if (at < 0) return "";
  const from = Math.max(at - AROUND, 0);
  const part = text.slice(from, at + word.length + AROUND);
  return `${from ? "…" : ""}${brief(part, 3 * AROUND)}…`;
}
