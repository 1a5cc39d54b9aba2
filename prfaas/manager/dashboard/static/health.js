// One sentence about the health of the service, with its reason.

import { byId, html, setText } from "./dom.js";
import { clock, count, percent, rate, seconds, tokens } from "./format.js";
import { nameOf, stateOf } from "./map.js";
import { incidents, inWords, recentIncidents, RECENT_SECONDS } from "./timeline.js";

const MOODS = ["bad", "busy", "good", "idle"];
const FAILED_RATIO = 0.01;
const FELL_BACK_RATIO = 0.05;
const MAX_RECENT = 3;

// Returns findings as {mood, text}, worst first.
export function findings({ now, figures }) {
  const found = [...ofInstances(now, figures), ...ofPaths(now), ...ofRequests(figures), ...ofManager(now)];
  return found.sort((a, b) => MOODS.indexOf(a.mood) - MOODS.indexOf(b.mood));
}

function ofInstances(now, { changes }) {
  const engines = now.nodes.flatMap((node) => node.engines.map((engine) => ({ ...engine, node })));
  const answers = ({ node, load }) => !node.is_silent && !load?.is_silent;
  const found = [];
  if (!now.nodes.length) return [{ mood: "idle", text: "No node has registered yet" }];
  if (!engines.some((item) => answers(item) && item.role !== "prefill" && item.node.cluster_kind === "pd")) {
    found.push({ mood: "bad", text: "Down: no decode instance answers" });
  }
  for (const node of now.nodes) {
    if (node.is_silent) found.push({ mood: "bad", text: `Degraded: node ${node.name} is silent since ${clock(now.at - node.silent_seconds)}` });
    else if (node.is_leaving) found.push({ mood: "busy", text: `Node ${node.name} drains` });
  }
  for (const { instance, node, load } of engines) {
    if (load?.is_silent && !node.is_silent) found.push({ mood: "bad", text: `Degraded: engine ${instance} does not answer its agent${since(changes, instance)}` });
  }
  return found;
}

function since(changes, instance) {
  const silence = incidents(changes).find(({ kind, subject, until }) => kind === "silent" && subject === instance && until === Infinity);
  return silence ? ` since ${clock(silence.at)}` : "";
}

function ofPaths(now) {
  return now.paths.flatMap((path) => {
    if (path.is_down) return [{ mood: "bad", text: `Degraded: ${nameOf(path)} is down, so its prompts are prefilled locally` }];
    const { word, mood } = stateOf(path);
    const raised = `t is ${tokens(path.threshold_tokens)}`;
    if (word === "recovering") return [{ mood: "idle", text: `${nameOf(path)} recovers from congestion: ${raised}` }];
    if (path.multiplier > 1) return [{ mood, text: `${nameOf(path)} is ${word}: ${raised}` }];
    return mood === "busy" ? [{ mood, text: `${nameOf(path)} is ${word}` }] : [];
  });
}

function ofRequests({ requests, since, until }) {
  const { outcomes, num_requests: total } = requests;
  const span = seconds(until - since);
  const failed = outcomes.failed + outcomes.broken;
  const found = [];
  if (total && failed / total > FAILED_RATIO) found.push({ mood: "bad", text: `Degraded: ${percent(failed / total)} of ${count(total)} requests failed in ${span}` });
  if (total && outcomes.fell_back / total > FELL_BACK_RATIO) {
    found.push({ mood: "busy", text: `${percent(outcomes.fell_back / total)} of ${count(total)} requests fell back to local prefill in ${span}` });
  }
  return found;
}

function ofManager(now) {
  const found = [];
  if (now.manager.is_stale) found.push({ mood: "bad", text: "Degraded: Redis does not answer, so changes that other managers know may be missing" });
  if (now.manager.is_settling) found.push({ mood: "idle", text: "This manager has just started: some live nodes may be missing" });
  return found;
}

// Seconds of the time range for which this manager has figures.
export function coveredSeconds({ now, figures }) {
  const { requests, since, until } = figures;
  return Math.max(1, until - Math.max(requests.complete_since, since, now.manager.started_at));
}

function allWell({ now, figures }) {
  const { outcomes, num_requests: total } = figures.requests;
  const failed = outcomes.failed + outcomes.broken;
  const clusters = new Set(now.nodes.map((node) => node.cluster)).size;
  const nodes = `${count(now.nodes.length)} ${now.nodes.length === 1 ? "node" : "nodes"} in ${clusters} ${clusters === 1 ? "cluster" : "clusters"} answer`;
  const span = figures.until - figures.since;
  const traffic = total ? `${rate(total / coveredSeconds({ now, figures }))} requests/s, ${failed ? `${count(failed)} of ${count(total)}` : "none"} failed` : "no requests";
  return `${nodes}; ${traffic} in the last ${seconds(span)}`;
}

export function showHealth(view) {
  const found = findings(view);
  const serious = found.filter((item) => item.mood !== "idle");
  const recent = recentIncidents(view);
  const healthy = recent.length ? `Healthy since ${clock(Math.max(...recent.map(({ until }) => until)))}` : "Healthy";
  const first = serious[0] ?? { mood: found.length && !view.now.nodes.length ? "idle" : "good", text: view.now.nodes.length ? `${healthy}: ${allWell(view)}` : found[0].text };
  const words = first.mood === "busy" ? `Serving, under strain: ${first.text}` : first.text;
  byId("health").dataset.mood = first.mood;
  setText(byId("health-title"), `${words}.`);
  // Screen readers hear of a change of health, not of each figure in the sentence.
  setText(byId("health-status"), first.mood === "good" ? "Healthy." : `${words}.`);
  const rest = found.filter((item) => item !== first && item.text !== first.text).map((item) => `${item.text}.`);
  const more = recent.length > MAX_RECENT ? `; and ${count(recent.length - MAX_RECENT)} more` : "";
  const named = recent.slice(0, MAX_RECENT).map(inWords).join("; ");
  if (recent.length) rest.unshift(`Incidents ended in the last ${seconds(RECENT_SECONDS)}: ${named}${more}.`);
  const list = byId("notices");
  if ([...list.children].map((item) => item.textContent).join("\n") !== rest.join("\n")) {
    list.replaceChildren(...rest.map((text) => html("li", {}, text)));
  }
}
