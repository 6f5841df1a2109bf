// Shows Markdown as elements. The library only splits the text into tokens; the elements are made
// here, from a fixed list, so HTML in a text is shown as text and nothing is loaded.

import { lexer, use } from "./marked.js";
import { el } from "./dom.js";
import { FORMULAS, formula } from "./formulas.js";
import { highlight } from "./syntax.js";

/** Longer texts are shown as they are, because splitting them would make the page slow. */
const MOST_TEXT = 200_000;
/** Addresses to which links may lead. */
const SAFE_LINK = /^(https?:|mailto:)/i;
/** The entities that models write. */
const ENTITIES = {
  "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0",
};

use({ extensions: FORMULAS });

/** A growing text, as elements. Only blocks that have changed are made again. */
export class Markdown {
  element = el("div", { className: "words" });
  #sources = [];

  /** Shows the whole text. */
  show(text) {
    const blocks = split(text);
    let same = 0;
    while (same < blocks.length && blocks[same].raw === this.#sources[same]) same++;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    this.element.append(...blocks.slice(same).map(block));
    this.#sources = blocks.map((token) => token.raw);
  }
}

function split(text) {
  if (text.length <= MOST_TEXT) {
    try {
      return lexer(text).filter((token) => token.type !== "space" && token.type !== "def");
    } catch {
      // The text is then shown as it is.
    }
  }
  return [{ type: "text", raw: text, text }];
}

/** The element of a block. */
function block(token) {
  switch (token.type) {
    case "paragraph": return el("p", {}, ...inline(token.tokens));
    // The page itself has a heading above the conversation.
    case "heading": return el(`h${Math.min(token.depth + 2, 6)}`, {}, ...inline(token.tokens));
    case "code": return code(token);
    case "blockquote": return el("blockquote", {}, ...token.tokens.map(block));
    case "list": return list(token);
    case "table": return table(token);
    case "hr": return el("hr");
    case "formula": return el("p", {}, formula(token));
    case "space": return document.createTextNode("");
    case "text":
      return token.tokens
        ? el("span", {}, ...inline(token.tokens))
        : el("p", { className: "as-it-is" }, token.text);
    default: return el("p", { className: "as-it-is" }, token.raw.trimEnd());
  }
}

function code(token) {
  const copy = el("button", {
    type: "button", className: "copy-code", onclick: (event) => copyText(event.target, token.text),
  }, "Copy");
  const language = (token.lang ?? "").split(/\s/)[0].slice(0, 30);
  const head = el("div", { className: "code-head" }, el("span", {}, language), copy);
  const text = el("pre", { tabIndex: 0, "aria-label": `Code ${language}`.trim(), role: "region" },
    el("code", {}, ...highlight(token.text, language)));
  return el("div", { className: "code" }, head, text);
}

function list(token) {
  const item = (entry) => {
    const box = entry.task
      ? el("input", {
        type: "checkbox", checked: entry.checked, disabled: true,
        "aria-label": entry.checked ? "done" : "to do",
      })
      : null;
    const blocks = entry.tokens.filter((token) => token.type !== "checkbox").map(block);
    return el("li", {}, box, ...blocks);
  };
  const start = token.ordered && token.start !== 1 ? Number(token.start) || undefined : undefined;
  return el(token.ordered ? "ol" : "ul", { start }, ...token.items.map(item));
}

function table(token) {
  const row = (cells, tag) => el("tr", {}, ...cells.map((cell, column) => {
    const element = el(tag, {}, ...inline(cell.tokens));
    element.style.textAlign = token.align[column] ?? "";
    return element;
  }));
  return el("div", { className: "table", tabIndex: 0, role: "region", "aria-label": "Table" },
    el("table", {},
      el("thead", {}, row(token.header, "th")),
      el("tbody", {}, ...token.rows.map((cells) => row(cells, "td")))));
}

/** The nodes of the text within a block. */
function inline(tokens = []) {
  return tokens.map((token) => {
    switch (token.type) {
      case "strong": case "em": case "del": return el(token.type, {}, ...inline(token.tokens));
      case "codespan": return el("code", {}, token.text);
      case "br": return el("br");
      case "link": return link(token);
      case "formula": return formula(token);
      // Images are not loaded, because the request would tell others what was asked.
      case "image": return link({ ...token, tokens: [{ type: "text", text: token.text }] });
      case "text": case "escape":
        return token.tokens ? el("span", {}, ...inline(token.tokens)) : plain(token.text);
      default: return token.raw;
    }
  });
}

const plain = (text) => text.replace(/&(amp|lt|gt|quot|#39|nbsp);/g, (name) => ENTITIES[name]);

function link(token) {
  const words = inline(token.tokens);
  if (!SAFE_LINK.test(token.href)) return el("span", { title: token.href }, ...words);
  const props = { href: token.href, target: "_blank", rel: "noopener noreferrer nofollow" };
  return el("a", { ...props, title: token.title ?? token.href }, ...words);
}

/** Copies a text, and shows on the button that it was copied. */
export async function copyText(button, text) {
  const label = button.textContent;
  let said = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Only pages from HTTPS or from this machine may use the clipboard.
    said = copyBySelection(text) ? "Copied" : "Not allowed";
  }
  button.textContent = said;
  setTimeout(() => { button.textContent = label; }, 1200);
}

function copyBySelection(text) {
  const field = el("textarea", { className: "hidden-text", value: text, "aria-hidden": "true" });
  const focused = document.activeElement;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return copied;
}
