// Tiles of the key figures.

import { byId, html, metric, setText, svg } from "./dom.js";
import { bitRate, clock, count, isNoLimit, money, percent, rate, seconds, tokens, when } from "./format.js";
import { coveredSeconds } from "./health.js";
import { FULL_RATIO, nameOf, usage } from "./map.js";
import { incidents, isRise, movementInWords, movements } from "./timeline.js";
import { DISTANCE_PHASES } from "./ttft.js";

const LATELY_SECONDS = 60;
const STARTED_SECONDS = 60; // Sums that begin so soon after a manager's start began with it.

export function showSummary(view) {
  const tiles = [
    requestRate(view), tokenRate(view), firstToken(view, "remote"), firstToken(view, "local"), distance(view),
    threshold(view), tightestLink(view), egress(view), cacheHits(view), allLocal(view),
  ];
  const list = byId("tiles");
  tiles.forEach((tile, position) => fill(list.children[position] ?? list.appendChild(empty()), tile));
}

const empty = () => html("article", { class: "tile" }, html("h3"), html("p", { class: "figure" }, html("span"), html("small")), html("p", { class: "note" }));

// A tile is {title, figure, unit, note, metric, value, mood, spark, split}.
function fill(element, tile) {
  const [title, figure, note] = element.children;
  setText(title, tile.title);
  setText(figure.firstElementChild, tile.figure);
  setText(figure.lastElementChild, tile.unit ?? "");
  figure.className = `figure ${tile.mood ?? ""}`;
  setText(note, tile.note ?? "");
  if (tile.metric) Object.assign(figure.dataset, { metric: tile.metric, value: tile.value });
  while (element.children.length > 3) element.lastElementChild.remove();
  if (tile.spark) element.append(sparkline(tile.spark));
  if (tile.split) element.append(html("div", { class: "split", "aria-hidden": "true" }, ...tile.split.map(part)));
}

function part({ share, color }) {
  const element = html("span", { class: `c${color}` });
  element.style.width = `${100 * share}%`;
  return element;
}

function sparkline(values) {
  const top = Math.max(...values) || 1;
  const points = values.map((value, position) => `${position},${(20 * (1 - value / top)).toFixed(1)}`).join(" ");
  return svg("svg", { class: "spark", viewBox: `0 0 ${values.length - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, svg("polyline", { points }));
}

function requestRate(view) {
  const { requests } = view.figures;
  const failed = requests.outcomes.failed + requests.outcomes.broken;
  const note = `${count(requests.num_requests)} in range, ${failed ? `${count(failed)} failed` : "none failed"}`;
  return { title: "Request rate", figure: rate(requests.num_requests / coveredSeconds(view)), unit: "requests/s", note, spark: requests.steps.requests };
}

// Routers decide short prompts by themselves, without telling the manager their length.
function tokenRate(view) {
  const { requests } = view.figures;
  const note = requests.num_counted < requests.num_requests
    ? `in ${count(requests.num_counted)} requests; short ones are not counted`
    : `${count(requests.num_requests ? requests.prompt_tokens / requests.num_requests : 0)} a request`;
  return { title: "Prompt token rate", figure: rate(requests.prompt_tokens / coveredSeconds(view)), unit: "tokens/s", note, spark: requests.steps.prompt_tokens };
}

function firstToken({ figures }, route) {
  const { count: number, percentiles } = figures.requests.ttft[route];
  const title = `TTFT, ${route}`;
  if (!number) return { title, figure: "none", note: `no ${route} request in range` };
  const [p50, p95, p99] = percentiles.map(seconds);
  return { title, figure: p50, unit: "P50", note: `P95 ${p95} · P99 ${p99} · ${count(number)} requests` };
}

// Cost of the distance now: remote against local TTFT, and the part of remote TTFT that waits for the wire.
function distance({ figures }) {
  const { remote, local } = figures.requests.ttft;
  const title = "Distance costs";
  if (!remote.count) return { title, figure: "none", note: "no remote request in range" };
  const wait = DISTANCE_PHASES.reduce((sum, phase) => sum + (remote.phases[phase] ?? 0), 0);
  const whole = Object.values(remote.phases).reduce((sum, value) => sum + value, 0);
  const share = whole ? `; the wire is ${percent((remote.phases.wire ?? 0) / whole)} of TTFT` : "";
  const gap = local.count ? remote.percentiles[0] - local.percentiles[0] : null;
  const compared = gap === null ? "no local request to compare" : `P50 remote − local: ${gap < 0 ? "−" : "+"}${seconds(Math.abs(gap))}`;
  return { title, figure: whole ? seconds(wait) : "unknown", unit: whole ? "after prefill" : "", note: `${compared}${share}` };
}

function threshold({ now, figures }) {
  const raised = now.paths.find((path) => path.multiplier > 1 && !path.is_down);
  const value = (raised ?? now.manager).threshold_tokens;
  const moves = incidents(figures.changes).filter(({ steps }) => steps.some(({ thresholds: move }) => move && move[0] !== move[1])).sort((a, b) => b.until - a.until);
  const last = raised ? moves.find(({ subject }) => subject === nameOf(raised)) : moves.find(({ until }) => until < Infinity);
  const unknown = raised ? `${nameOf(raised)}: ${raised.reason}` : reasonOf(now);
  const tile = { title: "Threshold t", figure: tokens(value), unit: isNoLimit(value) ? "" : "tokens; longer: remote", note: last ? story(last, value) : unknown };
  return raised ? { ...tile, mood: "busy" } : { ...tile, metric: metric("prfaas_manager_threshold_tokens"), value };
}

// The last rise and, if t has fallen since, how far.
function story(incident, value) {
  const all = movements(incident);
  const last = all.at(-1);
  const rise = all.findLast(isRise);
  const told = [...new Set([rise ?? last, last])].map((move) => `${isRise(move) ? "rose" : "fell"} at ${when(move.at)}, ${movementInWords(move)}`);
  const replanned = last.values.at(-1) === value ? "" : `. Now ${tokens(value)}`;
  return `${incident.kind === "plan" ? "Planned t" : `t of ${incident.subject}`} ${told.join(". It ")}${replanned}`;
}

function reasonOf({ plan, manager }) {
  if (plan) return `plan of ${clock(plan.made_at)}: ${plan.cause}; with more load ${plan.first_full} fills first`;
  return manager.can_plan ? "configured; no plan yet" : "configured";
}

// Means of the last minute, since a transfer fills a link for moments only.
function tightestLink({ now, figures }) {
  const numSteps = Math.max(1, Math.round((LATELY_SECONDS * figures.num_steps) / (figures.until - figures.since)));
  const known = now.paths.filter((path) => path.capacity_bytes_per_second).map((path) => {
    const points = (figures.history.paths[nameOf(path)] ?? []).slice(-numSteps).filter((point) => point?.[1]);
    return { path, share: average(points.map(([goodput, capacity]) => goodput / capacity)) ?? usage(path) };
  });
  const title = "Fullest link";
  const [first] = known.sort((a, b) => b.share - a.share);
  if (!first) return { title, figure: "unknown", note: "no link's capacity is known yet" };
  const { path, share } = first;
  const isFull = share > FULL_RATIO;
  const note = `${isFull ? "full" : "no link is full"}; ${nameOf(path)} with a capacity of ${bitRate(path.capacity_bytes_per_second)}, mean of the last minute`;
  return { title, figure: percent(share), unit: "used", note, mood: path.is_down ? "bad" : isFull ? "busy" : "", split: [{ share, color: 0 }] };
}

const average = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

function egress({ now }) {
  const title = "Egress cost today";
  if (!now.egress.length) return { title, figure: "no price", note: "set egress_price in the deployment file" };
  const sum = (name) => money(now.egress.reduce((total, item) => total + item[name], 0));
  const { since } = now.egress[0];
  const began = since - now.manager.started_at < STARTED_SECONDS ? "when this manager started" : "midnight UTC";
  const { currency } = now.manager;
  const unnamed = currency ? "" : ". The currency is that of egress_price; name it by currency in the deployment file";
  const note = `since ${when(since)}, ${began}; at the mean rate of the last minute ${sum("per_hour")}${currency && ` ${currency}`} per hour${unnamed}`;
  return { title, figure: sum("today"), unit: currency, note };
}

function cacheHits({ figures }) {
  const { prompt_tokens: total, ...tiers } = figures.cache;
  const title = "Cache hits";
  if (!total) return { title, figure: "none", note: "no prompt was looked up in range" };
  const hit = Object.values(tiers).reduce((sum, value) => sum + value, 0);
  const names = { memory: "memory", ssd: "SSD" };
  const note = Object.entries(names).map(([tier, name]) => `${name} ${percent(tiers[tier] / total)}`).join(" · ");
  const split = Object.keys(names).map((tier, position) => ({ share: tiers[tier] / total, color: [0, 1][position] }));
  return { title, figure: percent(hit / total), unit: "of tokens", note, split };
}

function allLocal({ now: { plan, manager } }) {
  const title = "If all were local";
  if (!manager.can_plan) return { title, figure: "no model", note: "needs a deployment file" };
  if (!plan) return { title, figure: "…", note: "no plan yet" };
  const [here, offloaded] = [plan.all_local_requests_per_second, plan.requests_per_second].map(rate);
  if (!plan.arrivals_per_second) return { title, figure: here, unit: "requests/s sustained", note: `${offloaded} with offloading; TTFT needs arrivals` };
  const ttft = (value) => (value === null ? "unbounded" : seconds(value));
  const note = `${ttft(plan.ttft_seconds)} with offloading, both by the model; sustains ${here} requests/s instead of ${offloaded}`;
  return { title, figure: ttft(plan.all_local_ttft_seconds), unit: "mean TTFT", note };
}
