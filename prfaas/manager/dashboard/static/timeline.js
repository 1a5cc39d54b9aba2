// Timeline of incidents, changes and operators' actions, newest first.

import { byId, html, setText } from "./dom.js";
import { seconds, when } from "./format.js";

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

// Events that a chart marks: not those that its own lines show.
export const marksOf = (figures) => figures.changes.filter(({ kind }) => kind !== "plan" && !STEPWISE.includes(kind)).map((change) => ({ at: change.at, mood: moodOf(change), title: titleOf(change) }));

// Steps of one movement of t become one event, with its last step.
function movements(changes) {
  const found = [];
  for (const change of changes) {
    const newer = found.at(-1);
    const belongs = newer && STEPWISE.includes(change.kind) && newer.kind === change.kind && newer.subject === change.subject;
    if (belongs) Object.assign(newer, { steps: newer.steps + 1, since: change.at });
    else found.push({ ...change, steps: 1, since: change.at });
  }
  return found;
}

export function showTimeline({ figures }) {
  const { since, until } = figures;
  const numLate = figures.changes.filter((change) => change.at >= since).length;
  const changes = movements(figures.changes);
  const span = seconds(until - since);
  setText(byId("timeline-words"), `${numLate || "No"} ${numLate === 1 ? "event" : "events"} in the last ${span}${changes.length ? ". Newest first." : "."}`);
  const list = byId("events");
  const known = new Map([...list.children].map((item) => [item.dataset.key, item]));
  const wanted = changes.map((change) => {
    const key = [change.at, change.kind, change.subject, change.steps].join(" ");
    return known.get(key) ?? entry(change, key);
  });
  if (wanted.length !== list.children.length || wanted.some((item, position) => list.children[position] !== item)) list.replaceChildren(...wanted);
}

function entry(change, key) {
  const at = new Date(change.at * 1000).toISOString();
  return html("li", { class: moodOf(change), "data-key": key, "data-kind": change.kind },
    html("time", { datetime: at }, when(change.at)),
    html("p", {}, html("strong", {}, titleOf(change)), ` ${change.subject}`),
    html("p", { class: "detail" }, change.detail, change.steps > 1 ? `; ${change.steps} steps since ${when(change.since)}` : ""));
}
