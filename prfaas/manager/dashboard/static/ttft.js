// Panels of the time to first token: percentiles over the time range, and its phases.

import { byId, fillTable, html, setText } from "./dom.js";
import { clock, count, seconds } from "./format.js";
import { Plot } from "./plot.js";
import { marksOf } from "./timeline.js";
import { phaseBars } from "./waterfall.js";

const ROUTES = ["remote", "local"];
export const DISTANCE_PHASES = ["wire", "load", "rest", "handover"]; // These follow the prefill.

export class FirstTokens {
  constructor() {
    this.plot = new Plot(byId("ttft-chart"), { label: "Time to first token", format: seconds });
  }

  update({ now, figures }) {
    const { ttft, steps } = figures.requests;
    const series = ROUTES.flatMap((route, position) => [
      { name: `${route} P50`, values: steps.ttft[route][0], color: position, dots: route === "remote", latest: written(ttft[route].percentiles[0]) },
      { name: `${route} P95`, values: steps.ttft[route][1], color: position, dashed: true, latest: written(ttft[route].percentiles[1]) },
    ]);
    this.plot.update(figures, series, marksOf(figures));
    fillTable(byId("ttft-table"), ROUTES, {
      key: (route) => route,
      empty: "",
      cells: (route) => [
        route, { text: count(ttft[route].count), numeric: true },
        ...ttft[route].percentiles.map((value) => ({ text: written(value), numeric: true, exact: value })),
      ],
    });
    setText(byId("ttft-words"), words(now, figures));
  }
}

const written = (value) => (value === null ? "none" : seconds(value));

function words(now, { requests, since }) {
  const parts = ["Exact percentiles of all reported requests in the time range."];
  const begins = Math.max(requests.complete_since, now.manager.started_at);
  if (begins > since) parts.push(`The record begins at ${clock(begins)}.`);
  if (requests.num_hidden) parts.push(`The filters leave out ${count(requests.num_hidden)} requests.`);
  return parts.join(" ");
}

export function showPhases({ figures }) {
  const blocks = ROUTES.filter((route) => figures.requests.ttft[route].num_divided).map((route) => {
    const { phases, num_divided: number } = figures.requests.ttft[route];
    return [html("h3", {}, `${route}, ${count(number)} requests`), phaseBars(phases)];
  });
  byId("phases-bars").replaceChildren(...(blocks.length ? blocks.flat() : [html("p", { class: "hint" }, "No completed request in the time range.")]));
}
