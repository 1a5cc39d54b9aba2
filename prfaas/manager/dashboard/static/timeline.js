// Timeline of incidents, changes and operators' actions: the latest start first.

import { byId, html, setText } from "./dom.js";
import { seconds, tokens, when } from "./format.js";

const KINDS = {
  plan: ["New plan", ""],
  congestion: ["Threshold raised", "busy"],
  calm: ["Threshold restored", "good"],
  link_down: ["Path down", "bad"],
  link_up: ["Path up", "good"],
  role_draining: ["Role change begins", "busy"],
  role_changed: ["Role changed", ""],
  node_joined: ["Node joined", "good"],
  node_left: ["Node left", "bad"],
  node_restarted: ["Node restarted", "busy"],
  node_draining: ["Node drains", "busy"],
  node_drained: ["Drain ended", "good"],
  silent: ["Instance silent", "bad"],
  answers: ["Silence ended", "good"],
  record_lost: ["Record unreachable", "bad"],
  record_found: ["Record reachable", "good"],
  operator: ["Operator", ""],
};
const ENDS = { calm: "congestion", link_up: "link_down", node_drained: "node_draining", answers: "silent", record_found: "record_lost" };
const LASTING = Object.values(ENDS);
const MAX_LINES = 9;
export const RECENT_SECONDS = 900;

const titleOf = (change) => KINDS[change.kind]?.[0] ?? change.kind;
const moodOf = (change) => KINDS[change.kind]?.[1] ?? "";

// Events that a chart marks: not those that its own lines show.
export const marksOf = (figures) => figures.changes.filter(({ thresholds }) => !thresholds).map((change) => ({ at: change.at, mood: moodOf(change), title: titleOf(change) }));

// A change, or a change with its further steps and its end. `until` is infinite while it goes on.
export function incidents(changes) {
  const found = [];
  const open = new Map();
  for (const change of [...changes].reverse()) {
    const key = `${ENDS[change.kind] ?? change.kind} ${change.subject}`;
    const incident = open.get(key) ?? { ...change, steps: [], until: Infinity };
    if (!incident.steps.length) found.push(incident);
    incident.steps.push(change);
    if (LASTING.includes(change.kind)) {
      open.set(key, incident);
    } else {
      incident.until = change.at;
      open.delete(key);
    }
  }
  return found.reverse();
}

// Faults and congestions that have ended lately, however healthy the service is now.
export function recentIncidents({ now, figures }) {
  const isFault = (item) => moodOf(item) === "bad" || item.kind === "congestion";
  return incidents(figures.changes).filter((item) => isFault(item) && now.at - item.until < RECENT_SECONDS && item.until < Infinity);
}

export function inWords(incident) {
  const { at, until, subject } = incident;
  return `${titleOf(incident)} ${subject}, ${until > at ? `${when(at)} to ${when(until)} (${seconds(until - at)})` : when(at)}`;
}

// Steps of t with the same cause, each from where the last one ended.
export function movements(incident) {
  const found = [];
  for (const { at, detail, thresholds: [from, to] } of incident.steps) {
    const last = found.at(-1);
    if (last?.detail === detail && last.values.at(-1) === from) {
      last.values.push(to);
      last.until = at;
    } else {
      found.push({ at, until: at, detail, values: [from, to], isPlanned: Boolean(last) && last.values.at(-1) !== from });
    }
  }
  return found;
}

export const isRise = ({ values }) => values.at(-1) > values[0];

export function movementInWords({ detail, values, isPlanned }) {
  const [first, ...rest] = values.map(tokens);
  if (rest.every((value) => value === first)) return `stays ${first}: ${detail}`;
  return `${[isPlanned ? `${first} (by a new plan)` : first, ...rest].join(" → ")}: ${detail}`;
}

function lines(incident) {
  if (incident.kind === "plan") return movements(incident).map((move) => `planned t ${movementInWords(move)}`);
  const all = incident.thresholds
    ? movements(incident).map((move) => ({ at: move.at, text: `t ${movementInWords(move)}` }))
    : incident.steps.map(({ at, detail }) => ({ at, text: detail }));
  const texts = all.map(({ at, text }, position) => (position ? `${when(at)} ${text}` : text));
  return texts.length > MAX_LINES ? [texts[0], `${texts.length - MAX_LINES + 1} further moves`, ...texts.slice(2 - MAX_LINES)] : texts;
}

export class Timeline {
  constructor() {
    this.list = byId("events");
    this.button = byId("events-all");
    this.button.onclick = () => {
      this.isWhole = !this.isWhole;
      this.showButton();
    };
  }

  update({ figures }) {
    const { since, until } = figures;
    const shown = incidents(figures.changes).filter((incident) => incident.until >= since);
    const number = shown.length;
    setText(byId("timeline-words"), `${number || "No"} ${number === 1 ? "event" : "events"} in the last ${seconds(until - since)}${number > 1 ? ", the latest start first." : "."}`);
    const known = new Map([...this.list.children].map((item) => [item.dataset.key, item]));
    const wanted = shown.map((incident) => {
      const key = [incident.at, incident.kind, incident.subject, incident.steps.length].join(" ");
      return known.get(key) ?? entry(incident, key);
    });
    if (number !== this.list.children.length || wanted.some((item, position) => this.list.children[position] !== item)) this.list.replaceChildren(...wanted);
    this.showButton();
  }

  showButton() {
    const frame = this.list.parentElement;
    frame.classList.toggle("whole", Boolean(this.isWhole));
    this.button.hidden = !this.isWhole && frame.scrollHeight <= frame.clientHeight;
    this.button.setAttribute("aria-expanded", Boolean(this.isWhole));
    setText(this.button, this.isWhole ? "Show fewer events" : `Show all ${this.list.children.length} events`);
  }
}

function entry(incident, key) {
  const { at, until, subject } = incident;
  const end = until === Infinity ? html("small", { class: "going" }, " still going") : until > at ? html("small", {}, ` to ${when(until)}`) : "";
  return html("li", { class: moodOf(incident), "data-key": key, "data-kind": incident.kind },
    html("div", { class: "times" }, html("time", { datetime: new Date(at * 1000).toISOString() }, when(at)), end),
    html("p", {}, html("strong", {}, titleOf(incident)), ` ${subject}`),
    ...lines(incident).map((text) => html("p", { class: "detail" }, text)));
}
