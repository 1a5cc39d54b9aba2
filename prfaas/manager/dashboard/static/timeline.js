// Timeline of incidents, changes and operators' actions, newest first.

import { byId, html, setText } from "./dom.js";
import { seconds, tokens, when } from "./format.js";

const KINDS = {
  plan: ["New plan", ""],
  congestion: ["Path congested", "busy"],
  calm: ["Congestion eased", "good"],
  link_down: ["Path down", "bad"],
  link_up: ["Path up", "good"],
  role_draining: ["Role change begins", "busy"],
  role_changed: ["Role changed", ""],
  node_joined: ["Node joined", "good"],
  node_left: ["Node left", "bad"],
  node_restarted: ["Node restarted", "busy"],
  node_draining: ["Node drains", "busy"],
  node_drained: ["Drain ended", "good"],
  silent: ["Silent", "bad"],
  answers: ["Answers again", "good"],
  record_lost: ["Record unreachable", "bad"],
  record_found: ["Record reachable", "good"],
  operator: ["Operator", ""],
};

export const titleOf = (change) => KINDS[change.kind]?.[0] ?? change.kind;
const moodOf = (change) => KINDS[change.kind]?.[1] ?? "";

const STEPWISE = ["congestion", "calm"]; // A threshold moves in steps.
const APART_SECONDS = 30; // Rises of t so far apart are events of their own.

// Events that a chart marks: not those that its own lines show.
export const marksOf = (figures) => figures.changes.filter(({ kind }) => kind !== "plan" && !STEPWISE.includes(kind)).map((change) => ({ at: change.at, mood: moodOf(change), title: titleOf(change) }));

// Steps by which t of a path rises soon after each other, and falls again, become one event with the cause of its first
// step. Other events may lie between them.
export function incidents(changes) {
  const found = [];
  const latest = new Map(); // By path, if t moved in steps.
  for (const change of changes) {
    const { at, kind, subject, detail } = change;
    const [from, to] = change.thresholds ?? [];
    const newer = STEPWISE.includes(kind) ? latest.get(subject) : undefined;
    const continues = newer?.first === kind ? newer.since - at < APART_SECONDS : newer && kind === "congestion";
    if (continues) {
      Object.assign(newer, { since: at, first: kind, detail, from, top: Math.max(newer.top, from, to) });
      continue;
    }
    found.push({ ...change, since: at, first: kind, from, to, top: Math.max(from, to) });
    if (STEPWISE.includes(kind)) latest.set(subject, found.at(-1));
  }
  return found;
}

// Movement of t and its cause. `clause` stands behind the movement.
export function movement({ at, detail, from, top, to }, clause = "") {
  const [first, highest, last] = [from, top, to].map(tokens);
  if (first === highest && highest === last) return `stays ${last}${clause}: ${detail}`;
  if (from === top) return `fell from ${first} to ${last}${clause}: ${detail}`;
  return `rose from ${first} to ${highest}${clause}: ${detail}${to < top ? `. It fell to ${last} by ${when(at)}` : ""}`;
}

export function showTimeline({ figures }) {
  const { since, until } = figures;
  const changes = incidents(figures.changes);
  const numLate = changes.filter((change) => change.at >= since).length;
  const span = seconds(until - since);
  setText(byId("timeline-words"), `${numLate || "No"} ${numLate === 1 ? "event" : "events"} in the last ${span}${changes.length ? ". Newest first." : "."}`);
  const list = byId("events");
  const known = new Map([...list.children].map((item) => [item.dataset.key, item]));
  const wanted = changes.map((change) => {
    const key = [change.at, change.kind, change.subject, change.since].join(" ");
    return known.get(key) ?? entry(change, key);
  });
  if (wanted.length !== list.children.length || wanted.some((item, position) => list.children[position] !== item)) list.replaceChildren(...wanted);
}

function entry(change, key) {
  const { at, since, detail } = change;
  return html("li", { class: moodOf(change), "data-key": key, "data-kind": change.kind },
    html("time", { datetime: new Date(since * 1000).toISOString() }, when(since), at > since ? html("small", {}, ` to ${when(at)}`) : ""),
    html("p", {}, html("strong", {}, titleOf({ kind: change.first })), ` ${change.subject}`),
    html("p", { class: "detail" }, change.thresholds ? `t ${movement(change)}` : detail));
}
