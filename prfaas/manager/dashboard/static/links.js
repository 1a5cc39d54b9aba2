// Paths between clusters and links between nodes: goodput against capacity, and what congests them.

import { Chart } from "./chart.js";
import { byId, fillTable, html, metric } from "./dom.js";
import { bitRate, bytes, count, percent, seconds, tokens } from "./format.js";
import { stateOf, usage } from "./map.js";

export class Links {
  constructor() {
    this.charts = new Map();
  }

  update(now, samples) {
    this.drawCharts(now, samples);
    fillPaths(now);
    fillLinks(now);
  }

  drawCharts(now, samples) {
    const times = samples.map((its) => its.at);
    const busiest = [...now.paths].sort((a, b) => b.bytes_per_second - a.bytes_per_second);
    const names = now.paths.filter((its) => this.charts.has(nameOf(its)) || busiest.indexOf(its) < 6).map(nameOf);
    for (const [name, { block }] of this.charts) {
      if (!names.includes(name)) {
        block.remove();
        this.charts.delete(name);
      }
    }
    for (const name of names) {
      const values = (position) => samples.map((its) => its.paths[name]?.[position] ?? NaN);
      this.chartOf(name).update(times, [
        { name: "goodput", values: values(0), colour: 0 },
        { name: "capacity", values: values(1).map((value) => value || NaN), colour: 1, kind: "capacity" },
      ]);
    }
  }

  chartOf(name) {
    if (!this.charts.has(name)) {
      const block = html("div", {}, html("h3", {}, name));
      byId("paths-charts").append(block);
      this.charts.set(name, { block, chart: new Chart(block, { label: `Goodput of ${name}`, format: bitRate }) });
    }
    return this.charts.get(name).chart;
  }
}

const nameOf = (path) => `${path.source} → ${path.destination}`;

function fillPaths(now) {
  fillTable(byId("paths-table"), now.paths, {
    key: nameOf,
    empty: "No link between two clusters has been reported yet.",
    cells: (its) => {
      const { word, mood } = stateOf(its);
      const labels = { destination: its.destination, source: its.source };
      const share = usage(its);
      return [
        { text: nameOf(its), nowrap: true },
        { text: word, mood, metric: metric("prfaas_manager_path_up", labels), value: its.is_down ? 0 : 1 },
        { text: bitRate(its.bytes_per_second), numeric: true, metric: metric("prfaas_manager_path_bytes_per_second", labels), value: its.bytes_per_second },
        { text: its.capacity_bytes_per_second ? bitRate(its.capacity_bytes_per_second) : "not known", numeric: true,
          metric: metric("prfaas_manager_path_capacity_bytes_per_second", labels), value: its.capacity_bytes_per_second },
        { text: share === null ? "" : percent(share), numeric: true },
        { text: tokens(its.threshold_tokens), numeric: true },
        { text: congestion(its), words: true, metric: metric("prfaas_manager_path_threshold_multiplier", labels), value: its.multiplier },
      ];
    },
  });
}

// Each signal as a share of the limit at which the path counts as congested.
function congestion(path) {
  const signals = Object.entries(path.pressures).map(([name, share]) => `${name} ${percent(share)}`).join(", ");
  return `t × ${path.multiplier.toFixed(2)}; of each limit: ${signals}`;
}

function stateOfLink(link) {
  if (link.is_down) return { text: "down", mood: "bad" };
  return link.congestion ? { text: `choked (${link.congestion})`, mood: "busy" } : { text: "up", mood: "good" };
}

function fillLinks(now) {
  fillTable(byId("links-table"), now.links, {
    key: (its) => `${its.node} ${its.peer}`,
    empty: "No link has been reported yet.",
    cells: (its) => [
      { text: its.node, nowrap: true }, { text: its.peer, nowrap: true },
      stateOfLink(its),
      { text: bitRate(its.bytes_per_second), numeric: true },
      { text: its.capacity_bytes_per_second ? bitRate(its.capacity_bytes_per_second) : "not known", numeric: true },
      { text: bytes(its.queued_bytes), numeric: true },
      { text: seconds(its.rtt_seconds), numeric: true },
      { text: seconds(its.min_rtt_seconds), numeric: true },
      { text: percent(its.retransmit_ratio), numeric: true },
      { text: count(its.num_connections), numeric: true },
    ],
  });
}
