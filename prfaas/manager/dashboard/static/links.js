// Panel of paths and links: goodput, capacity and congestion.

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
    const times = samples.map((item) => item.at);
    const busiest = [...now.paths].sort((a, b) => b.bytes_per_second - a.bytes_per_second);
    const names = now.paths.filter((item) => this.charts.has(nameOf(item)) || busiest.indexOf(item) < 6).map(nameOf);
    for (const [name, { block }] of this.charts) {
      if (!names.includes(name)) {
        block.remove();
        this.charts.delete(name);
      }
    }
    for (const name of names) {
      const values = (position) => samples.map((item) => item.paths[name]?.[position] ?? NaN);
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
    cells: (item) => {
      const { word, mood } = stateOf(item);
      const labels = { destination: item.destination, source: item.source };
      const share = usage(item);
      return [
        { text: nameOf(item), nowrap: true },
        { text: word, mood, metric: metric("prfaas_manager_path_up", labels), value: item.is_down ? 0 : 1 },
        { text: bitRate(item.bytes_per_second), numeric: true, metric: metric("prfaas_manager_path_bytes_per_second", labels), value: item.bytes_per_second },
        { text: item.capacity_bytes_per_second ? bitRate(item.capacity_bytes_per_second) : "unknown", numeric: true,
          metric: metric("prfaas_manager_path_capacity_bytes_per_second", labels), value: item.capacity_bytes_per_second },
        { text: share === null ? "" : percent(share), numeric: true },
        { text: tokens(item.threshold_tokens), numeric: true },
        { text: congestion(item), words: true, metric: metric("prfaas_manager_path_threshold_multiplier", labels), value: item.multiplier },
      ];
    },
  });
}

// Each signal as a share of the limit at which the path counts as congested.
function congestion(path) {
  const signals = Object.entries(path.pressures).map(([name, share]) => `${name} ${percent(share)}`).join(", ");
  return `t × ${path.multiplier.toFixed(2)}; share of each limit: ${signals}`;
}

function stateOfLink(link) {
  if (link.is_down) return { text: "down", mood: "bad" };
  return link.congestion ? { text: `choked (${link.congestion})`, mood: "busy" } : { text: "up", mood: "good" };
}

function fillLinks(now) {
  fillTable(byId("links-table"), now.links, {
    key: (item) => `${item.node} ${item.peer}`,
    empty: "No link has been reported yet.",
    cells: (item) => [
      { text: item.node, nowrap: true }, { text: item.peer, nowrap: true },
      stateOfLink(item),
      { text: bitRate(item.bytes_per_second), numeric: true },
      { text: item.capacity_bytes_per_second ? bitRate(item.capacity_bytes_per_second) : "unknown", numeric: true },
      { text: bytes(item.queued_bytes), numeric: true },
      { text: seconds(item.rtt_seconds), numeric: true },
      { text: seconds(item.min_rtt_seconds), numeric: true },
      { text: percent(item.retransmit_ratio), numeric: true },
      { text: count(item.num_connections), numeric: true },
    ],
  });
}
