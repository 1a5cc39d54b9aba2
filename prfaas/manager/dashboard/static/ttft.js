// Panel of the time to first token by phase.

import { Chart } from "./chart.js";
import { byId, fillTable, html, metric } from "./dom.js";
import { count, seconds } from "./format.js";

const WINDOW_SAMPLES = 30; // Window of the means, in seconds.
const PHASES = { remote: ["decide", "queue", "prefill", "wire", "load", "rest", "leg", "handover"], local: ["decide", "engine"] };
const NAMES = { decide: "deciding", leg: "prefill leg, undivided", handover: "handover, undivided" };
// One color per phase. Undivided phases share the color of a phase that they contain.
const COLOURS = { decide: 0, queue: 4, prefill: 1, wire: 2, load: 3, rest: 7, leg: 5, handover: 6, engine: 1 };
const COLUMNS = ["decide", "queue", "prefill", "wire", "load", "rest", "leg", "handover", "engine"];

export class FirstTokens {
  constructor() {
    this.charts = Object.keys(PHASES).map((route) => {
      const block = html("div", {}, html("h3", {}, route));
      byId("ttft-charts").append(block);
      return [route, new Chart(block, { label: `Time to first token, ${route}`, format: seconds, isStacked: true })];
    });
  }

  update(now, samples) {
    const times = samples.map((item) => item.at);
    for (const [route, chart] of this.charts) {
      const series = shown(now, route).map((phase) => ({ name: NAMES[phase] ?? phase, values: means(samples, route, phase), colour: COLOURS[phase] }));
      chart.update(times, series);
    }
    fillTable(byId("ttft-table"), Object.entries(now.ttft).sort(), {
      key: ([route]) => route,
      empty: "No router has reported an answered request yet.",
      cells: ([route, item]) => [
        route,
        { text: count(item.count), numeric: true, metric: metric("prfaas_manager_ttft_seconds_count", { route }), value: item.count },
        { text: item.count ? seconds(item.sum / item.count) : "", numeric: true, metric: metric("prfaas_manager_ttft_seconds_sum", { route }), value: item.sum },
        ...COLUMNS.map((phase) => phaseCell(now, route, phase)),
      ],
    });
  }
}

// Undivided phases are left out if there were none.
function shown(now, route) {
  return PHASES[route].filter((phase) => !["leg", "handover"].includes(phase) || now.ttft[route]?.[phase]);
}

// Phases are known for requests that were answered as decided.
function whole(answered, route) {
  return answered.filter((item) => item.route === route && item.outcome === "completed").reduce((sum, item) => sum + item.count, 0);
}

function phaseCell(now, route, phase) {
  const total = now.ttft[route][phase];
  if (total === undefined) return { text: "", numeric: true };
  const requests = whole(now.answered, route);
  return { text: requests ? seconds(total / requests) : "", numeric: true, value: total, metric: metric("prfaas_manager_ttft_phase_seconds_total", { route, phase }) };
}

function means(samples, route, phase) {
  const requests = (item) => Object.entries(item.answered ?? {}).filter(([name]) => name.startsWith(`${route}/`) && name.endsWith("/answered")).reduce((sum, [, value]) => sum + value, 0);
  return samples.map((item, position) => {
    const before = samples[Math.max(0, position - WINDOW_SAMPLES)];
    const grown = requests(item) - requests(before);
    return grown > 0 ? ((item.ttft?.[route]?.[phase] ?? 0) - (before.ttft?.[route]?.[phase] ?? 0)) / grown : NaN;
  });
}
