// Panel of paths and links: goodput, capacity and congestion.

import { byId, fillTable, html, metric } from "./dom.js";
import { bitRate, bytes, count, percent, seconds, tokens } from "./format.js";
import { nameOf, SIGNALS, stateOf, usage } from "./map.js";
import { Plot } from "./plot.js";
import { marksOf } from "./timeline.js";

const MAX_CHARTS = 6;

export class Links {
  constructor() {
    this.plots = new Map();
  }

  update({ now, figures }) {
    this.draw(now, figures);
    fillPaths(now);
    fillLinks(now);
  }

  // A path keeps its chart once it was among the busiest.
  draw(now, figures) {
    const busiest = [...now.paths].sort((a, b) => b.bytes_per_second - a.bytes_per_second).slice(0, MAX_CHARTS);
    const names = now.paths.filter((path) => this.plots.has(nameOf(path)) || busiest.includes(path)).map(nameOf);
    for (const [name, { block }] of this.plots) {
      if (!names.includes(name)) {
        block.remove();
        this.plots.delete(name);
      }
    }
    for (const name of names) {
      const path = now.paths.find((item) => nameOf(item) === name);
      const points = figures.history.paths[name] ?? Array(figures.num_steps).fill(null);
      this.plotOf(name).update(figures, [
        { name: "goodput now", values: points.map((point) => point?.[0] ?? null), color: 0, fill: true, latest: bitRate(path.bytes_per_second) },
        { name: "capacity", values: points.map((point) => point?.[1] || null), color: 1, dashed: true, latest: written(path) },
      ], marksOf(figures));
    }
  }

  plotOf(name) {
    if (!this.plots.has(name)) {
      const block = html("div", {}, html("h3", {}, name));
      byId("paths-charts").append(block);
      this.plots.set(name, { block, plot: new Plot(block, { label: `Goodput of ${name}`, format: bitRate }) });
    }
    return this.plots.get(name).plot;
  }
}

const written = (item) => (item.capacity_bytes_per_second ? bitRate(item.capacity_bytes_per_second) : "unknown");

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
        { text: written(item), numeric: true,
          metric: metric("prfaas_manager_path_capacity_bytes_per_second", labels), value: item.measured_bytes_per_second },
        { text: share === null ? "" : percent(share), numeric: true },
        { text: tokens(item.threshold_tokens), numeric: true },
        { text: congestion(item), words: true, metric: metric("prfaas_manager_path_threshold_multiplier", labels), value: item.multiplier },
      ];
    },
  });
}

// Each signal as a share of the limit at which the path counts as congested.
function congestion(path) {
  const signals = Object.entries(path.pressures).map(([name, share]) => `${SIGNALS[name]} ${percent(share)}`).join(", ");
  const listed = path.listed_bytes_per_second ? `; the deployment file allows ${bitRate(path.listed_bytes_per_second)}` : "";
  return `t × ${path.multiplier.toFixed(2)}; share of each limit: ${signals}${listed}`;
}

function stateOfLink(link) {
  if (link.is_down) return { text: "down", mood: "bad" };
  return link.congestion ? { text: `choked (${SIGNALS[link.congestion] ?? link.congestion})`, mood: "busy" } : { text: "up", mood: "good" };
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
