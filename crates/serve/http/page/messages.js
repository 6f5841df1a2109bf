// Shows a turn: the question, the answer as Markdown, the bar of cached and computed prompt tokens
// with the times, and the buttons.

import { bytes, count, duration, el, percent, plural } from "./dom.js";
import { copyText, Markdown } from "./markdown.js";

/** Maximum number of times per second that a growing answer is drawn. */
const DRAWINGS = 20;

/** The text below an answer that the model did not end. */
const NOTES = {
  length: "cut off at the limit of tokens",
  repetition: "ended because it repeated itself",
  stopped: "stopped",
};

const action = (name, title, onclick, className = "") =>
  el("button", { type: "button", title, onclick, className }, name);
/** The class of buttons that begin an answer or replace one: not while another answer grows. */
const IDLE = "idle-only";

/** Maximum length of a file's text that is shown, in characters. */
const MOST_TEXT = 20_000;

/**
 * A turn of a chat, which may be growing. `actions` has `edit`, `regenerate`, `remove` and `choose`
 * (another version), and `isLast`.
 */
export class TurnView {
  #turn;
  #actions;
  #question;
  #words = new Markdown();
  #thoughts = el("div", { className: "thoughts-text" });
  #thinking = el("details", { className: "thoughts", hidden: true },
    el("summary", {}, "Reasoning"), this.#thoughts);
  #figures = el("div", { className: "answer-figures" });
  #buttons = el("div", { className: "actions" });
  #answer = el("article", { className: "message answer", "aria-label": "Answer" },
    this.#thinking, this.#words.element, this.#figures, this.#buttons);
  element = el("div", { className: "turn" });
  #start = performance.now();
  #first = 0;
  #last = 0;
  /** Number of parts of the answer that have arrived. Most parts are one token. */
  #parts = 0;
  #timer = null;

  constructor(turn, actions) {
    this.#turn = turn;
    this.#actions = actions;
    this.#question = this.#questionView();
    this.element.append(this.#question, this.#answer);
    this.#draw();
  }

  #questionView() {
    const buttons = el("div", { className: "actions" },
      action("Copy", "Copy the question", (event) =>
        copyText(event.target, this.#turn.question)),
      action("Edit", "Change the question and ask again", () => this.#edit(), IDLE),
      action("Delete", "Delete the question and its answer", () => this.#actions.remove()));
    return el("div", { className: "question-box" },
      el("article", { className: "message question", "aria-label": "You" },
        this.#turn.image ? el("img", {
          className: "sent-image", src: this.#turn.image, alt: "Your picture",
        }) : null,
        ...(this.#turn.files ?? []).map(({ name, text }) => el("details", { className: "file" },
          el("summary", {}, name, " ", el("span", { className: "quiet" }, bytes(text.length))),
          el("pre", { className: "text", tabIndex: 0 }, text.slice(0, MOST_TEXT)))),
        this.#turn.question),
      buttons);
  }

  /** Puts a field in the place of the question. */
  #edit() {
    const field = el("textarea", {
      value: this.#turn.question, rows: Math.min(this.#turn.question.split("\n").length + 1, 12),
      "aria-label": "Changed question",
    });
    const close = () => {
      form.replaceWith(this.#question);
      this.#question.querySelector("button:nth-child(2)").focus();
    };
    const form = el("form", {
      className: "edit",
      onsubmit: (event) => {
        event.preventDefault();
        const text = field.value.trim();
        if (!text) return;
        // The turn stays as another version, with its question.
        form.replaceWith(this.#question);
        this.#actions.edit(text);
      },
      onkeydown: (event) => {
        if (event.key === "Escape") close();
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        form.requestSubmit();
      },
    }, field, el("div", { className: "row" },
      el("button", { type: "submit", className: "primary" }, "Ask again"),
      el("button", { type: "button", onclick: close }, "Cancel"),
      this.#actions.isLast ? null
        : el("span", { className: "quiet" }, "The turns after it stay as another version.")));
    this.#question.replaceWith(form);
    field.focus();
  }

  /** Waits for the answer. */
  begin() {
    this.#start = performance.now();
    this.#buttons.replaceChildren();
    this.#figures.replaceChildren(el("span", { className: "busy" }, "waiting"));
  }

  /** Adds text that has arrived. `drawn` is called when it is shown. */
  add(text, reasoning, drawn) {
    if (!text && !reasoning) return;
    this.#last = performance.now();
    this.#first ||= this.#last;
    this.#parts += 1;
    this.#turn.answer = (this.#turn.answer ?? "") + text;
    if (reasoning) this.#turn.reasoning = (this.#turn.reasoning ?? "") + reasoning;
    this.#timer ??= setTimeout(() => {
      this.#timer = null;
      this.#draw();
      this.#progress();
      drawn();
    }, 1000 / DRAWINGS);
  }

  #progress() {
    const facts = [`first token after ${duration(this.#first - this.#start)}`];
    const seconds = (this.#last - this.#first) / 1000;
    if (seconds > 0.3) facts.push(`about ${rate((this.#parts - 1) / seconds)}`);
    this.#figures.replaceChildren(el("span", { className: "busy" }, facts.join(", ")));
  }

  /**
   * Keeps the figures of the answer: the server's `usage`, why the answer has ended, and why tokens
   * of its prompt were not cached, in words.
   */
  finish(usage, reason, miss) {
    clearTimeout(this.#timer);
    this.#turn.figures = {
      prompt: usage?.prompt_tokens ?? null,
      cached: usage?.prompt_tokens_details?.cached_tokens ?? null,
      generated: usage?.completion_tokens ?? null,
      first: this.#first ? this.#first - this.#start : null,
      total: performance.now() - this.#start,
      last: this.#first ? this.#last - this.#start : null,
      note: NOTES[reason] ?? "",
      miss: miss?.reason ?? "",
      help: miss?.help ?? "",
    };
    this.#draw();
    this.showFigures();
  }

  #draw() {
    this.#words.show(this.#turn.answer ?? "");
    this.#thinking.hidden = !this.#turn.reasoning;
    if (this.#turn.reasoning) this.#thoughts.textContent = this.#turn.reasoning;
  }

  /** Shows the figures of a complete answer, and the buttons. */
  showFigures() {
    const { figures, error, answer } = this.#turn;
    const parts = [];
    if (error) parts.push(el("p", { className: "error", role: "alert" }, error));
    if (figures) {
      if (figures.prompt && figures.cached !== null) parts.push(bar(figures));
      const list = el("ul", { className: "answer-facts" });
      list.append(...facts(figures).map((fact) => el("li", {}, fact)));
      if (this.#turn.model) list.append(el("li", {}, `by ${this.#turn.model}`));
      parts.push(list);
      if (figures.help) {
        parts.push(el("details", { className: "why" }, el("summary", {}, figures.miss),
          el("p", {}, figures.help)));
      }
    }
    this.#figures.replaceChildren(...parts);
    const again = answer ? "Regenerate" : "Try again";
    this.#buttons.replaceChildren(...[
      ...this.#versions(),
      answer ? action("Copy", "Copy the answer", (event) => copyText(event.target, answer)) : null,
      action(again, "Ask the same question again", () => this.#actions.regenerate(), IDLE),
    ].filter(Boolean));
  }

  /** The buttons that lead to the other versions of the turn. */
  #versions() {
    const { versions, version } = this.#turn;
    if (!versions) return [];
    const step = (name, sign, by) => el("button", {
      type: "button", title: `${name} version`, "aria-label": `${name} version`,
      className: `version ${IDLE}`,
      disabled: versions[version + by] === undefined,
      onclick: () => this.#actions.choose(version + by, by),
    }, sign);
    const place = el("span", { className: "quiet" }, `${version + 1} of ${versions.length}`);
    return [step("Previous", "‹", -1), place, step("Next", "›", 1)];
  }

  /** Moves the focus to the button of the previous (-1) or next (1) version, or the other one. */
  focusVersion(by) {
    const buttons = [...this.#buttons.querySelectorAll(".version")];
    const [first, other] = by < 0 ? buttons : buttons.reverse();
    (first.disabled ? other : first).focus({ preventScroll: true });
  }

  /** The figures in words. */
  get summary() {
    return this.#turn.figures ? facts(this.#turn.figures).join(", ") : "";
  }
}

const rate = (tokensPerSecond) =>
  `${tokensPerSecond < 10 ? tokensPerSecond.toFixed(1) : count(tokensPerSecond)} tokens/s`;

function facts(figures) {
  const { prompt, generated, first, last, total, note, miss, help } = figures;
  const facts = [];
  if (prompt !== null) facts.push(cachedInWords(figures));
  if (miss && !help) facts.push(miss);
  if (first !== null) facts.push(`first token after ${duration(first)}`);
  if (generated) {
    const seconds = (last - first) / 1000;
    // If all tokens arrive at once, there is no rate.
    const tokensPerSecond =
      generated > 1 && seconds > 0.01 ? (generated - 1) / seconds : generated / (total / 1000);
    facts.push(`${plural(generated, "token")}, ${rate(tokensPerSecond)}`);
  }
  if (note) facts.push(note);
  return facts;
}

function cachedInWords({ prompt, cached, miss }) {
  if (cached === null) {
    return `${plural(prompt, "prompt token")}; the server hides how many are cached`;
  }
  const share = percent(prompt ? cached / prompt : 0);
  const computed = !cached ? "nothing of it was remembered"
    : prompt > cached ? `${count(prompt - cached)} are new` : "";
  return `${count(cached)} of ${plural(prompt, "prompt token")} (${share}) from the cache` +
    (computed && !miss ? `, ${computed}` : "");
}

function bar(figures) {
  const { prompt, cached } = figures;
  const part = (name, tokens, words) => {
    const box = el("span", { className: name, title: `${plural(tokens, "token")} ${words}` },
      tokens / prompt > 0.2 ? `${count(tokens)} ${words}` : "");
    box.style.flexGrow = tokens;
    return box;
  };
  const stripe = el("div", { className: "bar", role: "img", "aria-label": cachedInWords(figures) },
    cached ? part("cached", cached, "from the cache") : null,
    prompt > cached ? part("computed", prompt - cached, "computed") : null);
  return el("div", { className: "stripe" },
    el("span", { title: "All that the model has read for this answer" }, "Prompt"), stripe);
}
