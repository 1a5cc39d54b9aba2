// Threshold, and routes with their reasons, over time.

import { Chart } from "./chart.js";
import { byId, fillTable, metric, setText } from "./dom.js";
import { clock, count, isNoLimit, percent, tokens } from "./format.js";

const WINDOW_SAMPLES = 10; // seconds over which a share is taken
const MAX_REASONS = 7;

export class Threshold {
  constructor() {
    this.chart = new Chart(byId("threshold-chart"), { label: "Threshold in tokens", format: tokens });
  }

  update(now, samples) {
    const names = [...new Set(samples.flatMap((its) => Object.keys(its.paths)))].sort();
    const shown = (value) => (value === undefined || isNoLimit(value) ? NaN : value);
    const series = [{ name: "t", values: samples.map((its) => shown(its.threshold_tokens)), colour: 0, latest: tokens(now.manager.threshold_tokens) }];
    names.forEach((name, position) => {
      const values = samples.map((its) => shown(its.paths[name]?.[2]));
      if (values.some((value, at) => value !== series[0].values[at] && Number.isFinite(value))) {
        series.push({ name, values, colour: (position + 1) % 8 });
      }
    });
    this.chart.update(samples.map((its) => its.at), series);
    const line = byId("threshold-now");
    setText(line, `t is ${tokens(now.manager.threshold_tokens)}.`);
    Object.assign(line.dataset, { metric: metric("prfaas_manager_threshold_tokens"), value: now.manager.threshold_tokens });
    setText(byId("plan-words"), planWords(now));
  }
}

function planWords(now) {
  const plan = now.plan;
  if (!plan) return now.manager.can_plan ? "No plan yet: t is the configured one." : "Without a deployment file there is no plan: t is the configured one.";
  const sources = Object.entries(plan.inputs).map(([what, source]) => `${what}: ${source}`).join("; ");
  return `Plan ${plan.version} of ${clock(plan.made_at)}: sustains ${plan.requests_per_second.toFixed(2)} requests a second, limited by ${plan.limit}. Made from ${sources}.`;
}

export class Routes {
  constructor() {
    this.chart = new Chart(byId("routes-chart"), { label: "Shares of routes", format: percent, isStacked: true, maximum: 1 });
  }

  update(now, samples) {
    const rows = byReason(now);
    const answered = rows.some((its) => its.answered);
    const of = (its) => (answered ? its.answered : its.count);
    const total = rows.reduce((sum, its) => sum + of(its), 0);
    const ordered = rows.sort((a, b) => of(b) - of(a));
    const series = ordered.slice(0, MAX_REASONS).map((its, position) => ({
      name: `${its.route}, ${its.reason}`, colour: position, values: shares(samples, `${its.route}/${its.reason}`, answered),
    }));
    this.chart.update(samples.map((its) => its.at), series);
    fillTable(byId("decisions"), ordered, {
      key: (its) => `${its.route}/${its.reason}`,
      empty: "No request has been routed yet.",
      cells: (its) => [
        its.route, its.reason,
        { text: count(its.count), numeric: true, ...routedFigure(its) },
        { text: count(its.answered), numeric: true },
        { text: total ? percent(of(its) / total) : "", numeric: true },
        { text: its.explanation, words: true },
      ],
    });
  }
}

// A reason that only routers decided by has no figure of this manager's own.
function routedFigure(its) {
  const labels = { reason: its.reason, route: its.route };
  return its.isRouted ? { metric: metric("prfaas_manager_decisions_total", labels), value: its.count } : {};
}

function byReason(now) {
  const rows = new Map(now.decisions.map((its) => [`${its.route}/${its.reason}`, { ...its, answered: 0, isRouted: true }]));
  for (const { route, reason, count: number, explanation } of now.answered) {
    const its = rows.get(`${route}/${reason}`) ?? { route, reason, explanation, count: 0, answered: 0, isRouted: false };
    its.answered += number;
    rows.set(`${route}/${reason}`, its);
  }
  return [...rows.values()];
}

// Of the requests of the window before each sample, the share that went so; NaN where there were none.
function shares(samples, name, answered) {
  const total = (its, prefix) => answered
    ? Object.entries(its.answered ?? {}).reduce((sum, [key, value]) => sum + (key.startsWith(prefix) ? value : 0), 0)
    : Object.entries(its.counts).reduce((sum, [key, value]) => sum + (`${key}/`.startsWith(prefix) ? value : 0), 0);
  return samples.map((its, position) => {
    const before = samples[Math.max(0, position - WINDOW_SAMPLES)];
    const all = total(its, "") - total(before, "");
    return all > 0 ? Math.max(0, total(its, `${name}/`) - total(before, `${name}/`)) / all : NaN;
  });
}
