// A chart over time: uPlot, with a legend, event marks, and a cursor for mouse, keyboard and screen reader.

import { html, setText } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 180;
const KEYS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };

// light-dark() is resolved by the browser for a property of an element only.
function resolved(name) {
  const probe = document.body.appendChild(html("span", { hidden: true }));
  probe.style.color = `var(${name})`;
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

export class Plot {
  // `format` writes a value of the axis and of the legend; `maximum` is the top of the axis, if it is known.
  constructor(container, { label, format, maximum = null }) {
    Object.assign(this, { label, format, maximum });
    this.legend = html("ul", { class: "legend" });
    this.frame = html("div", { class: "chart", role: "img", tabindex: 0, "aria-label": label });
    this.readout = html("p", { class: "readout", "aria-live": "polite" });
    container.append(this.legend, this.frame, this.readout);
    this.frame.addEventListener("keydown", (event) => this.key(event));
    this.frame.addEventListener("blur", () => this.place(null));
    new ResizeObserver(() => this.resize()).observe(this.frame);
    addEventListener("colors", () => this.rebuild());
  }

  // `series`: [{name, values, color, dashed, fill, latest}] over the steps of `figures`; `marks` are events with a time, a mood and a title.
  update(figures, series, marks = []) {
    const isNew = figures !== this.figures;
    this.figures = figures;
    this.times = stepTimes(figures);
    this.series = series;
    this.marks = marks;
    const shape = series.map(({ name, color: number, dashed }) => [name, number, dashed].join(" ")).join("\n");
    if (shape !== this.shape || !this.plot) {
      this.shape = shape;
      this.rebuild();
    } else if (isNew) {
      this.plot.setData(this.data());
    }
    this.drawLegend();
    const ends = series.map((item) => `${item.name} ${item.latest ?? this.latest(item)}`).join(", ");
    this.frame.setAttribute("aria-label", `${this.label}: ${ends}`);
  }

  data() {
    return [this.times, ...this.series.map((item) => item.values)];
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    if (!this.times?.length || !this.frame.clientWidth) return;
    const [line, faint] = [resolved("--line"), resolved("--faint")];
    const axis = { stroke: faint, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const options = {
      width: this.frame.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: "time" }, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { y: { range: (plot, low, high) => [0, this.maximum ?? (high > 0 ? high * 1.12 : 1)] } },
      axes: [
        { ...axis, space: 90, size: 30, values: (plot, splits) => splits.map(clock) },
        { ...axis, size: (plot, values) => Math.max(44, 14 + 7 * Math.max(...(values ?? []).map((text) => text.length), 0)), values: (plot, splits) => splits.map((value) => (value === null ? "" : this.format(value))) },
      ],
      series: [{}, ...this.series.map((item) => this.drawn(item))],
      hooks: { draw: [(plot) => this.drawMarks(plot)], setCursor: [(plot) => this.read(plot.cursor.idx)] },
    };
    this.plot = new uPlot(options, this.data(), this.frame);
    // uPlot draws with its own elements; the frame's label says the same in words.
    this.plot.root.setAttribute("aria-hidden", "true");
  }

  drawn(item) {
    const stroke = resolved(`--c${item.color}`);
    const [red, green, blue] = stroke.match(/[\d.]+/g);
    const fill = item.fill ? `rgba(${red}, ${green}, ${blue}, .14)` : undefined;
    return { label: item.name, stroke, fill, width: 1.75, dash: item.dashed ? [5, 4] : undefined, spanGaps: true, points: { show: Boolean(item.dots), size: 5 } };
  }

  drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.setLineDash([3, 4]);
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    let labelledTo = bbox.left;
    for (const { at, mood, title } of [...(this.marks ?? [])].sort((a, b) => a.at - b.at)) {
      const x = Math.round(plot.valToPos(at, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = resolved(`--${mood || "faint"}`);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const end = x + ctx.measureText(title).width + 10 * devicePixelRatio;
      if (x < labelledTo || end > bbox.left + bbox.width) continue;
      labelledTo = end;
      ctx.fillStyle = ctx.strokeStyle;
      ctx.fillText(title, x + 4 * devicePixelRatio, bbox.top + 11 * devicePixelRatio);
    }
    ctx.restore();
  }

  resize() {
    if (!this.plot) return this.rebuild();
    if (this.frame.clientWidth) this.plot.setSize({ width: this.frame.clientWidth, height: HEIGHT });
  }

  drawLegend() {
    while (this.legend.children.length > this.series.length) this.legend.lastElementChild.remove();
    while (this.legend.children.length < this.series.length) {
      this.legend.append(html("li", {}, html("span", { class: "swatch", "aria-hidden": "true" }), html("span"), " ", html("b")));
    }
    this.series.forEach((item, position) => {
      const [swatch, name, value] = this.legend.children[position].children;
      swatch.className = `swatch c${item.color}${item.dashed ? " dashed" : ""}`;
      setText(name, item.name);
      setText(value, item.latest ?? this.latest(item));
    });
  }

  latest(item) {
    return this.written(item.values.findLast((value) => value !== null));
  }

  written(value) {
    return value === null || value === undefined ? "none" : this.format(value);
  }

  read(position) {
    this.cursor = position ?? null;
    const values = () => this.series.map((item) => `${item.name} ${this.written(item.values[position])}`).join(", ");
    setText(this.readout, this.cursor === null ? "" : `${clock(this.times[position])}: ${values()}`);
  }

  place(position) {
    if (!this.plot) return;
    if (position === null) return this.plot.setCursor({ left: -10, top: -10 });
    this.plot.setCursor({ left: this.plot.valToPos(this.times[position], "x"), top: 4 });
  }

  key(event) {
    if (event.key === "Escape") return this.place(null);
    if (!(event.key in KEYS) || !this.times?.length) return;
    event.preventDefault();
    const last = this.times.length - 1;
    this.place(Math.max(0, Math.min(last, (this.cursor ?? last) + KEYS[event.key])));
  }
}

// Times of the steps of the figures: the end of each.
function stepTimes({ since, until, num_steps: number }) {
  const step = (until - since) / number;
  return Array.from({ length: number }, (_, position) => since + (position + 1) * step);
}
