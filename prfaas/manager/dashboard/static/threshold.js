// Panel of the threshold t, of raised thresholds of congested paths, and of the plan behind them.

import { byId, metric, setText } from "./dom.js";
import { clock, isNoLimit, tokens } from "./format.js";
import { nameOf } from "./map.js";
import { Plot } from "./plot.js";
import { marksOf } from "./timeline.js";

const shown = (value) => (value === null || isNoLimit(value) ? null : value);

export class Threshold {
  constructor() {
    this.plot = new Plot(byId("threshold-chart"), { label: "Threshold in tokens", format: tokens });
  }

  update({ now, figures }) {
    const { threshold_tokens: base, paths } = figures.history;
    const series = [{ name: now.plan ? "planned t" : "t", values: base.map(shown), color: 0, latest: tokens(now.manager.threshold_tokens) }];
    Object.entries(paths).forEach(([name, points], position) => {
      const ofPath = points.map((point) => point?.[2] ?? null);
      const values = ofPath.map(shown);
      if (values.some((value, at) => value !== null && value !== series[0].values[at])) {
        const latest = ofPath.findLast((value) => value !== null);
        series.push({ name, values, color: (position + 1) % 7, latest: tokens(latest) });
      }
    });
    this.plot.update(figures, series, marksOf(figures));
    const line = byId("threshold-now");
    const raised = now.paths.filter((path) => path.multiplier > 1).map((path) => `; at present, over ${nameOf(path)} only those above ${tokens(path.threshold_tokens)}`);
    setText(line, `Prompts with more than ${tokens(now.manager.threshold_tokens)} uncached tokens are prefilled by a PrfaaS cluster${raised.join("")}.`);
    if (isNoLimit(now.manager.threshold_tokens)) setText(line, "No limit: every prompt is prefilled locally.");
    Object.assign(line.dataset, { metric: metric("prfaas_manager_threshold_tokens"), value: now.manager.threshold_tokens });
    setText(byId("plan-words"), planWords(now));
  }
}

function planWords({ plan, manager }) {
  if (!plan) return manager.can_plan ? "No plan yet: the configured threshold applies." : "No deployment file, so no plan: the configured threshold applies.";
  const sources = Object.entries(plan.inputs).map(([what, source]) => `${what}: ${source}`).join("; ");
  return `Plan ${plan.version} of ${clock(plan.made_at)} sustains ${plan.requests_per_second.toFixed(2)} requests per second, until ${plan.first_full} is full. Reason: ${plan.cause}. Inputs: ${sources}.`;
}
