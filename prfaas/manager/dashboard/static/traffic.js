// Panels of the threshold, and of routes with their reasons.

import { Chart } from "./chart.js";
import { byId, fillTable, metric, setText } from "./dom.js";
import { clock, count, isNoLimit, percent, tokens } from "./format.js";

const WINDOW_SAMPLES = 10; // Window of a share, in seconds.
const MAX_REASONS = 7;

export class Threshold {
  constructor() {
    this.chart = new Chart(byId("threshold-chart"), { label: "Threshold in tokens", format: tokens });
  }

  update(now, samples) {
    const names = [...new Set(samples.flatMap((item) => Object.keys(item.paths)))].sort();
    const shown = (value) => (value === undefined || isNoLimit(value) ? NaN : value);
    const series = [{ name: "t", values: samples.map((item) => shown(item.threshold_tokens)), colour: 0, latest: tokens(now.manager.threshold_tokens) }];
    names.forEach((name, position) => {
      const values = samples.map((item) => shown(item.paths[name]?.[2]));
      if (values.some((value, at) => value !== series[0].values[at] && Number.isFinite(value))) {
        series.push({ name, values, colour: (position + 1) % 8 });
      }
    });
    this.chart.update(samples.map((item) => item.at), series);
    const line = byId("threshold-now");
    setText(line, `The threshold t is ${tokens(now.manager.threshold_tokens)}.`);
    Object.assign(line.dataset, { metric: metric("prfaas_manager_threshold_tokens"), value: now.manager.threshold_tokens });
    setText(byId("plan-words"), planWords(now));
  }
}

function planWords(now) {
  const plan = now.plan;
  if (!plan) return now.manager.can_plan ? "No plan yet: the configured threshold applies." : "No deployment file, so no plan: the configured threshold applies.";
  const sources = Object.entries(plan.inputs).map(([what, source]) => `${what}: ${source}`).join("; ");
  return `Plan ${plan.version} of ${clock(plan.made_at)}: sustains ${plan.requests_per_second.toFixed(2)} requests per second, limited by ${plan.limit}. Inputs: ${sources}.`;
}

export class Routes {
  constructor() {
    this.chart = new Chart(byId("routes-chart"), { label: "Shares of routes", format: percent, isStacked: true, maximum: 1 });
  }

  update(now, samples) {
    const rows = byReason(now);
    const answered = rows.some((item) => item.answered);
    const of = (item) => (answered ? item.answered : item.count);
    const total = rows.reduce((sum, item) => sum + of(item), 0);
    const ordered = rows.sort((a, b) => of(b) - of(a));
    const series = ordered.slice(0, MAX_REASONS).map((item, position) => ({
      name: `${item.route}, ${item.reason}`, colour: position, values: shares(samples, `${item.route}/${item.reason}`, answered),
    }));
    this.chart.update(samples.map((item) => item.at), series);
    fillTable(byId("decisions"), ordered, {
      key: (item) => `${item.route}/${item.reason}`,
      empty: "No request has been routed yet.",
      cells: (item) => [
        item.route, item.reason,
        { text: count(item.count), numeric: true, ...routedFigure(item) },
        { text: count(item.answered), numeric: true },
        { text: total ? percent(of(item) / total) : "", numeric: true },
        { text: item.explanation, words: true },
      ],
    });
  }
}

// A reason of a router's own decision has no count at this manager.
function routedFigure(item) {
  const labels = { reason: item.reason, route: item.route };
  return item.isRouted ? { metric: metric("prfaas_manager_decisions_total", labels), value: item.count } : {};
}

function byReason(now) {
  const rows = new Map(now.decisions.map((item) => [`${item.route}/${item.reason}`, { ...item, answered: 0, isRouted: true }]));
  for (const { route, reason, count: number, explanation } of now.answered) {
    const item = rows.get(`${route}/${reason}`) ?? { route, reason, explanation, count: 0, answered: 0, isRouted: false };
    item.answered += number;
    rows.set(`${route}/${reason}`, item);
  }
  return [...rows.values()];
}

// Share of a reason among the requests of the window before each sample; NaN without requests.
function shares(samples, name, answered) {
  const total = (item, prefix) => answered
    ? Object.entries(item.answered ?? {}).reduce((sum, [key, value]) => sum + (key.startsWith(prefix) ? value : 0), 0)
    : Object.entries(item.counts).reduce((sum, [key, value]) => sum + (`${key}/`.startsWith(prefix) ? value : 0), 0);
  return samples.map((item, position) => {
    const before = samples[Math.max(0, position - WINDOW_SAMPLES)];
    const all = total(item, "") - total(before, "");
    return all > 0 ? Math.max(0, total(item, `${name}/`) - total(before, `${name}/`)) / all : NaN;
  });
}
