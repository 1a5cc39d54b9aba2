// Time to the first token, split into its phases.

import { Chart } from "./chart.js";
import { byId, fillTable, html, metric } from "./dom.js";
import { count, seconds } from "./format.js";

const WINDOW_SAMPLES = 30; // seconds over which means are taken
const PHASES = { remote: ["decide", "queue", "prefill", "wire", "load", "rest", "leg", "handover"], local: ["decide", "engine"] };
const NAMES = { decide: "deciding", leg: "prefill leg, undivided", handover: "handover, undivided" };
// One colour a phase; the undivided ones and the engine have those of what they contain.
const COLOURS = { decide: 0, queue: 4, prefill: 1, wire: 2, load: 3, rest: 7, leg: 5, handover: 6, engine: 1 };
const COLUMNS = ["decide", "queue", "prefill", "wire", "load", "rest", "leg", "handover", "engine"];

export class FirstTokens {
  constructor() {
    this.charts = Object.keys(PHASES).map((route) => {
      const block = html("div", {}, html("h3", {}, route));
      byId("ttft-charts").append(block);
      return [route, new Chart(block, { label: `Time to the first token, ${route}`, format: seconds, isStacked: true })];
    });
  }

  update(now, samples) {
    const times = samples.map((its) => its.at);
    for (const [route, chart] of this.charts) {
      const series = shown(now, route).map((phase) => ({ name: NAMES[phase] ?? phase, values: means(samples, route, phase), colour: COLOURS[phase] }));
      chart.update(times, series);
    }
    fillTable(byId("ttft-table"), Object.entries(now.ttft).sort(), {
      key: ([route]) => route,
      empty: "No router has reported an answered request yet.",
      cells: ([route, its]) => [
        route,
        { text: count(its.count), numeric: true, metric: metric("prfaas_manager_ttft_seconds_count", { route }), value: its.count },
        { text: its.count ? seconds(its.sum / its.count) : "", numeric: true, metric: metric("prfaas_manager_ttft_seconds_sum", { route }), value: its.sum },
        ...COLUMNS.map((phase) => phaseCell(now, route, phase)),
      ],
    });
  }
}

// The undivided phases only where there were any.
function shown(now, route) {
  return PHASES[route].filter((phase) => !["leg", "handover"].includes(phase) || now.ttft[route]?.[phase]);
}

// Phases are known of requests that were answered as decided.
function whole(answered, route) {
  return answered.filter((its) => its.route === route && its.outcome === "answered").reduce((sum, its) => sum + its.count, 0);
}

function phaseCell(now, route, phase) {
  const total = now.ttft[route][phase];
  if (total === undefined) return { text: "", numeric: true };
  const requests = whole(now.answered, route);
  return { text: requests ? seconds(total / requests) : "", numeric: true, value: total, metric: metric("prfaas_manager_ttft_phase_seconds_total", { route, phase }) };
}

function means(samples, route, phase) {
  const requests = (its) => Object.entries(its.answered ?? {}).filter(([name]) => name.startsWith(`${route}/`) && name.endsWith("/answered")).reduce((sum, [, value]) => sum + value, 0);
  return samples.map((its, position) => {
    const before = samples[Math.max(0, position - WINDOW_SAMPLES)];
    const grown = requests(its) - requests(before);
    return grown > 0 ? ((its.ttft?.[route]?.[phase] ?? 0) - (before.ttft?.[route]?.[phase] ?? 0)) / grown : NaN;
  });
}
