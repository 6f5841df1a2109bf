// Formulas in Markdown, written as models write them: `\(x\)` and `$x$` in a line, `\[x\]` and
// `$$x$$` on their own. A library makes MathML elements of them, and is loaded with the first one.

import { el } from "./dom.js";

/** Longer formulas are shown as they are written: an end is not searched for any further. */
const MOST_FORMULA = 2_000;
/** What a formula may do: it loads nothing, and has no links and no elements of any size. */
const OPTIONS = { trust: false, strict: false, throwOnError: true, maxExpand: 500, maxSize: [20, 100] };

const ANY = `([^]{1,${MOST_FORMULA}}?)`;
const DISPLAYED = String.raw`(?:\$\$${ANY}\$\$|\\\[${ANY}\\\])`;
// An amount of money is no formula: no space follows the first `$` or precedes the last one, no
// digit follows it, and there is no code (in backticks, U+0060) in between.
const IN_LINE = String.raw`(?:\\\(${ANY}\\\)|\$(?![\s$])((?:\\[^]|[^$\x60\\\n]){1,${MOST_FORMULA}}?)(?<!\s)\$(?![\d$]))`;

let temml = null;

/** The tokens of formulas, as extensions of the library that splits Markdown. */
export const FORMULAS = [
  // Within a paragraph, the first of the next two finds it.
  extension("block", new RegExp(String.raw`^ {0,3}${DISPLAYED}[ \t]*(?:\n+|$)`), null, true),
  extension("inline", new RegExp(`^${DISPLAYED}`), /\$\$|\\\[/, true),
  extension("inline", new RegExp(`^${IN_LINE}`), /\$(?![\s$])|\\\(/, false),
];

function extension(level, pattern, start, isDisplayed) {
  const name = `${level} formula`;
  return {
    name, level,
    start: start && ((text) => {
      const at = text.search(start);
      return at < 0 ? undefined : at;
    }),
    tokenizer: (text) => {
      const found = pattern.exec(text);
      const written = found?.slice(1).find((part) => part !== undefined);
      return written?.trim() && { type: "formula", raw: found[0], text: written, isDisplayed };
    },
  };
}

/** The element of a formula: at first, and if it is none, what was written. */
export function formula({ raw, text, isDisplayed }) {
  // One that is wider than the page can be scrolled with the keyboard, too.
  const props = isDisplayed ? { className: "formula displayed", tabIndex: 0 } : { className: "formula" };
  const element = el("span", props, raw.trim());
  const render = () => {
    try {
      const made = el("span");
      temml.render(text, made, { ...OPTIONS, displayMode: isDisplayed });
      element.replaceChildren(...made.childNodes);
    } catch {
      // It stays as it is written.
    }
  };
  if (temml) render();
  else import("./temml.js").then((library) => { temml = library.default; render(); }, () => {});
  return element;
}
