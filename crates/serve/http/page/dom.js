// Builds elements. Texts become text nodes only, so nothing that a model or a user wrote is ever
// parsed as HTML.

/** An element with properties, attributes (names with a dash, `role`) and children. */
export function el(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && !name.includes("-")) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** An SVG element with attributes and children. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

const whole = new Intl.NumberFormat("en");

/** A whole number with separators, such as 1,056. */
export const count = (number) => whole.format(Math.round(number));

/** A number of things, such as "1 token" or "1,056 tokens". */
export const plural = (number, thing, things = `${thing}s`) =>
  `${count(number)} ${number === 1 ? thing : things}`;

/** A share from 0 to 1 as a percentage. */
export const percent = (share) => `${Math.round(share * 100)} %`;

/** A number of bytes, with a unit that suits it. */
export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const unit = units.findIndex((_, power) => number < 1024 ** (power + 1));
  const value = number / 1024 ** unit;
  return `${value < 10 && unit ? +value.toFixed(1) : count(value)} ${units[unit]}`;
}

/** A time in milliseconds, with a unit that suits it. */
export function duration(ms) {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms < 3_600_000) return `${Math.floor(ms / 60_000)} min`;
  return `${Math.floor(ms / 3_600_000)} h`;
}

/** Announces a text to screen readers. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Text without the names of control tokens, such as `<|user|>`, as a label of one line. */
export const label = (text, length) => brief(text.replace(/<\|[^<>|]{1,40}\|>/g, " "), length);

/** Text without line breaks, cut to `length` characters. */
export function brief(text, length) {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length > length ? `${line.slice(0, length - 1)}…` : line;
}
