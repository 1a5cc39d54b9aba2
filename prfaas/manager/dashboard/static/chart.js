// A chart over time in SVG: lines or stacked areas, a legend with the latest figures, a cursor for mouse and keyboard.

import { html, setText, svg } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 190;
const MARGIN = { left: 74, right: 8, top: 8, bottom: 22 };

export class Chart {
  // `series`: [{name, values, kind}] over `times`; `format` writes a value; stacked ones are areas.
  constructor(container, { label, format, isStacked = false, maximum = null }) {
    this.format = format;
    this.label = label;
    this.isStacked = isStacked;
    this.maximum = maximum;
    this.cursor = null;
    this.drawing = svg("svg", { class: "chart", role: "img", tabindex: 0, "aria-label": label });
    this.legend = html("ul", { class: "legend" });
    this.readout = html("p", { class: "readout", "aria-live": "polite" });
    container.append(this.drawing, this.readout, this.legend);
    this.drawing.addEventListener("pointermove", (event) => this.point(event));
    this.drawing.addEventListener("pointerleave", () => this.place(null));
    this.drawing.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.drawing);
  }

  update(times, series) {
    this.times = times;
    this.series = series;
    if (this.cursor !== null) this.cursor = Math.min(this.cursor, times.length - 1);
    this.draw();
  }

  get width() {
    return this.drawing.clientWidth || 300;
  }

  x(time) {
    const first = this.times[0];
    const span = Math.max(1, this.times.at(-1) - first);
    return MARGIN.left + ((time - first) / span) * (this.width - MARGIN.left - MARGIN.right);
  }

  y(value) {
    return HEIGHT - MARGIN.bottom - (value / this.top) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  }

  draw() {
    this.drawing.replaceChildren();
    if (!this.times?.length) return;
    this.drawing.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.top = this.maximum ?? niceTop(this.highest());
    this.drawAxes();
    if (this.isStacked) this.drawAreas();
    else this.series.forEach((item) => this.drawing.append(this.line(item)));
    this.drawLegend();
    if (this.cursor !== null) this.drawCursor();
    this.drawing.setAttribute("aria-label", `${this.label}: ${this.words(this.times.length - 1)}`);
  }

  highest() {
    const finite = (value) => (Number.isFinite(value) ? value : 0);
    if (!this.isStacked) return Math.max(0, ...this.series.flatMap((item) => item.values.map(finite)));
    return Math.max(0, ...this.times.map((time, position) => this.series.reduce((sum, item) => sum + finite(item.values[position]), 0)));
  }

  drawAxes() {
    for (const share of [0, 0.5, 1]) {
      const y = this.y(this.top * share);
      this.drawing.append(svg("line", { class: "grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y }));
      this.drawing.append(svg("text", { class: "faint", x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, this.format(this.top * share)));
    }
    const ends = [[this.times[0], "start"], [this.times.at(-1), "end"]];
    for (const [time, anchor] of ends) {
      this.drawing.append(svg("text", { class: "faint", x: this.x(time), y: HEIGHT - 6, "text-anchor": anchor }, clock(time)));
    }
  }

  line(item) {
    const points = [];
    item.values.forEach((value, position) => {
      if (!Number.isFinite(value)) return;
      const starts = !Number.isFinite(item.values[position - 1]);
      points.push(`${starts ? "M" : "L"}${this.x(this.times[position]).toFixed(1)} ${this.y(Math.min(value, this.top)).toFixed(1)}`);
    });
    return svg("path", { class: `series c${item.colour} ${item.kind ?? ""}`, d: points.join("") });
  }

  drawAreas() {
    const below = this.times.map(() => 0);
    for (const item of this.series) {
      const lower = this.times.map((time, position) => `L${this.x(time).toFixed(1)} ${this.y(below[position]).toFixed(1)}`);
      item.values.forEach((value, position) => (below[position] += Number.isFinite(value) ? value : 0));
      const upper = this.times.map((time, position) => `L${this.x(time).toFixed(1)} ${this.y(below[position]).toFixed(1)}`);
      const outline = `M${upper.join("").slice(1)}${lower.reverse().join("")}Z`;
      this.drawing.append(svg("path", { class: `area c${item.colour}`, d: outline }));
    }
  }

  drawLegend() {
    const wanted = this.series.map((item) => `${item.name}: ${item.latest ?? this.value(item, this.times.length - 1)}`);
    while (this.legend.children.length > wanted.length) this.legend.lastElementChild.remove();
    while (this.legend.children.length < wanted.length) {
      this.legend.append(html("li", {}, html("span", { class: "swatch", "aria-hidden": "true" }), html("span")));
    }
    wanted.forEach((text, position) => {
      const [swatch, words] = this.legend.children[position].children;
      swatch.className = `swatch c${this.series[position].colour}`;
      setText(words, text);
    });
  }

  value(item, position) {
    const value = item.values[position];
    return Number.isFinite(value) ? this.format(value) : "none";
  }

  words(position) {
    return this.series.map((item) => `${item.name} ${this.value(item, position)}`).join(", ");
  }

  drawCursor() {
    const x = this.x(this.times[this.cursor]);
    this.drawing.append(svg("line", { class: "cursor", x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
  }

  place(position) {
    this.cursor = position;
    setText(this.readout, position === null ? "" : `${clock(this.times[position])}: ${this.words(position)}`);
    this.draw();
  }

  point(event) {
    if (!this.times?.length) return;
    const at = event.clientX - this.drawing.getBoundingClientRect().left;
    const distances = this.times.map((time) => Math.abs(this.x(time) - at));
    this.place(distances.indexOf(Math.min(...distances)));
  }

  key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -30, PageDown: 30, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") return this.place(null);
    if (!(event.key in steps) || !this.times?.length) return;
    event.preventDefault();
    const last = this.times.length - 1;
    this.place(Math.max(0, Math.min(last, (this.cursor ?? last) + steps[event.key])));
  }
}

// The next of 1, 2 and 5 times a power of ten.
function niceTop(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value);
}
