// Charts of the last two minutes: hit rate, memory of the KV pool, requests, and tokens a second.

import { byId, bytes, count, el, percent, svg } from "./dom.js";

/** Time from the left to the right end, in milliseconds. */
const SPAN = 120_000;
/** A line has a gap if there were no samples for this long, in milliseconds. */
const GAP = 4000;
const [WIDTH, HEIGHT] = [240, 60];

/** One chart: lines over time, the newest value on the right. */
class Chart {
  /** The samples: `time` and `values`. */
  #samples = [];
  #number = el("strong");
  #detail = el("span", { className: "quiet" });
  #top = el("span");
  #graph = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
  });
  #title;
  element;

  /** `term` is what engineers call it. */
  constructor(title, term) {
    this.#title = title;
    const head = el("p", {}, el("span", {}, title), " ", this.#number, " ",
      el("span", { className: "term" }, term),
      " ", el("span", { className: "as-of", hidden: true }), el("br"), this.#detail);
    const axis = (name, ...labels) =>
      el("div", { className: name, "aria-hidden": "true" }, ...labels);
    this.element = el("figure", {}, head, el("div", { className: "plot" },
      axis("y-axis", this.#top, el("span", {}, "0")), this.#graph,
      axis("x-axis", el("span", {}, "−2 min"), el("span", {}, "−1 min"), el("span", {}, "now"))));
  }

  /**
   * Adds a sample: values from 0 to `most` or more, the first of which is drawn filled. `axis` is a
   * value in words.
   */
  add(values, most, number, detail, axis = count) {
    const now = Date.now();
    this.#samples.push({ time: now, values });
    while (this.#samples[0].time < now - SPAN - GAP) this.#samples.shift();
    this.#number.textContent = number;
    this.#detail.textContent = detail;
    const largest = Math.max(most, ...this.#samples.flatMap((sample) => sample.values));
    const top = axis === bytes ? 2 ** Math.ceil(Math.log2(largest))
      : most === 1 ? 1 : roundUp(largest);
    this.#top.textContent = axis(top);
    const label = `${this.#title} over two minutes, now ${number}. ${detail}`;
    this.#graph.setAttribute("aria-label", label);
    const grid = svg("path", {
      class: "grid", d: `M0 1H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M${WIDTH / 2} 0V${HEIGHT}`,
      "vector-effect": "non-scaling-stroke",
    });
    this.#graph.replaceChildren(grid, ...values.map((_, line) => this.#line(line, now, top)));
  }

  #line(line, now, top) {
    const group = svg("g", { class: `line-${line}` });
    const x = ({ time }) => (WIDTH - ((now - time) / SPAN) * WIDTH).toFixed(1);
    const y = ({ values }) => (HEIGHT - 1 - (values[line] / top) * (HEIGHT - 2)).toFixed(1);
    for (const part of this.#parts()) {
      const points = part.map((sample) => `${x(sample)},${y(sample)}`).join(" ");
      if (line === 0) {
        const area = `${x(part[0])},${HEIGHT} ${points} ${x(part.at(-1))},${HEIGHT}`;
        group.append(svg("polygon", { points: area }));
      }
      group.append(svg("polyline", { points, "vector-effect": "non-scaling-stroke" }));
    }
    return group;
  }

  /** The samples, divided at the gaps. */
  #parts() {
    const parts = [];
    let before = -Infinity;
    for (const sample of this.#samples) {
      if (sample.time - before > GAP) parts.push([]);
      parts.at(-1).push(sample);
      before = sample.time;
    }
    return parts;
  }
}

/** The next of 1, 2, 4, 5, 8 and 10 times a power of ten. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 8, 10].map((step) => step * power).find((step) => step >= value) ?? value;
}

const hits = new Chart("Found in the cache", "hit rate");
const pool = new Chart("Memory in use", "KV pool");
const queue = new Chart("Requests", "queue");
const speed = new Chart("Writing", "decode");
let before = null;
let rate = 0;

/** Shows the charts. */
export function start() {
  byId("figures").append(hits.element, pool.element, queue.element, speed.element);
}

/** Adds the reply of /v1/cache/stats. */
export function add({ stats, kv_bytes: poolBytes, token_hit_rate: overall }) {
  const now = Date.now();
  // A restarted server counts from zero.
  const last = before && before.stats.completion_tokens <= stats.completion_tokens ? before : null;
  const since = (name) => stats[name] - (last?.stats[name] ?? stats[name]);
  const asked = since("prompt_tokens");
  // Between requests the chart keeps its last value.
  if (asked > 0) rate = since("cached_tokens") / asked;
  else if (!last) rate = overall;
  hits.add([rate], 1, percent(rate), `of the latest prompt; ${percent(overall)} of all prompts`,
    percent);
  const sizeOf = (blocks) => (blocks / stats.blocks_total) * poolBytes;
  const used = sizeOf(stats.blocks_total - stats.blocks_free);
  // The rest is evicted when there is no room: it is not lost for new requests.
  const held = Math.max(used - sizeOf(stats.blocks_evictable), 0);
  pool.add([used, held], 1 << 20, bytes(used),
    `of ${bytes(poolBytes)}; ${held ? bytes(held) : "none"} needed right now`, bytes);
  queue.add([stats.running + stats.waiting, stats.waiting], 4,
    count(stats.running + stats.waiting),
    `${count(stats.running)} running, ${count(stats.waiting)} waiting`);
  const seconds = last ? (now - last.time) / 1000 : 1;
  const perSecond = (tokens) => Math.max(tokens, 0) / seconds;
  const generated = perSecond(since("completion_tokens"));
  const prompts = perSecond(since("computed_tokens") - since("completion_tokens"));
  speed.add([generated], 10, `${count(generated)} tokens/s`,
    `and reading ${count(prompts)} tokens/s of prompts`);
  before = { stats, time: now };
}
