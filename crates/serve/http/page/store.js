// The chats, kept in the browser's storage with one entry each. Other tabs with this page see the
// same chats.
//
// A chat has `id`, `name`, `system`, `changed` (when, in milliseconds) and `turns`. A turn has
// `question` and, if there are any, `image` (a data URL), `files` (`name` and `text`), `answer`,
// `reasoning`, `figures`, `error`, and the other `versions` of the conversation from there on.

import { el } from "./dom.js";
import { areTurns } from "./versions.js";

const PREFIX = "stolon-chat/";
/** Maximum number of chats that are kept. */
const MOST_CHATS = 200;

/** The chats that are kept, the latest first. */
export function load() {
  const chats = [];
  try {
    for (let index = 0; index < localStorage.length; index++) {
      const key = localStorage.key(index);
      if (key.startsWith(PREFIX)) chats.push(read(localStorage.getItem(key)));
    }
  } catch {
    // Without storage, chats last until the page is loaded again.
  }
  return chats.filter(Boolean).sort((a, b) => b.changed - a.changed);
}

/** A chat from its JSON, or `null` if the text is not a chat. */
function read(json) {
  try {
    const { id, name, system, changed, turns } = JSON.parse(json);
    if (typeof id !== "string" || !areTurns(turns)) return null;
    return {
      id, name: String(name ?? ""), system: String(system ?? ""), changed: Number(changed) || 0,
      turns,
    };
  } catch {
    return null;
  }
}

/** A chat without turns. It is kept when it has one. */
export const create = (system) => ({
  // Not `randomUUID`, which pages from plain HTTP do not have.
  id: `${Date.now().toString(36)}${Math.random().toString(36).slice(2)}`,
  name: "New chat", system, changed: Date.now(), turns: [],
});

/** Keeps a chat; `all` has the latest first. Returns why it could not, or an empty text. */
export function save(chat, all) {
  const oldest = all.filter((other) => other.turns.length).slice(MOST_CHATS);
  try {
    for (const { id } of oldest) localStorage.removeItem(PREFIX + id);
    localStorage.setItem(PREFIX + chat.id, JSON.stringify(chat));
    return "";
  } catch {
    return "The browser's storage is full: this chat is lost when the page is closed. " +
      "Export it, or delete others.";
  }
}

/** Removes a chat. */
export function remove(chat) {
  try {
    localStorage.removeItem(PREFIX + chat.id);
  } catch {
    // There was no storage.
  }
}

/** Calls `changed` when another tab has changed the chats. */
export function watch(changed) {
  addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(PREFIX)) changed();
  });
}

/** A chat as Markdown. */
export function asMarkdown(chat, model) {
  const parts = [`# ${chat.name}`, model && `Model: ${model}`];
  if (chat.system) parts.push("## System prompt", chat.system);
  for (const { question, answer, image, files = [] } of chat.turns) {
    const names = [image && "a picture", ...files.map(({ name }) => name)].filter(Boolean);
    const attached = names.length ? `(with ${names.join(", ")})` : "";
    parts.push("## You", attached, question, "## Answer", answer || "(none)");
  }
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}

/** Lets the user save a text as a file. */
export function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
