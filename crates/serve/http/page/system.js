// The system prompt of the shown chat, and its computation before the first question.

import { ApiError, client, explain } from "./api.js";
import { byId, plural } from "./dom.js";

let model = "";
/** The prompt that is shown. */
let shown = "";
let actions;

/** Prepares the box. `actions` has `changed`, with the new text, and `warmed`. */
export function start(given) {
  actions = given;
  byId("warm-system").addEventListener("click", warm);
  byId("system").addEventListener("input", (event) => {
    show(event.target.value);
    actions.changed(shown);
  });
}

/** Takes the name of the model. */
export function serve(name) {
  model = name;
}

/** Shows the system prompt of another chat. */
export function show(text) {
  shown = text;
  if (byId("system").value !== text) byId("system").value = text;
  byId("warmed").textContent = "";
  byId("warm-system").disabled = !text;
  const words = text.split(/\s+/).filter(Boolean).length;
  byId("system-size").textContent = words ? plural(words, "word") : "none";
}

/** Computes the system prompt before the first question. */
async function warm() {
  const system = shown;
  const say = (text) => {
    if (shown === system) byId("warmed").textContent = text;
  };
  byId("warm-system").disabled = true;
  say("…");
  try {
    const prompt = await firstTokens(system);
    if (!prompt.length) throw new ApiError(0, "The chat template puts nothing before a question.");
    // Sent as a request of the client, so that it is cached in the client's namespace.
    const body = { model, prompt, max_tokens: 1 };
    const { usage } = await client("v1/completions", { body });
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const computed = `Computed ${plural(usage.prompt_tokens - cached, "token")}`;
    say(cached ? `${computed}, ${plural(cached, "token")} were cached.` : `${computed}.`);
  } catch (error) {
    say(explain(error));
  }
  byId("warm-system").disabled = !shown;
  actions.warmed();
}

/** The tokens with which all chats with a system prompt begin, for any chat template. */
async function firstTokens(system) {
  const tokens = async (question) => {
    const messages = [{ role: "system", content: system }, { role: "user", content: question }];
    return (await client("tokenize", { body: { model, messages } })).tokens;
  };
  const [one, other] = await Promise.all([tokens("1"), tokens("two")]);
  const end = one.findIndex((token, index) => token !== other[index]);
  return one.slice(0, end < 0 ? one.length : end);
}
