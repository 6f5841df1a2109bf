// Colors of program code. The code is only split into words, strings, numbers and comments: enough
// to read it, and the same for many languages. Code that is not known stays as it is.

import { el } from "./dom.js";

/** Longer code is shown without colors, because splitting it would make the page slow. */
const MOST_CODE = 50_000;

const STRING = String.raw`"(?:\\.|[^"\\\n])*"?`;
const QUOTED = String.raw`'(?:\\.|[^'\\\n])*'?`;
/** A character; a lifetime such as 'a is none. */
const CHARACTER = String.raw`'(?:\\[^\n]{1,8}?|[^'\\\n])'`;
const BLOCK = String.raw`/\*[^]*?(?:\*/|$)`;
const NUMBER = String.raw`\b(?:0[xX][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)`;
const WORD = String.raw`[\p{L}_$][\p{L}\p{N}_$]*`;

const words = (text) => new Set(text.split(/\s+/));
const COMMON = "if else for while return break continue true false in";
const KEYWORDS = {
  c: words(`${COMMON}
    abstract as async await bool boolean case catch char class const constructor default defer
    delete do double enum export extends extern final finally float fn from func function go goto
    impl implements import instanceof int interface let long loop macro_rules match mod move mut
    namespace new nil null nullptr override package private protected pub public range ref self Self
    short signed sizeof static struct super switch template this throw throws trait try type typedef
    typename typeof undefined union unsafe unsigned use using var virtual void volatile where
    yield`),
  python: words(`${COMMON}
    False None True and as assert async await case class def del elif except finally from global
    import is lambda match nonlocal not or pass raise self try with yield`),
  shell: words(`${COMMON}
    begin case cd class def do done echo elif end esac exit export fi function local module nil no
    null require self set source then unless unset until yes`),
  sql: words(`all and as between by case create delete distinct do else end exists from function
    group having if in index inner insert into is join key left like limit local nil not null on or
    order outer primary return right select table then union update values view when where`),
  data: words("true false null"),
};

const language = (comment, strings, keywords, isCaseless = false) => ({
  pattern: new RegExp([`(?<comment>${comment})`, `(?<string>${strings})`, `(?<number>${NUMBER})`,
    `(?<word>${WORD})`].join("|"), "gu"),
  keywords: KEYWORDS[keywords], isCaseless,
});
const none = "(?!)";
const KINDS = {
  c: language(`//.*|${BLOCK}`, `${STRING}|${QUOTED}|\`(?:\\\\.|[^\`\\\\])*\`?`, "c"),
  rust: language(`//.*|${BLOCK}`, `${STRING}|${CHARACTER}`, "c"),
  python: language("#.*", `"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|${STRING}|${QUOTED}`, "python"),
  shell: language(String.raw`(?<![^\s])#.*`, `${STRING}|${QUOTED}`, "shell"),
  sql: language(`--.*|${BLOCK}`, `${STRING}|${QUOTED}`, "sql", true),
  data: language(none, STRING, "data"),
  markup: language("<!--[^]*?(?:-->|$)", `${STRING}|${QUOTED}`, "data"),
};
const NAMES = {
  c: "c h cpp c++ cc hpp cs csharp java js javascript jsx mjs ts typescript tsx go golang swift " +
    "kotlin kt php scala dart zig css scss cuda wgsl glsl",
  rust: "rust rs",
  python: "python py python3",
  shell: "sh bash shell zsh fish console ruby rb perl toml yaml yml ini dockerfile makefile " +
    "cmake r elixir nix",
  sql: "sql lua haskell postgres sqlite",
  data: "json jsonc json5",
  markup: "html xml svg",
};
const KIND_OF = new Map(Object.entries(NAMES).flatMap(([kind, names]) =>
  names.split(" ").map((name) => [name, KINDS[kind]])));

/** The nodes of code in a language, as it is called behind the backticks. */
export function highlight(code, name) {
  const kind = KIND_OF.get(name.toLowerCase());
  if (!kind || code.length > MOST_CODE) return [code];
  const nodes = [];
  let end = 0;
  for (const found of code.matchAll(kind.pattern)) {
    const type = typeOf(found, kind);
    if (!type) continue;
    nodes.push(code.slice(end, found.index), el("span", { className: `code-${type}` }, found[0]));
    end = found.index + found[0].length;
  }
  nodes.push(code.slice(end));
  return nodes.filter((node) => node !== "");
}

function typeOf({ groups }, { keywords, isCaseless }) {
  if (groups.word === undefined) {
    return Object.keys(groups).find((type) => groups[type] !== undefined);
  }
  const word = isCaseless ? groups.word.toLowerCase() : groups.word;
  return keywords.has(word) ? "keyword" : null;
}
