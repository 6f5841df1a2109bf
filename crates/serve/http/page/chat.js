// The chats: which one is shown, and the requests to /v1/chat/completions.

import { ApiError, client, explain, send, serverSentEvents } from "./api.js";
import { announce, brief, byId, el } from "./dom.js";
import * as attachments from "./attachments.js";
import * as chatList from "./chats.js";
import { TurnView } from "./messages.js";
import { inWords } from "./misses.js";
import * as models from "./models.js";
import * as store from "./store.js";
import * as system from "./system.js";
import * as versions from "./versions.js";

const DEMO_MODEL = "stolon-demo";
const DEMO_MODEL_VISION = "stolon-demo-vision";
/** Key of the tab's storage for the id of the shown chat. */
const CURRENT = "stolon-current";
/** The view follows the answer if it is at most this far from the end, in pixels. */
const NEAR_END = 60;

/** The chats, the latest first, and the one that is shown. */
let chats = store.load();
let current;
let model = "";
let handbook = null;
/** The picture that the demo model can be asked about: `image`, `questions`. */
let example = null;
/** The answer that is being streamed: `chat`, `turn`, and the `controller` that ends it. */
let running = null;
let afterAnswer = () => {};
const views = new WeakMap();

/** Prepares the chat. `answered` is called when an answer has begun or ended. */
export function start(answered) {
  afterAnswer = answered;
  system.start({ changed: changeSystem, warmed: answered });
  attachments.start(showQuestions);
  models.start(serve);
  chatList.start({ all: kept, current: () => current, open, remove });
  const onClick = (id, action) => byId(id).addEventListener("click", action);
  // With the same system prompt, so that the beginning of its prompts is cached.
  onClick("new-chat", () => open(newChat(current.system || (handbook?.system ?? ""))));
  onClick("load-handbook", () => changeSystem(handbook.system, true));
  onClick("load-picture", () => attachments.attach(example.image));
  onClick("stop", () => running?.controller.abort());
  onClick("export", () => store.download(
    `${current.name.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "chat"}.md`,
    "text/markdown", store.asMarkdown(current, model)));
  onClick("export-all", () => store.download(
    "stolon-chats.json", "application/json", JSON.stringify(kept(), null, 2)));
  onClick("delete", () => remove(current));
  const closeMenu = () => { byId("menu").open = false; };
  document.addEventListener("click", (event) =>
    (event.target.matches("#menu button") || !event.target.closest("#menu")) && closeMenu());
  byId("menu").addEventListener("keydown", (event) => event.key === "Escape" && closeMenu());
  onClick("to-end", () => scrollDown(true));
  byId("messages").addEventListener("scroll", showToEnd);
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const question = byId("question").value.trim();
    if (!question || running) return;
    byId("question").value = "";
    askNext(question);
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.controller.abort();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask").requestSubmit();
  });
  store.watch(reload);
  const id = remembered();
  open(chats.find((chat) => chat.id === id) ?? newChat(""));
}

/** Asks the server for its models. Throws if a key is missing. */
export async function connect() {
  const { data } = await client("v1/models");
  await serve(models.offer(data));
}

/** Takes over a model, an entry of `/v1/models`. */
async function serve(entry) {
  model = entry.id;
  attachments.serve(entry);
  document.title = `${model} · Stolon`;
  system.serve(model);
  if (model === DEMO_MODEL_VISION && !example) {
    example = await client("page/picture.json").catch(() => null);
    show();
  }
  if (model !== DEMO_MODEL || handbook) return;
  handbook = await client("page/handbook.json").catch(() => null);
  if (handbook && !current.turns.length && !current.system) changeSystem(handbook.system, true);
  else show();
}

function remembered() {
  try {
    return sessionStorage.getItem(CURRENT);
  } catch {
    return null;
  }
}

const kept = () => chats.filter((chat) => chat.turns.length);

function newChat(text) {
  // A chat without turns is used instead of adding another.
  const chat = chats.find((chat) => !chat.turns.length) ?? store.create(text);
  chat.system = text;
  if (!chats.includes(chat)) chats.unshift(chat);
  return chat;
}

function open(chat) {
  current = chat;
  try {
    sessionStorage.setItem(CURRENT, chat.id);
  } catch {
    // Then the page begins with a new chat.
  }
  show();
  byId("question").focus({ preventScroll: true });
}

/** Loads the changes of another tab. */
function reload() {
  const own = running?.chat ?? current;
  const stored = store.load();
  const others = stored.filter((chat) => chat.id !== own.id);
  const latest = stored.find((chat) => chat.id === own.id);
  if (!running && latest && latest.changed > own.changed) Object.assign(own, latest);
  chats = [own, ...others].sort((a, b) => b.changed - a.changed);
  current = chats.find((chat) => chat.id === current.id) ?? own;
  show();
}

function keep(chat) {
  chat.changed = Date.now();
  chats.sort((a, b) => b.changed - a.changed);
  const problem = store.save(chat, chats);
  byId("chat-error").textContent = problem;
  byId("chat-error").hidden = !problem;
}

function remove(chat) {
  if (chat.turns.length && !confirm(`Delete the chat “${chat.name}”?`)) return;
  if (running?.chat === chat) running.controller.abort();
  store.remove(chat);
  chats = chats.filter((other) => other !== chat);
  announce("The chat is deleted.");
  if (chat === current) open(chats[0] ?? newChat(current.system));
  else show();
}

function changeSystem(text, isShown = false) {
  current.system = text;
  if (current.turns.length) keep(current);
  if (isShown) show();
  else showQuestions();
}

/** Shows the current chat. */
function show() {
  byId("chat-heading").textContent = byId("chat-heading").title = current.name;
  chatList.update();
  system.show(current.system);
  byId("messages").replaceChildren(...current.turns.map((turn) => viewOf(current, turn).element));
  const isNew = !current.turns.length;
  byId("demo-note").hidden = !handbook || !isNew;
  byId("picture-note").hidden = !example || !isNew;
  byId("load-handbook").hidden = !handbook || current.system === handbook.system;
  byId("delete").disabled = byId("export").disabled = isNew;
  byId("export-all").disabled = !kept().length;
  showQuestions();
  scrollDown(true);
}

function viewOf(chat, turn) {
  if (!views.has(turn)) {
    const view = new TurnView(turn, {
      get isLast() {
        return chat.turns.at(-1) === turn;
      },
      edit: (text) => askAgain(chat, turn, text),
      regenerate: () => askAgain(chat, turn, turn.question),
      remove: () => removeTurn(chat, turn),
      choose: (number, button) => chooseVersion(chat, turn, number, button),
    });
    view.showFigures();
    views.set(turn, view);
  }
  return views.get(turn);
}

/** Asks a question again, or another one. The turn and all after it are kept as a version. */
function askAgain(chat, turn, question) {
  if (running) return;
  const { image, files } = turn;
  const again = { question, ...(image && { image }), ...(files && { files }) };
  ask(again, () => versions.replace(chat, chat.turns.indexOf(turn), again));
}

/** Shows another version of a turn, with the focus on the same button. */
function chooseVersion(chat, turn, number, button) {
  if (running?.chat === chat) return;
  const index = chat.turns.indexOf(turn);
  versions.choose(chat, index, number);
  keep(chat);
  show();
  const view = viewOf(chat, chat.turns[index]);
  view.showFigures();
  view.element.scrollIntoView({ block: "nearest" });
  view.focusVersion(button);
  announce(`Version ${number + 1} of ${chat.turns[index].versions.length}`);
}

function removeTurn(chat, turn) {
  if (running?.chat === chat) running.controller.abort();
  versions.remove(chat, chat.turns.indexOf(turn));
  if (chat.turns.length) keep(chat);
  else store.remove(chat);
  for (const left of chat.turns) viewOf(chat, left).showFigures();
  announce("The question and its answer are deleted.");
  show();
}

/**
 * Example questions, while a demo model has its handbook or its picture. Those about the handbook
 * have a chat each, so that the tree of prefixes branches.
 */
function showQuestions() {
  const isAboutBook = handbook && current.system === handbook.system;
  const offered = isAboutBook ? handbook.questions
    : example && latestImage() === example.image ? example.questions : [];
  const asked = new Set((isAboutBook ? kept().filter(({ system }) => system === current.system)
    : [current]).flatMap((chat) => chat.turns.map((turn) => turn.question)));
  const start = (question) => {
    if (isAboutBook && current.turns.length) open(newChat(handbook.system));
    askNext(question);
  };
  const button = (question) =>
    el("button", { type: "button", disabled: running !== null, onclick: () => start(question) },
      question);
  const left = offered.filter((question) => !asked.has(question));
  const hint = isAboutBook && current.turns.length && left.length
    ? el("span", { className: "quiet" }, "In a chat of its own:") : "";
  byId("questions").replaceChildren(
    ...[hint].filter(Boolean), ...left.slice(0, kept().length ? 3 : 5).map(button));
}

/** The picture that the next question is about, or nothing. */
const latestImage = () =>
  attachments.picture() ?? current.turns.findLast((turn) => turn.image)?.image;

/** Asks a question with what is attached. */
function askNext(question) {
  const turn = { question, ...attachments.take() };
  ask(turn, () => current.turns.push(turn));
}

function sampling() {
  const inputs = byId("sampling").querySelectorAll("input");
  const set = [...inputs].filter((input) => input.value !== "" && input.validity.valid);
  return Object.fromEntries(set.map((input) => [input.name, Number(input.value)]));
}

/** The messages of a chat. A turn without an answer is not part of later prompts. */
function messages(chat) {
  const turns = chat.turns.flatMap((turn, index) => {
    if (!turn.answer && index < chat.turns.length - 1) return [];
    const asked = { role: "user", content: attachments.contentOf(turn) };
    return turn.answer ? [asked, { role: "assistant", content: turn.answer }] : [asked];
  });
  return chat.system ? [{ role: "system", content: chat.system }, ...turns] : turns;
}

/** Asks the question of a turn, which `place` puts into the current chat; streams the answer. */
async function ask(turn, place) {
  const chat = current;
  place();
  if (chat.turns.length === 1) chat.name = brief(turn.question, 40);
  const view = viewOf(chat, turn);
  const asked = model;
  setRunning({ chat, turn, controller: new AbortController() });
  view.begin();
  keep(chat);
  show();
  const sent = messages(chat);
  const reply = { usage: null, reason: null, miss: null };
  let isStopped = false;
  try {
    await stream(sent, view, reply);
  } catch (error) {
    isStopped = error.name === "AbortError";
    if (!isStopped) turn.error = explain(error);
  }
  setRunning(null);
  if (models.areSeveral()) turn.model = asked;
  view.finish(reply.usage, isStopped ? "stopped" : reply.reason, inWords(reply.miss, sent));
  announce(`Answer: ${turn.answer || turn.error || "none"}. ${view.summary}`);
  if (chat.turns.includes(turn)) keep(chat);
  showQuestions();
  scrollDown();
}

async function stream(messages, view, reply) {
  const { controller: { signal }, chat } = running;
  const body = {
    model, messages, stream: true, stream_options: { include_usage: true }, ...sampling(),
  };
  const response = await send("v1/chat/completions", { body, signal });
  reply.miss = response.headers.get("x-stolon-cache");
  afterAnswer();
  for await (const event of serverSentEvents(response)) {
    if (event.error) throw new ApiError(500, String(event.error.message));
    const choice = event.choices?.[0];
    if (choice) {
      const { content, reasoning_content: reasoning } = choice.delta ?? {};
      view.add(content ?? "", reasoning ?? "", () => chat === current && scrollDown());
      reply.reason = choice.stop_reason ?? choice.finish_reason ?? reply.reason;
    }
    reply.usage = event.usage ?? reply.usage;
  }
}

function setRunning(state) {
  running = state;
  byId("stop").hidden = !state;
  byId("messages").classList.toggle("answering", Boolean(state));
  byId("send").hidden = Boolean(state);
  const focused = document.activeElement;
  if (focused === document.body || focused?.closest("#questions")) byId("question").focus();
  afterAnswer();
}

/** Whether the end of the conversation was in view when it was last scrolled, and where that was. */
let follows = true;
let place = 0;

/** Shows the end of the conversation, if the user has not scrolled away from it. */
function scrollDown(always = false) {
  const box = byId("messages");
  // A user may have scrolled up without the event having come.
  if (box.scrollTop < place) showToEnd();
  if (always || follows) box.scrollTop = box.scrollHeight;
  showToEnd();
}

function showToEnd() {
  const box = byId("messages");
  place = box.scrollTop;
  follows = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
  byId("to-end").hidden = follows;
}
