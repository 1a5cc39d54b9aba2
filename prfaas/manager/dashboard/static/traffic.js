// Panel of the requests per second, remote and local.

import { byId } from "./dom.js";
import { rate } from "./format.js";
import { Plot } from "./plot.js";
import { marksOf } from "./timeline.js";

export class Traffic {
  constructor() {
    this.plot = new Plot(byId("traffic-chart"), { label: "Requests per second", format: (value) => `${rate(value)} /s` });
  }

  update({ figures }) {
    const { requests, remote } = figures.requests.steps;
    const step = (figures.until - figures.since) / figures.num_steps;
    const series = [
      { name: "all requests", values: requests.map((value) => value / step), color: 0, fill: true },
      { name: "remote", values: remote.map((value) => value / step), color: 1, fill: true },
    ];
    this.plot.update(figures, series, marksOf(figures));
  }
}
