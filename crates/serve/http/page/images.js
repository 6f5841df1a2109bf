// The picture that belongs to the next question: it is pasted, dropped or chosen, shown as a
// thumbnail, and can be removed.

import { announce, byId, el } from "./dom.js";

/** The types that the server decodes. */
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
/** Maximum size of a file in bytes. The server takes 16 MiB in a request, with earlier pictures. */
const MOST_BYTES = 4 << 20;

/** Why the model takes no pictures; empty if it does, `null` until the server has said so. */
let refusal = null;
/** The data URL of the picture, or `null`. */
let attached = null;
/** The number of the latest file: an earlier one that is read later is not used. */
let latest = 0;
let changed = () => {};

/** Prepares the field. `onChange` is called when the picture changes. */
export function start(onChange) {
  changed = onChange;
  const chooser = byId("image-file");
  byId("add-image").addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", () => {
    if (chooser.files.length) attachFile(chooser.files[0]);
    // The same file can be chosen again.
    chooser.value = "";
  });
  document.addEventListener("paste", (event) => {
    const file = fileOf(event.clipboardData);
    if (!file || event.target.closest?.("dialog")) return;
    event.preventDefault();
    attachFile(file);
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
    attachFile(fileOf(event.dataTransfer) ?? event.dataTransfer.files[0]);
  });
}

/** Takes over what the server says about its model, an entry of `/v1/models`. */
export function serve({ id, input_modalities: modalities }) {
  const takesImages = modalities?.includes("image");
  refusal = takesImages ? "" : `The model ${id} takes no pictures, only text.`;
  byId("add-image").hidden = !takesImages;
  if (!takesImages && attached) attach(null);
}

/** The picture of the next question as a data URL, or `null`. */
export const current = () => attached;

/** Makes `url` the picture of the next question; `null` removes it. */
export function attach(url) {
  latest += 1;
  attached = url;
  const box = byId("attached");
  box.hidden = !url;
  box.replaceChildren(...(url ? [
    el("img", { src: url, alt: "The picture that is sent with the next message" }),
    el("button", { type: "button", id: "remove-image", onclick: remove }, "Remove the picture"),
  ] : []));
  complain("");
  changed();
}

function remove() {
  attach(null);
  announce("The picture is removed.");
  byId("question").focus();
}

/** The first picture among pasted or dropped things. */
const fileOf = (data) => [...(data?.files ?? [])].find((file) => file.type.startsWith("image/"));

async function attachFile(file) {
  const number = ++latest;
  const problem = problemOf(file);
  if (problem) return complain(problem);
  const url = await dataUrl(file).catch(() => null);
  if (number !== latest) return;
  if (!url) return complain(`The file ${file.name} cannot be read.`);
  attach(url);
  announce("The picture is sent with the next message.");
  byId("question").focus();
}

/** Why a file cannot be sent; empty if it can. */
function problemOf(file) {
  if (refusal === null) return "The server has not answered yet.";
  if (refusal) return refusal;
  if (!TYPES.includes(file.type)) {
    return `${file.name || "The file"} is not a picture that can be sent: expected PNG, JPEG, ` +
      `WebP, GIF or BMP, got ${file.type || "an unknown type"}.`;
  }
  const megabytes = (bytes) => `${(bytes / (1 << 20)).toFixed(1)} MiB`;
  return file.size <= MOST_BYTES ? ""
    : `The picture is too large: expected at most ${megabytes(MOST_BYTES)}, got ` +
      `${megabytes(file.size)}.`;
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
