// The chats: their state, and the requests to /v1/chat/completions. Chats live in this page only;
// a reload forgets them.

import { ApiError, client, send, serverSentEvents } from "./api.js";
import { announce, brief, byId, el, plural } from "./dom.js";
import { AnswerView, questionView } from "./messages.js";

const DEMO_MODEL = "stolon-demo";

const chats = [];
let current;
let model = "";
let handbook = null;
/** Ends the answer that is being streamed. */
let running = null;
let afterAnswer = () => {};

/** Prepares the chat. `answered` is called when an answer has begun or ended. */
export function start(answered) {
  afterAnswer = answered;
  byId("new-chat").addEventListener("click", () => open(newChat(handbook?.system ?? "")));
  byId("same-system").addEventListener("click", () => open(newChat(current.system)));
  byId("load-handbook").addEventListener("click", useHandbook);
  byId("warm-system").addEventListener("click", warmSystem);
  byId("stop").addEventListener("click", () => running?.abort());
  byId("system").addEventListener("input", (event) => {
    current.system = event.target.value;
    showSystemSize();
  });
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const question = byId("question").value.trim();
    if (question && !running) ask(question);
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask").requestSubmit();
  });
  open(newChat(""));
}

/** Finds out which model is served. Throws if a key is missing. */
export async function connect() {
  const { data } = await client("v1/models");
  model = data[0].id;
  byId("model").textContent = model;
  document.title = `${model} · Stolon`;
  if (model === DEMO_MODEL && !handbook) {
    handbook = await client("page/handbook.json").catch(() => null);
    if (handbook && !current.messages.length && !current.system) useHandbook();
    else show();
  }
}

function useHandbook() {
  current.system = handbook.system;
  show();
}

function newChat(system) {
  const chat = { name: `Chat ${chats.length + 1}`, system, messages: [], views: [] };
  chats.push(chat);
  return chat;
}

function open(chat) {
  current = chat;
  show();
  byId("question").focus({ preventScroll: true });
}

/** Shows the current chat. */
function show() {
  const tab = (chat) =>
    el("button", {
      type: "button", "aria-pressed": String(chat === current), onclick: () => open(chat),
    }, chat.name);
  byId("chats").replaceChildren(...(chats.length > 1 ? chats.map(tab) : []));
  byId("system").value = current.system;
  byId("messages").replaceChildren(...current.views);
  byId("messages").hidden = current.views.length === 0;
  byId("demo-note").hidden = !handbook || chats.length > 2;
  byId("load-handbook").hidden = !handbook || current.system === handbook.system;
  showSystemSize();
  showQuestions();
  scrollDown();
}

function showSystemSize() {
  byId("warmed").textContent = "";
  byId("warm-system").disabled = !current.system;
  const words = current.system.split(/\s+/).filter(Boolean).length;
  byId("system-size").textContent = words ? plural(words, "word") : "none";
}

/** Computes the system prompt before anything is asked. */
async function warmSystem() {
  const { system } = current;
  const shown = (text) => {
    if (current.system === system) byId("warmed").textContent = text;
  };
  byId("warm-system").disabled = true;
  shown("…");
  try {
    const prompt = await systemTokens(system);
    if (!prompt.length) throw new ApiError(0, "The chat template puts nothing before a question.");
    // As a request of the client, so that it is cached where the client's requests look for it.
    const body = { model, prompt, max_tokens: 1 };
    const { usage } = await client("v1/completions", { body });
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const computed = `Computed ${plural(usage.prompt_tokens - cached, "token")}`;
    shown(cached ? `${computed}, ${plural(cached, "token")} were cached.` : `${computed}.`);
  } catch (error) {
    shown(explain(error));
  }
  byId("warm-system").disabled = !current.system;
  afterAnswer();
}

/** The tokens with which all chats with a system prompt begin, whatever the chat template does. */
async function systemTokens(system) {
  const tokens = async (question) => {
    const messages = [{ role: "system", content: system }, { role: "user", content: question }];
    return (await client("tokenize", { body: { model, messages } })).tokens;
  };
  const [one, other] = await Promise.all([tokens("1"), tokens("two")]);
  const end = one.findIndex((token, index) => token !== other[index]);
  return one.slice(0, end < 0 ? one.length : end);
}

/** Example questions, while the demo model has its handbook. */
function showQuestions() {
  const asked = new Set(current.messages.map((message) => message.content));
  const offered = handbook && current.system === handbook.system ? handbook.questions : [];
  const button = (question) =>
    el("button", { type: "button", disabled: running !== null, onclick: () => ask(question) },
      question);
  const left = offered.filter((question) => !asked.has(question));
  byId("questions").replaceChildren(...left.slice(0, chatsHaveAnswers() ? 3 : 5).map(button));
}

const chatsHaveAnswers = () => chats.some((chat) => chat.messages.length > 0);

function sampling() {
  const inputs = byId("sampling").querySelectorAll("input");
  const set = [...inputs].filter((input) => input.value !== "" && input.validity.valid);
  return Object.fromEntries(set.map((input) => [input.name, Number(input.value)]));
}

/** Sends a question in the current chat and streams the answer. */
async function ask(question) {
  const chat = current;
  const answer = new AnswerView();
  chat.messages.push({ role: "user", content: question });
  chat.views.push(questionView(question), answer.element);
  if (chat.messages.length === 1) chat.name = brief(question, 24);
  byId("question").value = "";
  setRunning(new AbortController());
  show();
  const system = chat.system ? [{ role: "system", content: chat.system }] : [];
  const body = {
    model,
    messages: [...system, ...chat.messages],
    stream: true,
    stream_options: { include_usage: true },
    ...sampling(),
  };
  try {
    await stream(body, answer);
  } catch (error) {
    if (error.name === "AbortError") answer.stopped();
    else answer.failed(explain(error));
  }
  answer.finish();
  // An answer without text cannot be part of the next prompt, so its question is not either.
  if (answer.text) chat.messages.push({ role: "assistant", content: answer.text });
  else {
    chat.messages.pop();
    byId("question").value ||= question;
  }
  announce(`Answer: ${answer.text || "none"}. ${answer.summary}`);
  setRunning(null);
  showQuestions();
  scrollDown();
}

async function stream(body, answer) {
  const options = { body, signal: running.signal };
  const response = await send("v1/chat/completions", options);
  afterAnswer();
  for await (const event of serverSentEvents(response)) {
    if (event.error) throw new ApiError(500, String(event.error.message));
    const choice = event.choices?.[0];
    if (choice) {
      answer.add(choice.delta?.content ?? "", choice.delta?.reasoning_content ?? "");
      if (choice.finish_reason) answer.reason = choice.finish_reason;
      scrollDown();
    }
    if (event.usage) answer.usage = event.usage;
  }
}

/** What to do about an error, in the words of the page. */
function explain(error) {
  if (error.status === 401) return `${error.message}. Enter it under “Keys”.`;
  if (error.status === 429) return `${error.message}. Try again in a moment.`;
  return error.message;
}

function setRunning(controller) {
  running = controller;
  byId("stop").hidden = !controller;
  byId("send").hidden = Boolean(controller);
  const focused = document.activeElement;
  if (focused === document.body || focused?.closest("#questions")) byId("question").focus();
  afterAnswer();
}

function scrollDown() {
  const box = byId("messages");
  box.scrollTop = box.scrollHeight;
}
