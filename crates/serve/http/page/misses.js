// Says why tokens of a prompt were computed, by the header `x-stolon-cache` of the reply.

import { brief, plural } from "./dom.js";

const PUT_LAST = "What changes from one request to the next, such as the time, costs least at " +
  "the end of the conversation.";

/** By reason: why tokens were not in the cache, and what helps. */
const REASONS = {
  evicted: ["they had been forgotten (evicted)",
    "More memory (--kv-memory), a disk tier (--kv-cache-dir) or a pin keeps them."],
  not_computed: ["an earlier request with them was not completed"],
  no_checkpoint: ["no checkpoint of the model's state is there",
    "This model has a recurrent state, which is kept at some places only."],
  options_changed: ["the settings of the chat template differ",
    "Options such as enable_thinking should stay the same within a conversation."],
  message_changed: ["a message differs from that of an earlier prompt", PUT_LAST],
  message_removed: ["an earlier prompt had one more message", PUT_LAST],
  message_inserted: ["a message was inserted into an earlier prompt", PUT_LAST],
  answer_changed: ["an answer has changed", "Answers that are sent back as they came are found."],
  reasoning_changed: ["the reasoning of an answer has changed",
    "Answers that are sent back as they came are found."],
  tools_changed: ["the tools have changed", "The same tools in the same order are found."],
  template_changed: ["the chat template shows earlier messages differently",
    "It drops the reasoning of earlier answers, for example, or prints the date."],
  text_changed: ["the text differs from that of an earlier prompt"],
  other_tokens: ["the same text has other tokens",
    "The server can keep the tokens of answers (--history exact-tokens)."],
  other_salt: ["the same prompt was asked with another cache salt or by another tenant"],
  other_adapter: ["the same prompt was asked of another adapter",
    "What one adapter has computed is of no use for another."],
};

/**
 * Why tokens of a prompt of these messages were computed again: `reason`, and `help` if there is
 * any. `null` if all that the server had seen before was found.
 */
export function inWords(header, messages) {
  if (!header) return null;
  const fields = Object.fromEntries(header.split(", ").map((field) => field.split("=")));
  const index = fields.message === undefined ? -1 : Number(fields.message);
  const message = messages[index];
  // Then the earlier prompt has another question in the place of this one: nothing could be found.
  if (message && index === messages.length - 1) return null;
  const [why, help = ""] = REASONS[fields.reason] ?? [fields.reason];
  const reason = `${plural(Number(fields.lost), "token")} computed again: ${why}`;
  const where = message ? `It is ${nameOf(message)}. ` : "";
  return { reason, help: where + help };
}

function nameOf({ role, content }) {
  const names = { system: "the system prompt", user: "your message", assistant: "the answer" };
  const text = typeof content === "string" ? content : content.at(-1).text;
  return `${names[role] ?? role} “${brief(text, 60)}”`;
}
