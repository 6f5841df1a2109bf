// What is sent with the next question: a picture and text files. They are pasted, dropped or
// chosen, shown above the question, and can be removed.

import { announce, byId, bytes, el } from "./dom.js";

/** The types of pictures that the server decodes. */
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
/** Maximum size of a picture in bytes. A request has 16 MiB at most, with earlier pictures. */
const MOST_BYTES = 4 << 20;
/** Maximum size of a text file in bytes: far more than most contexts have room for. */
const MOST_TEXT = 256 << 10;
/** Maximum number of text files of a question. */
const MOST_FILES = 8;

/** Why the model takes no pictures; empty if it does, `null` until the server has said so. */
let refusal = null;
/** The data URL of the picture, or `null`. */
let image = null;
/** The text files: `name`, `text`. */
let files = [];
/** The number of the latest picture: an earlier one that is read later is not used. */
let latest = 0;
let changed = () => {};

/** Prepares the field. `onChange` is called when the picture changes. */
export function start(onChange) {
  changed = onChange;
  const chooser = byId("file");
  byId("attach").addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", () => {
    add([...chooser.files]);
    // The same file can be chosen again.
    chooser.value = "";
  });
  document.addEventListener("paste", (event) => {
    const pasted = [...(event.clipboardData?.files ?? [])];
    if (!pasted.length || event.target.closest?.("dialog")) return;
    event.preventDefault();
    add(pasted);
  });
  const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragover", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  const ended = () => document.body.classList.remove("dropping");
  document.addEventListener("dragleave", (event) => event.relatedTarget || ended());
  document.addEventListener("drop", (event) => {
    ended();
    if (!holdsFiles(event)) return;
    event.preventDefault();
    add([...event.dataTransfer.files]);
  });
}

/** Takes over what the server says about the model, an entry of `/v1/models`. */
export function serve({ id, input_modalities: modalities }) {
  const takesImages = modalities?.includes("image");
  refusal = takesImages ? "" : `The model ${id} takes no pictures, only text.`;
  byId("attach").title = `Sends a text file${takesImages ? " or a picture" : ""} with the ` +
    "message. It can also be pasted, or dropped onto the page.";
  if (!takesImages && image) attach(null);
}

/** The picture of the next question as a data URL, or `null`. */
export const picture = () => image;

/** Returns what is sent with the question, as members of a turn, and removes it. */
export function take() {
  const taken = { ...(image && { image }), ...(files.length && { files }) };
  files = [];
  attach(null);
  return taken;
}

/** Makes `url` the picture of the next question; `null` removes it. */
export function attach(url) {
  latest += 1;
  image = url;
  complain("");
  show();
  changed();
}

function show() {
  const remove = (what, action, id) => el("button", {
    type: "button", id, "aria-label": `Remove ${what}`, onclick: () => {
      action();
      announce(`Removed: ${what}.`);
      byId("question").focus();
    },
  }, "Remove");
  const picture = image && el("span", { className: "attachment" },
    el("img", { src: image, alt: "The picture that is sent with the next message" }),
    remove("the picture", () => attach(null), "remove-image"));
  const texts = files.map((file) => el("span", { className: "attachment" },
    el("span", { className: "file-name" }, file.name),
    el("span", { className: "quiet" }, bytes(file.text.length)),
    remove(file.name, () => {
      files = files.filter((other) => other !== file);
      show();
    })));
  const parts = [picture, ...texts].filter(Boolean);
  byId("attached").hidden = !parts.length;
  byId("attached").replaceChildren(...parts);
}

/** Attaches files one after the other, until one of them cannot be sent. */
async function add(given) {
  complain("");
  for (const file of given) {
    const problem = file.type.startsWith("image/") ? await addPicture(file) : await addText(file);
    if (problem) return complain(problem);
  }
  byId("question").focus();
}

/** Attaches a picture. Returns why it cannot be sent; nothing if it can. */
async function addPicture(file) {
  const number = ++latest;
  const problem = problemOf(file);
  if (problem) return problem;
  const url = await dataUrl(file).catch(() => null);
  if (number !== latest) return "";
  if (!url) return `The file ${file.name} cannot be read.`;
  attach(url);
  announce("The picture is sent with the next message.");
  return "";
}

function problemOf(file) {
  if (refusal === null) return "The server has not answered yet.";
  if (refusal) return refusal;
  if (!TYPES.includes(file.type)) {
    return `${file.name || "The file"} is not a picture that can be sent: expected PNG, JPEG, ` +
      `WebP, GIF or BMP, got ${file.type}.`;
  }
  return file.size <= MOST_BYTES ? ""
    : `The picture is too large: expected at most ${bytes(MOST_BYTES)}, got ${bytes(file.size)}.`;
}

/** Attaches a text file. Returns why it cannot be sent; nothing if it can. */
async function addText(file) {
  const name = file.name.replace(/[\s`]+/g, " ").slice(0, 100) || "text";
  const start = await file.slice(0, 4).text().catch(() => "");
  if (start === "%PDF") {
    return `${name} is a PDF file, whose text the page cannot read: copy the text, or save it as ` +
      "a text file.";
  }
  if (file.size > MOST_TEXT) {
    return `${name} is too large: expected a text of at most ${bytes(MOST_TEXT)}, got ` +
      `${bytes(file.size)}.`;
  }
  if (files.length === MOST_FILES) return `At most ${MOST_FILES} files can be sent with a message.`;
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    text = "\0";
  }
  if (text.includes("\0")) {
    return `${name} cannot be sent: expected a text (UTF-8) or a picture, got ` +
      `${file.type || "another kind of file"}.`;
  }
  files = [...files, { name, text }];
  show();
  announce(`${name} is sent with the next message.`);
  return "";
}

function complain(problem) {
  byId("image-error").textContent = problem;
  byId("image-error").hidden = !problem;
}

const dataUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.addEventListener("load", () => resolve(reader.result));
  reader.addEventListener("error", () => reject(reader.error));
  reader.readAsDataURL(file);
});

/** The content of a user's message: the picture and the files come before the question. */
export function contentOf({ question, image, files = [] }) {
  const text = [...files.map(fenced), question].join("\n\n");
  return image ? [{ type: "image_url", image_url: { url: image } }, { type: "text", text }] : text;
}

/** A file as Markdown, in a fence that is longer than any within it. */
function fenced({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((ticks) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}
