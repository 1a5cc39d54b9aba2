// Panel of the request rate: all requests, and remote ones.

import { byId } from "./dom.js";
import { rate } from "./format.js";
import { coveredSeconds } from "./health.js";
import { Plot } from "./plot.js";
import { marksOf } from "./timeline.js";

export class Traffic {
  constructor() {
    this.plot = new Plot(byId("traffic-chart"), { label: "Request rate", format: (value) => `${rate(value)} /s` });
  }

  update(view) {
    const { figures } = view;
    const { requests, remote } = figures.requests.steps;
    const mean = (values) => `${rate(values.reduce((sum, value) => sum + value, 0) / coveredSeconds(view))} requests/s`;
    const step = (figures.until - figures.since) / figures.num_steps;
    const series = [
      { name: "all", values: requests.map((value) => value / step), color: 0, fill: true, latest: mean(requests) },
      { name: "remote", values: remote.map((value) => value / step), color: 1, fill: true, latest: mean(remote) },
    ];
    this.plot.update(figures, series, marksOf(figures));
  }
}
