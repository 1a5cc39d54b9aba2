// Map of clusters as boxes and paths as lines. Width and label of a line show its utilization.

import { byId, fillTable, metric, svg } from "./dom.js";
import { bitRate, count, percent } from "./format.js";

const BOX = { width: 190, height: 92 };
const GAP = 26;
const WIDE = 620;

export function clustersOf(now) {
  const clusters = new Map();
  for (const node of now.nodes) {
    const item = clusters.get(node.cluster) ?? { name: node.cluster, kind: node.cluster_kind, nodes: 0, roles: {}, running: 0, waiting: 0 };
    item.nodes += 1;
    for (const engine of node.engines) {
      item.roles[engine.role] = (item.roles[engine.role] ?? 0) + 1;
      item.running += engine.load?.num_running ?? 0;
      item.waiting += engine.load?.num_waiting ?? 0;
    }
    clusters.set(node.cluster, item);
  }
  return [...clusters.values()].sort((a, b) => b.kind.localeCompare(a.kind) || a.name.localeCompare(b.name));
}

// State of a path as a word and a mood for its color.
export function stateOf(path) {
  if (path.is_down) return { word: "down", mood: "bad" };
  if (path.multiplier > 1) return { word: `congested (${path.cause})`, mood: "busy" };
  const used = path.capacity_bytes_per_second ? path.bytes_per_second / path.capacity_bytes_per_second : 0;
  if (used > 0.85) return { word: "full", mood: "busy" };
  return path.bytes_per_second > 0 ? { word: "carries", mood: "good" } : { word: "idle", mood: "idle" };
}

export function usage(path) {
  return path.capacity_bytes_per_second ? path.bytes_per_second / path.capacity_bytes_per_second : null;
}

export class ClusterMap {
  constructor() {
    this.container = byId("map-drawing");
    this.drawing = svg("svg", { role: "img", "aria-label": "Clusters and links" });
    this.container.append(this.drawing);
    new ResizeObserver(() => this.now && this.draw()).observe(this.container);
  }

  update(now) {
    this.now = now;
    this.draw();
    fillInstances(now);
  }

  draw() {
    const clusters = clustersOf(this.now);
    const width = this.container.clientWidth || 300;
    const { places, height, listTop } = width >= WIDE ? besideEachOther(clusters, width) : belowEachOther(clusters, this.now.paths.length);
    this.drawing.replaceChildren();
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.drawing.setAttribute("width", width);
    this.drawing.setAttribute("height", height);
    this.drawing.setAttribute("aria-label", words(clusters, this.now.paths));
    this.now.paths.forEach((path, position) => this.drawPath(path, { places, position, listTop }));
    for (const cluster of clusters) this.drawing.append(box(cluster, places.get(cluster.name)));
    if (!clusters.length) this.drawing.append(svg("text", { x: 8, y: 24, class: "faint" }, "No node has registered yet."));
  }

  drawPath(path, { places, position, listTop }) {
    const from = places.get(path.source);
    const to = places.get(path.destination);
    if (!from || !to) return;
    const { word, mood } = stateOf(path);
    const share = usage(path);
    const line = curve(from, to, { position, listTop });
    this.drawing.append(svg("path", { class: `flow ${mood}`, d: line.d, "stroke-width": 2 + 8 * Math.min(1, share ?? 0) }));
    this.drawing.append(svg("path", { class: `flow ${mood}`, d: arrow(line), "stroke-width": 2 }));
    const labels = { source: path.source, destination: path.destination };
    const figures = path.is_down ? "" : ` ${bitRate(path.bytes_per_second)}${share === null ? "" : ` · ${percent(share)}`}`;
    this.drawing.append(
      svg("text", {
        class: `label ${mood}`, x: line.middle[0], y: line.middle[1], "text-anchor": listTop === undefined ? "middle" : "start",
        "data-metric": metric("prfaas_manager_path_bytes_per_second", labels), "data-value": path.bytes_per_second,
      }, `${listTop === undefined ? "" : `${path.source} → ${path.destination}: `}${word}${figures}`),
    );
  }
}

// PrfaaS clusters on the left, PD clusters on the right.
function besideEachOther(clusters, width) {
  const columns = { prfaas: 8, pd: width - BOX.width - 8 };
  const counts = { prfaas: 0, pd: 0 };
  const places = new Map();
  for (const item of clusters) {
    places.set(item.name, { x: columns[item.kind], y: 8 + counts[item.kind] * (BOX.height + GAP), side: item.kind });
    counts[item.kind] += 1;
  }
  return { places, height: 8 + Math.max(1, counts.prfaas, counts.pd) * (BOX.height + GAP) };
}

// Layout of a narrow page: boxes in one column, a lane per path beside them, labels in a list below.
function belowEachOther(clusters, numPaths) {
  const places = new Map();
  clusters.forEach((item, position) => places.set(item.name, { x: 8, y: 8 + position * (BOX.height + 14), side: "stacked" }));
  const listTop = 24 + clusters.length * (BOX.height + 14);
  return { places, listTop, height: Math.max(40, listTop + numPaths * 18) };
}

// A path leaves a box on the side that faces its destination. The two directions of a pair are apart.
function curve(from, to, { position, listTop }) {
  if (from.side === "stacked") return lane(from, to, { position, listTop });
  if (from.side === to.side) return sameSideCurve(from, to);
  const rightward = from.x < to.x;
  const apart = rightward ? -14 : 14;
  const start = [from.x + (rightward ? BOX.width : 0), from.y + BOX.height / 2 + apart];
  const end = [to.x + (rightward ? 0 : BOX.width), to.y + BOX.height / 2 + apart];
  const half = (start[0] + end[0]) / 2;
  const share = rightward ? 0.35 : 0.65; // Labels of crossing paths do not meet here.
  const middle = [start[0] + (end[0] - start[0]) * (rightward ? share : 1 - share), start[1] + (end[1] - start[1]) * 0.35];
  if (start[1] === end[1]) middle[0] = half;
  return { d: `M${start} C${half} ${start[1]} ${half} ${end[1]} ${end}`, end, heading: rightward ? [1, 0] : [-1, 0], middle: [middle[0], middle[1] + (rightward ? -8 : 18)] };
}

function sameSideCurve(from, to) {
  const inner = from.side === "prfaas" ? BOX.width : 0;
  const out = from.side === "prfaas" ? 46 : -46;
  const down = to.y > from.y;
  const start = [from.x + inner, from.y + (down ? 70 : 22)];
  const end = [to.x + inner, to.y + (down ? 22 : 70)];
  const middle = [start[0] + out * 1.6, (start[1] + end[1]) / 2 + (down ? 12 : -6)];
  return { d: `M${start} C${start[0] + out} ${start[1]} ${end[0] + out} ${end[1]} ${end}`, end, heading: [out > 0 ? -1 : 1, 0], middle };
}

function lane(from, to, { position, listTop }) {
  const edge = from.x + BOX.width;
  const out = edge + 18 + (position % 6) * 18;
  const shift = ((position % 6) - 2.5) * 10;
  const [start, end] = [[edge, from.y + BOX.height / 2 + shift], [edge, to.y + BOX.height / 2 + shift]];
  return { d: `M${start} L${out} ${start[1]} L${out} ${end[1]} L${end}`, end, heading: [-1, 0], middle: [8, listTop + position * 18] };
}

function arrow({ end, heading: [dx, dy] }) {
  const back = [end[0] - 9 * dx, end[1] - 9 * dy];
  return `M${[back[0] - 5 * dy, back[1] - 5 * dx]} L${end} L${[back[0] + 5 * dy, back[1] + 5 * dx]}`;
}

function box(cluster, { x, y }) {
  const roles = Object.entries(cluster.roles).map(([role, number]) => `${number} ${role}`).join(", ") || "no instances";
  const lines = [
    [cluster.name, "strong", metric("prfaas_manager_nodes", { cluster: cluster.name }), cluster.nodes],
    [`${cluster.kind === "prfaas" ? "PrfaaS" : "PD"}, ${count(cluster.nodes)} ${cluster.nodes === 1 ? "node" : "nodes"}`, "faint"],
    [roles, ""],
    [`${count(cluster.running)} running, ${count(cluster.waiting)} waiting`, "", metric("prfaas_manager_running_requests", { cluster: cluster.name }), cluster.running],
  ];
  const texts = lines.map(([text, style, name, value], position) =>
    svg("text", { class: style, x: x + 12, y: y + 22 + position * 19, "data-metric": name, "data-value": value }, text));
  return svg("g", {}, svg("rect", { class: "box", x, y, width: BOX.width, height: BOX.height, rx: 8 }), ...texts);
}

function words(clusters, paths) {
  const boxes = clusters.map((item) => `${item.name}: ${item.nodes} nodes, ${item.running} running, ${item.waiting} waiting`);
  const lines = paths.map((item) => `${item.source} to ${item.destination}: ${stateOf(item).word}, ${bitRate(item.bytes_per_second)}`);
  return ["Clusters and links", ...boxes, ...lines].join(". ");
}

function fillInstances(now) {
  const rows = now.nodes.flatMap((node) => node.engines.map((engine) => ({ node, engine })));
  fillTable(byId("instances"), rows, {
    key: ({ engine }) => engine.instance,
    empty: "No instance has registered yet.",
    cells: ({ node, engine }) => [
      engine.instance, node.name, node.cluster, engine.role, engine.model,
      { text: engine.load ? count(engine.load.num_running) : "unknown", numeric: true },
      { text: engine.load ? count(engine.load.num_waiting) : "unknown", numeric: true },
      { text: engine.load ? percent(engine.load.kv_usage_ratio) : "unknown", numeric: true },
      instanceState(node, engine),
    ],
  });
}

function instanceState(node, engine) {
  if (node.is_leaving) return { text: "node is draining", mood: "busy" };
  return engine.next_role ? { text: `drains, becomes ${engine.next_role}`, mood: "busy" } : { text: "serves", mood: "good" };
}
