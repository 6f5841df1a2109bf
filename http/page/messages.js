// How questions and answers look: the text, and below an answer the bar of cached against computed
// prompt tokens with its times.

import { count, duration, el, percent, plural } from "./dom.js";

/** A question. */
export function questionView(text) {
  return el("article", { className: "message question", "aria-label": "You" }, text);
}

/** An answer that grows. */
export class AnswerView {
  text = "";
  usage = null;
  reason = null;
  /** The figures in words, when the answer is complete. */
  summary = "";
  #start = performance.now();
  #first = 0;
  #last = 0;
  #note = "";
  #words = el("p", { className: "words" });
  #thoughts = el("details", { className: "thoughts", hidden: true },
    el("summary", {}, "Reasoning"));
  #figures = el("div", { className: "answer-figures" },
    el("span", { className: "busy" }, "waiting"));
  element = el("article", { className: "message answer", "aria-label": "Answer" },
    this.#thoughts, this.#words, this.#figures);

  /** Adds text that has arrived. */
  add(text, reasoning) {
    if (!text && !reasoning) return;
    this.#last = performance.now();
    if (!this.#first) {
      this.#first = this.#last;
      const time = duration(this.#first - this.#start);
      this.#figures.replaceChildren(el("span", { className: "busy" }, `first token after ${time}`));
    }
    this.text += text;
    this.#words.append(text);
    if (reasoning) {
      this.#thoughts.hidden = false;
      this.#thoughts.append(reasoning);
    }
  }

  stopped() {
    this.#note = "stopped";
  }

  failed(message) {
    this.element.append(el("p", { className: "error", role: "alert" }, message));
    this.#note = "failed";
  }

  /** Shows the figures of the complete answer. */
  finish() {
    const facts = [];
    if (this.usage) facts.push(this.#cached());
    if (this.#first) facts.push(`first token after ${duration(this.#first - this.#start)}`);
    const seconds = (this.#last - this.#first) / 1000;
    const generated = this.usage?.completion_tokens ?? 0;
    // Tokens that arrive all at once say nothing about the rate.
    if (generated > 1 && seconds > 0.01) facts.push(`${count((generated - 1) / seconds)} tokens/s`);
    if (this.reason === "length") facts.push("cut off at the limit of tokens");
    if (this.#note) facts.push(this.#note);
    this.summary = facts.join(", ");
    const bar = this.usage ? this.#bar() : null;
    const list = el("ul", { className: "answer-facts" });
    list.append(...facts.map((fact) => el("li", {}, fact)));
    this.#figures.replaceChildren(...[bar, list].filter(Boolean));
  }

  /** The number of cached prompt tokens, or `null` if the server does not tell. */
  get #cachedTokens() {
    return this.usage.prompt_tokens_details?.cached_tokens ?? null;
  }

  #cached() {
    const { prompt_tokens: all } = this.usage;
    const cached = this.#cachedTokens;
    if (cached === null) {
      return `${plural(all, "prompt token")}; the server hides how many are cached`;
    }
    const share = percent(all ? cached / all : 0);
    return `${count(cached)} of ${plural(all, "prompt token")} cached (${share})`;
  }

  #bar() {
    const cached = this.#cachedTokens;
    const all = this.usage.prompt_tokens;
    if (cached === null || !all) return null;
    const part = (name, tokens) => {
      const box = el("span", { className: name, title: `${plural(tokens, "token")} ${name}` },
        tokens / all > 0.15 ? `${count(tokens)} ${name}` : "");
      box.style.flexGrow = tokens;
      return box;
    };
    return el("div", { className: "bar", role: "img", "aria-label": this.#cached() },
      cached ? part("cached", cached) : null,
      all > cached ? part("computed", all - cached) : null);
  }
}
