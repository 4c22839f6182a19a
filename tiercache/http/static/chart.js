// Two small charts in SVG: lines over time, and one curve over sizes. Neither knows anything of the cache.

import { clock } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 168;
const EDGE = { right: 8, top: 8, bottom: 22 };
const DIGIT = 6.2; // width of one in the font of the axes
const LONGEST_STEP_S = 25; // samples further apart are not joined: what was between is unknown

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value != null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text != null) made.textContent = text;
  return made;
}

// Up to four steps of 1, 2 or 5 times a power of ten (of a unit of 1024, for bytes) that reach `largest`.
function ticks(largest, base) {
  const unit = base === 1024 ? 1024 ** Math.max(0, Math.floor(Math.log(largest) / Math.log(1024))) : 1;
  const rough = largest / unit / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((digit) => digit * power >= rough * 0.999) * power * unit;
  const marks = [];
  for (let mark = 0; mark < largest + step * 0.999; mark += step) marks.push(mark);
  return marks;
}

// Marks on whole steps of time, each with its text: to the second where a step is shorter than a minute.
function timeTicks(from, to, room) {
  const step = [15, 30, 60, 120, 300, 600, 900].find((size) => (to - from) / size <= room) ?? 1800;
  const marks = [];
  for (let mark = Math.ceil(from / step) * step; mark <= to; mark += step) marks.push([mark, clock(mark, step < 60)]);
  return marks;
}

// What both charts have: a frame that follows the width of its card, a pointer, and a word when there is nothing.
class Plot {
  constructor(figure, label) {
    this.figure = figure;
    this.label = label;
    this.svg = shape("svg", { role: "img", tabindex: "0", height: HEIGHT, class: "plot" });
    this.tip = element("div", { class: "tip", hidden: true });
    this.spoken = element("p", { class: "unseen", "aria-live": "polite" });
    this.nothing = element("p", { class: "nothing", hidden: true });
    figure.append(element("div", { class: "frame" }, this.svg, this.tip, this.nothing), this.spoken);
    this.pointed = null;
    this.svg.addEventListener("pointermove", (event) => this.point(this.nearest(event.offsetX)));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(figure);
  }

  onKey(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
    if (event.key === "Escape") this.point(null);
    if (!(event.key in steps) || this.places.length === 0) return;
    event.preventDefault();
    const last = this.places.length - 1;
    const from = this.pointed ?? last + (steps[event.key] < 0 ? 1 : 0);
    this.point(Math.min(last, Math.max(0, from + steps[event.key])));
    this.spoken.textContent = this.tip.textContent;
  }

  nearest(x) {
    let best = null;
    this.places.forEach((place, number) => {
      if (best === null || Math.abs(place - x) < Math.abs(this.places[best] - x)) best = number;
    });
    return best;
  }

  // Begin a drawing: an empty frame with lines across. Returns how values become heights.
  frame(largest, base, format) {
    this.width = Math.max(120, this.figure.querySelector(".frame").clientWidth);
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.replaceChildren();
    const marks = ticks(largest, base);
    const top = marks[marks.length - 1];
    const y = (value) => HEIGHT - EDGE.bottom - (value / top) * (HEIGHT - EDGE.top - EDGE.bottom);
    this.left = Math.max(...marks.map((mark) => format(mark).length)) * DIGIT + 10;
    for (const mark of marks) {
      const kind = mark === 0 ? "axis" : "line";
      this.svg.append(shape("line", { x1: this.left, x2: this.width - EDGE.right, y1: y(mark), y2: y(mark), class: kind }));
      this.svg.append(shape("text", { x: this.left - 8, y: y(mark) + 4, class: "end" }, format(mark)));
    }
    return y;
  }

  say(text) {
    this.nothing.textContent = text;
    this.nothing.hidden = !text;
  }

  // Show the values at one place, or none.
  point(number) {
    this.pointed = number;
    this.svg.querySelectorAll(".pointer").forEach((old) => old.remove());
    this.tip.hidden = number === null;
    if (number === null) return;
    const x = this.places[number];
    this.svg.append(shape("line", { x1: x, x2: x, y1: EDGE.top, y2: HEIGHT - EDGE.bottom, class: "pointer" }));
    const { title, values } = this.describe(number);
    this.tip.replaceChildren(element("strong", {}, `${title} `));
    for (const { name, color, text, y } of values) {
      this.tip.append(element("span", { "data-color": color }, `${name} ${text} `));
      if (y != null) this.svg.append(shape("circle", { cx: x, cy: y, r: 3.5, class: "pointer", "data-color": color }));
    }
    const left = x > this.width / 2 ? x - this.tip.offsetWidth - 10 : x + 10;
    this.tip.style.left = `${Math.max(0, left)}px`;
  }
}

// Lines over time, or areas one on the other. A series is { name, color, column, dashed, optional }.
export class TimeChart extends Plot {
  constructor(figure, { title, note, series, format, base = 10, max, stacked = false, floor = 0, empty }) {
    super(figure, title);
    Object.assign(this, { all: series, format, base, max, stacked, floor, empty });
    this.rows = [];
    this.places = [];
    this.from = this.to = 0;
    this.latest = new Map(series.map(({ name }) => [name, element("b", {}, "")]));
    this.legend = series.map(({ name, color, dashed }) =>
      element("li", { "data-color": color, "data-dashed": dashed }, `${name} `, this.latest.get(name)));
    figure.prepend(element("figcaption", {}, element("h3", {}, title), note && element("p", { class: "note" }, note),
      element("ul", { class: "legend" }, ...this.legend)));
    this.choose(new Set());
  }

  // Optional series appear only if their colour is among these.
  choose(colors) {
    const chosen = ({ optional, color }) => !optional || colors.has(color);
    this.series = this.all.filter(chosen);
    this.legend.forEach((place, number) => { place.hidden = !chosen(this.all[number]); });
  }

  update(rows, from, to) {
    Object.assign(this, { rows: rows.filter((row) => row.t >= from), from, to });
    this.draw();
  }

  values(row) {
    let below = 0;
    return this.series.map(({ column }) => {
      if (row[column] == null) return null;
      if (!this.stacked) return row[column];
      below += row[column];
      return below;
    });
  }

  draw() {
    const { rows, from, to } = this;
    const stacks = rows.map((row) => this.values(row));
    const seen = stacks.flat().filter((value) => value != null);
    const y = this.frame(this.max ?? Math.max(this.floor, ...seen, Number.MIN_VALUE), this.base, this.format);
    const inner = this.width - this.left - EDGE.right;
    const x = (t) => this.left + ((t - from) / (to - from || 1)) * inner;
    for (const [mark, text] of to > from ? timeTicks(from, to, inner / 76) : []) {
      this.svg.append(shape("text", { x: x(mark), y: HEIGHT - 6, class: "time" }, text));
    }
    this.places = rows.map((row) => x(row.t));
    this.stacks = stacks;
    this.y = y;
    this.series.forEach((_, number) => this.drawSeries(number, y));
    this.describeAll(seen);
    this.say(seen.length === 0 ? this.empty : "");
    if (this.pointed !== null) this.point(this.pointed < rows.length ? this.pointed : null);
  }

  drawSeries(number, y) {
    const { color, dashed } = this.series[number];
    const step = (place, value) => `${this.places[place].toFixed(1)} ${y(value).toFixed(1)}`;
    let line = "";
    for (const run of this.runs(number)) {
      const above = run.map((place) => step(place, this.stacks[place][number]));
      line += run.length === 1 ? `M${above[0]}h1` : `M${above.join("L")}`;
      if (this.stacked && run.length > 1) {
        const below = run.map((place) => step(place, number ? this.stacks[place][number - 1] ?? 0 : 0)).reverse();
        const area = `M${[...above, ...below].join("L")}Z`;
        this.svg.append(shape("path", { d: area, class: "area", "data-color": color }));
      }
    }
    if (line) this.svg.append(shape("path", { d: line, class: dashed ? "series dashed" : "series", "data-color": color }));
  }

  // Places of rows that belong together: with a value, and not far from the one before.
  runs(number) {
    const found = [];
    this.rows.forEach((row, place) => {
      if (this.stacks[place][number] == null) return;
      const run = found[found.length - 1];
      const near = place > 0 && row.t - this.rows[place - 1].t <= LONGEST_STEP_S;
      if (near && run && run[run.length - 1] === place - 1) run.push(place);
      else found.push([place]);
    });
    return found;
  }

  describeAll(seen) {
    const last = [...this.rows].reverse().find((row) => this.series.some(({ column }) => row[column] != null));
    for (const { name, column } of this.series) {
      this.latest.get(name).textContent = last ? this.format(last[column]) : "";
    }
    const words = this.series.map(({ name, column }) => `${name} ${this.format(last?.[column])}`);
    this.svg.setAttribute("aria-label", seen.length ? `${this.label}: last ${words.join(", ")}` : `${this.label}: ${this.empty}`);
  }

  describe(number) {
    const row = this.rows[number];
    const values = this.series.map(({ name, color, column }, place) => {
      const value = this.stacks[number][place];
      return { name, color, text: this.format(row[column]), y: value == null ? null : this.y(value) };
    });
    return { title: clock(row.t), values };
  }
}

// One curve over sizes, on a logarithmic axis, with a mark at the present size. Points are { size, value }.
export class SizeChart extends Plot {
  constructor(figure, { title, formatSize, format, color, empty }) {
    super(figure, title);
    Object.assign(this, { formatSize, format, color, empty });
    this.points = [];
    this.places = [];
    this.present = null;
  }

  update(points, present) {
    this.points = points.filter(({ size }) => size > 0).sort((one, other) => one.size - other.size);
    this.present = present;
    this.draw();
  }

  draw() {
    const y = this.frame(1, 10, this.format);
    const { points, present } = this;
    this.say(points.length < 2 ? this.empty : "");
    this.places = [];
    this.svg.setAttribute("aria-label", `${this.label}: ${points.length < 2 ? this.empty
      : points.map(({ size, value }) => `${this.formatSize(size)} ${this.format(value)}`).join(", ")}`);
    if (points.length < 2) return;
    const first = Math.log(points[0].size);
    const span = Math.log(points[points.length - 1].size) - first || 1;
    const x = (size) => this.left + ((Math.log(size) - first) / span) * (this.width - this.left - EDGE.right);
    this.y = y;
    this.places = points.map(({ size }) => x(size));
    if (present >= points[0].size && present <= points[points.length - 1].size) {
      this.svg.append(shape("line", { x1: x(present), x2: x(present), y1: EDGE.top, y2: HEIGHT - EDGE.bottom, class: "present" }));
      const end = x(present) > this.width / 2;
      this.svg.append(shape("text", { x: x(present) + (end ? -5 : 5), y: HEIGHT - EDGE.bottom - 6,
        class: end ? "note end" : "note" }, `now ${this.formatSize(present)}`));
    }
    const steps = points.map(({ value }, place) => `${this.places[place].toFixed(1)} ${y(value).toFixed(1)}`);
    this.svg.append(shape("path", { d: `M${steps.join("L")}`, class: "series", "data-color": this.color }));
    const powers = [points[0], points[points.length - 1]].map(({ size }) => Math.log2(size));
    const step = Math.max(1, Math.ceil((powers[1] - powers[0]) / 5));
    for (let power = Math.ceil(powers[0]); power <= powers[1]; power += step) {
      this.svg.append(shape("text", { x: x(2 ** power), y: HEIGHT - 6, class: "time" }, this.formatSize(2 ** power)));
    }
  }

  describe(number) {
    const { size, value } = this.points[number];
    const values = [{ name: "hit rate", color: this.color, text: this.format(value), y: this.y(value) }];
    return { title: this.formatSize(size), values };
  }
}
