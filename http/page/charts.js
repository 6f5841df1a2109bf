// Small charts of the last two minutes: hit rate, use of the KV pool, and the queue.

import { byId, count, el, percent, plural, svg } from "./dom.js";

const SAMPLES = 120;
const [WIDTH, HEIGHT] = [240, 56];

/** One chart: lines over time, the newest value on the right. */
class Chart {
  #values = [];
  #number = el("strong");
  #detail = el("span", { className: "quiet" });
  #graph = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
  });
  #title;
  element;

  constructor(title) {
    this.#title = title;
    const head = el("p", {}, el("span", {}, title), " ", this.#number, " ", this.#detail);
    this.element = el("figure", {}, head, this.#graph);
  }

  /** Adds a sample: values from 0 to `most`, the first of which is drawn filled. */
  add(values, most, number, detail) {
    this.#values.push(values);
    if (this.#values.length > SAMPLES) this.#values.shift();
    this.#number.textContent = number;
    this.#detail.textContent = detail;
    const label = `${this.#title} over two minutes, now ${number}. ${detail}`;
    this.#graph.setAttribute("aria-label", label);
    const top = Math.max(most, ...this.#values.flat(), Number.MIN_VALUE);
    const lines = values.map((_, line) => this.#line(line, top));
    this.#graph.replaceChildren(...lines);
  }

  #line(line, top) {
    const from = WIDTH - (this.#values.length - 1) * (WIDTH / (SAMPLES - 1));
    const point = (values, index) => {
      const x = from + index * (WIDTH / (SAMPLES - 1));
      return `${x.toFixed(1)},${(HEIGHT - 2 - (values[line] / top) * (HEIGHT - 4)).toFixed(1)}`;
    };
    const points = this.#values.map(point).join(" ");
    const group = svg("g", { class: `line-${line}` });
    if (line === 0) {
      const area = `${from.toFixed(1)},${HEIGHT} ${points} ${WIDTH},${HEIGHT}`;
      group.append(svg("polygon", { points: area }));
    }
    group.append(svg("polyline", { points, "vector-effect": "non-scaling-stroke" }));
    return group;
  }
}

const hits = new Chart("Hit rate");
const pool = new Chart("KV pool");
const queue = new Chart("Requests");
let before = null;
let rate = 0;

/** Shows the charts. */
export function start() {
  byId("figures").append(hits.element, pool.element, queue.element);
}

/** Adds the reply of /v1/cache/stats. */
export function add({ stats, token_hit_rate: overall }) {
  const asked = stats.prompt_tokens - (before?.prompt_tokens ?? stats.prompt_tokens);
  // Between requests the chart keeps its last value.
  if (asked > 0) rate = (stats.cached_tokens - before.cached_tokens) / asked;
  else if (!before) rate = overall;
  before = stats;
  hits.add([rate], 1, percent(rate), `of the latest prompt tokens; ${percent(overall)} of all`);
  const used = stats.blocks_total - stats.blocks_free;
  const share = used / stats.blocks_total;
  const shown = share > 0 && share < 0.01 ? "< 1 %" : percent(share);
  const held = used - stats.blocks_evictable;
  pool.add([used, held], Math.max(16, used * 1.25), shown,
    `${count(used)} of ${plural(stats.blocks_total, "block")}, ${count(held)} held`);
  queue.add([stats.running, stats.waiting], 4, count(stats.running + stats.waiting),
    `${count(stats.running)} running, ${count(stats.waiting)} waiting`);
}
