// Map of clusters as boxes and paths as lines. The width of a line shows its rate, beside its capacity.

import { byId, fillTable, metric, svg } from "./dom.js";
import { bitRate, count, percent, seconds, tokens } from "./format.js";

const BOX = { width: 252, height: 136 };
const LEAST_HEIGHT = 230; // Beside the timeline.
const GAP = 36;
const WIDE = 640;
const MAGNIFIED_FROM = 900;
const MAX_MAGNIFICATION = 1.6;
const MAX_DOTS = 14;
const TRACK = 14; // Width of a line at capacity.
export const FULL_RATIO = 0.85; // Share of its capacity from which a link is called full.
const RECOVERS_BELOW = 0.6; // Pressure below which congestion control lowers t again.

const ROLES = { prefill: "prefills", decode: "decodes", both: "prefills and decodes" };

// Words for the signals of congestion. TCP retransmits what a full queue drops, also on a line without losses.
export const SIGNALS = { utilisation: "utilization", queue: "queue", loss: "retransmissions", rtt: "round trip" };
export const nameOf = (path) => `${path.source} → ${path.destination}`;

export function clustersOf(now) {
  const clusters = new Map();
  for (const node of now.nodes) {
    const item = clusters.get(node.cluster) ?? { name: node.cluster, kind: node.cluster_kind, nodes: [], roles: {}, running: 0, waiting: 0, usage: [] };
    item.nodes.push(node);
    for (const engine of node.engines) {
      item.roles[engine.role] = (item.roles[engine.role] ?? 0) + 1;
      item.running += engine.load?.num_running ?? 0;
      item.waiting += engine.load?.num_waiting ?? 0;
      if (engine.load) item.usage.push(engine.load.kv_usage_ratio);
    }
    clusters.set(node.cluster, item);
  }
  return [...clusters.values()].sort((a, b) => b.kind.localeCompare(a.kind) || a.name.localeCompare(b.name));
}

// State of a path as a word and a mood for its color.
export function stateOf(path) {
  if (path.is_down) return { word: "down", mood: "bad" };
  if (path.multiplier > 1 && path.pressure < RECOVERS_BELOW) return { word: "recovering", mood: "busy" };
  if (path.multiplier > 1) return { word: `congested (${SIGNALS[path.cause] ?? path.cause})`, mood: "busy" };
  // A mean of ten seconds, since a transfer fills a link for moments.
  if (path.pressures.utilisation >= 1) return { word: "full", mood: "busy" };
  return path.bytes_per_second > 0 ? { word: "carries", mood: "good" } : { word: "idle", mood: "idle" };
}

// Share of the capacity; null while that is unknown.
export function usage(path) {
  return path.capacity_bytes_per_second ? path.bytes_per_second / path.capacity_bytes_per_second : null;
}

export function stateOfNode(node) {
  if (node.is_silent) return { text: "agent is silent", mood: "bad" };
  if (node.engines.some((engine) => engine.load?.is_silent)) return { text: "engine does not answer", mood: "bad" };
  if (node.is_leaving) return { text: "node is draining", mood: "busy" };
  return { text: "serves", mood: "good" };
}

export class ClusterMap {
  constructor() {
    this.container = byId("map-drawing");
    this.drawing = svg("svg", { role: "img", "aria-label": "Clusters and links" });
    this.container.append(this.drawing);
    new ResizeObserver(() => this.now && this.draw()).observe(this.container);
  }

  update({ now }) {
    this.now = now;
    this.draw();
    fillInstances(now);
  }

  draw() {
    const clusters = clustersOf(this.now);
    const shown = this.container.clientWidth || 300;
    // A wide drawing is magnified, so that text and boxes keep their weight on the page.
    const width = shown / Math.min(MAX_MAGNIFICATION, Math.max(1, shown / MAGNIFIED_FROM));
    const layout = width >= WIDE ? besideEachOther(clusters, width) : belowEachOther(clusters, this.now.paths.length, width);
    const drawing = svg("g");
    this.now.paths.forEach((path, position) => this.drawPath(drawing, path, { ...layout, position }));
    for (const cluster of clusters) drawing.append(box(cluster, layout.places.get(cluster.name)));
    if (!clusters.length) drawing.append(svg("text", { x: 8, y: 24, class: "faint" }, "No node has registered yet."));
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${layout.height}`);
    this.drawing.setAttribute("width", shown);
    this.drawing.setAttribute("height", (layout.height * shown) / width);
    this.drawing.setAttribute("aria-label", words(clusters, this.now.paths));
    this.drawing.replaceChildren(drawing);
    this.keepPulse(drawing);
  }

  // The moving dashes go on where the previous drawing left them.
  keepPulse(drawing) {
    for (const pulse of drawing.querySelectorAll(".pulse")) pulse.style.animationDelay = `${-(performance.now() % 1200)}ms`;
  }

  drawPath(drawing, path, { places, position, listTop }) {
    const [from, to] = [places.get(path.source), places.get(path.destination)];
    if (!from || !to) return;
    const { mood } = stateOf(path);
    const line = curve(from, to, { position, listTop });
    const share = Math.min(1, usage(path) ?? 0);
    const parts = [svg("path", { class: "track", d: line.d, "stroke-width": TRACK })];
    if (path.is_down || path.bytes_per_second > 0) parts.push(svg("path", { class: `flow ${mood}`, d: line.d, "stroke-width": Math.max(3, TRACK * share) }));
    if (!path.is_down && path.bytes_per_second > 0) parts.push(svg("path", { class: "pulse", d: line.d }));
    drawing.append(...parts, label(path, line, { isListed: listTop !== undefined, roundTrip: this.roundTrip(path) }));
  }

  // Longest present round trip of the path's links.
  roundTrip(path) {
    return Math.max(0, ...this.now.links.filter((link) => link.cluster === path.source && link.peer_cluster === path.destination).map((link) => link.rtt_seconds));
  }
}

function label(path, { middle: [x, y] }, { isListed, roundTrip }) {
  const { word, mood } = stateOf(path);
  const share = usage(path);
  const figures = path.is_down ? "" : `${bitRate(path.bytes_per_second)}${share === null ? "" : ` · ${percent(share)}`}`;
  const details = [word, roundTrip ? `RTT ${seconds(roundTrip)}` : "", path.multiplier > 1 ? `t ${tokens(path.threshold_tokens)}` : ""].filter(Boolean).join(" · ");
  const attributes = { "data-metric": metric("prfaas_manager_path_bytes_per_second", { source: path.source, destination: path.destination }), "data-value": path.bytes_per_second };
  if (isListed) return svg("text", { x, y, class: mood === "good" ? "" : mood, ...attributes }, `${nameOf(path)}: ${[figures, details].filter(Boolean).join(" · ")}`);
  const width = 7.2 * Math.max(figures.length, details.length) + 22;
  return svg("g", {},
    svg("rect", { class: "pill", x: x - width / 2, y: y - 19, width, height: figures ? 38 : 24, rx: 10 }),
    ...(figures ? [svg("text", { class: "", x, y: y - 3, "text-anchor": "middle", "font-weight": 600, ...attributes }, figures)] : []),
    svg("text", { class: mood === "good" || mood === "idle" ? "faint" : mood, x, y: figures ? y + 12 : y - 3, "text-anchor": "middle", ...(figures ? {} : attributes) }, details));
}

// PrfaaS clusters on the left, PD clusters on the right; the shorter column is centered.
function besideEachOther(clusters, width) {
  const size = (kind) => clusters.filter((item) => item.kind === kind).length;
  const rows = Math.max(1, size("prfaas"), size("pd"));
  const needed = rows * BOX.height + (rows - 1) * GAP + 8;
  const height = Math.max(LEAST_HEIGHT, needed);
  const places = new Map();
  for (const [kind, x] of [["prfaas", 2], ["pd", width - BOX.width - 2]]) {
    const top = 4 + (height - needed + (rows - size(kind)) * (BOX.height + GAP)) / 2;
    clusters.filter((item) => item.kind === kind).forEach((item, position) => places.set(item.name, { x, y: top + position * (BOX.height + GAP), side: kind }));
  }
  return { places, height };
}

// Layout of a narrow page: boxes in one column, a lane per path beside them, labels in a list below.
function belowEachOther(clusters, numPaths, width) {
  const places = new Map();
  const size = Math.max(0, Math.min(BOX.width, width - 60));
  clusters.forEach((item, position) => places.set(item.name, { x: 2, y: 4 + position * (BOX.height + 18), side: "stacked", width: size }));
  const listTop = 16 + clusters.length * (BOX.height + 18);
  return { places, listTop, height: Math.max(40, listTop + numPaths * 20) };
}

// A path leaves a box on the side that faces its destination. The two directions of a pair are apart.
function curve(from, to, { position, listTop }) {
  if (from.side === "stacked") return lane(from, to, { position, listTop });
  if (from.side === to.side) return sameSideCurve(from, to);
  const rightward = from.x < to.x;
  const apart = rightward ? -30 : 30;
  const start = [from.x + (rightward ? BOX.width : 0), from.y + BOX.height / 2 + apart];
  const end = [to.x + (rightward ? 0 : BOX.width), to.y + BOX.height / 2 + apart];
  const half = (start[0] + end[0]) / 2;
  const share = start[1] === end[1] ? 0.5 : rightward ? 0.38 : 0.62; // Labels of crossing paths do not meet here.
  const middle = [start[0] + (end[0] - start[0]) * share, start[1] + (end[1] - start[1]) * (start[1] === end[1] ? 0.5 : 0.34)];
  return { d: `M${start} C${half} ${start[1]} ${half} ${end[1]} ${end}`, middle };
}

function sameSideCurve(from, to) {
  const inner = from.side === "prfaas" ? BOX.width : 0;
  const out = from.side === "prfaas" ? 60 : -60;
  const down = to.y > from.y;
  const start = [from.x + inner, from.y + (down ? 110 : 26)];
  const end = [to.x + inner, to.y + (down ? 26 : 110)];
  const middle = [start[0] + out * 1.9, (start[1] + end[1]) / 2];
  return { d: `M${start} C${start[0] + out} ${start[1]} ${end[0] + out} ${end[1]} ${end}`, middle };
}

function lane(from, to, { position, listTop }) {
  const edge = from.x + from.width;
  const out = edge + 14 + (position % 3) * 15;
  const shift = ((position % 6) - 2.5) * 16;
  const [start, end] = [[edge, from.y + BOX.height / 2 + shift], [edge, to.y + BOX.height / 2 + shift]];
  return { d: `M${start} L${out} ${start[1]} L${out} ${end[1]} L${end}`, middle: [2, listTop + position * 20] };
}

function box(cluster, { x, y, width = BOX.width }) {
  const left = x + 14;
  const roles = Object.entries(cluster.roles).map(([role, number]) => `${number} ${ROLES[role] ?? role}`).join(", ") || "no instances";
  const used = cluster.usage.length ? cluster.usage.reduce((sum, value) => sum + value, 0) / cluster.usage.length : 0;
  const inner = Math.max(0, width - 28);
  const running = { "data-metric": metric("prfaas_manager_running_requests", { cluster: cluster.name }), "data-value": cluster.running };
  return svg("g", {},
    svg("rect", { class: "box", x, y, width, height: BOX.height, rx: 12 }),
    svg("text", { class: "strong", x: left, y: y + 26, "data-metric": metric("prfaas_manager_nodes", { cluster: cluster.name }), "data-value": cluster.nodes.length }, cluster.name),
    svg("text", { class: "faint", x: x + width - 14, y: y + 26, "text-anchor": "end" }, cluster.kind === "prfaas" ? "PrfaaS" : "PD"),
    ...cluster.nodes.slice(0, MAX_DOTS).map((node, position) => dot(node, left + 5 + position * 14, y + 44)),
    svg("text", { x: left, y: y + 72 }, `${count(cluster.nodes.length)} ${cluster.nodes.length === 1 ? "node" : "nodes"} · ${roles}`),
    svg("text", { x: left, y: y + 92, ...running }, `${count(cluster.running)} running, ${count(cluster.waiting)} waiting`),
    svg("rect", { class: "meter-back", x: left, y: y + 104, width: inner, height: 5, rx: 2.5 }),
    svg("rect", { class: "meter", x: left, y: y + 104, width: inner * Math.min(1, used), height: 5, rx: 2.5 }),
    svg("text", { class: "faint", x: left, y: y + 125 }, `${percent(used)} of KV memory in use`));
}

function dot(node, x, y) {
  const { text, mood } = stateOfNode(node);
  return svg("circle", { class: `node ${mood}`, cx: x, cy: y, r: 5 }, svg("title", {}, `${node.name}: ${text}`));
}

function words(clusters, paths) {
  const boxes = clusters.map((item) => `${item.name}: ${item.nodes.length} nodes, ${item.running} running, ${item.waiting} waiting`);
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
  const state = stateOfNode(node);
  if (state.mood !== "good") return state;
  return engine.next_role ? { text: `drains, becomes ${engine.next_role}`, mood: "busy" } : state;
}
