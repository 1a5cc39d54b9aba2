// Phases of requests as waterfalls: a strip in a table row, and bars with figures.

import { html } from "./dom.js";
import { percent, seconds } from "./format.js";

export const ORDER = ["decide", "queue", "prefill", "leg", "engine", "wire", "load", "handover", "rest"];
export const COLORS = { decide: 7, queue: 4, prefill: 0, leg: 0, engine: 0, wire: 1, load: 3, handover: 1, rest: 6 };
export const NAMES = {
  decide: "Decide", queue: "Queue", prefill: "Prefill", leg: "Queue and prefill", engine: "Engine",
  wire: "Wire", load: "Load", handover: "Wire and load", rest: "First token",
};
const MEANINGS = {
  decide: "the router tokenizes, asks the manager and chooses", queue: "until the prefill engine runs its first layer",
  prefill: "until the last layer", leg: "in the prefill instance, undivided", engine: "queue and prefill in one instance",
  wire: "after the prefill, until the last byte is acknowledged", load: "from memory into the decode engine",
  handover: "after the prefill, undivided", rest: "messages, and the step of the first token",
};

const present = (phases) => ORDER.filter((phase) => phases[phase] > 0);

// The strip's full width is `longest` seconds.
export function strip(phases, longest) {
  const parts = present(phases).map((phase) => {
    const part = html("span", { class: `c${COLORS[phase]}` });
    part.style.width = `${(100 * phases[phase]) / longest}%`;
    return part;
  });
  const words = present(phases).map((phase) => `${NAMES[phase]} ${seconds(phases[phase])}`).join(", ");
  return html("div", { class: "waterfall", role: "img", "aria-label": words || "phases unknown", title: words }, ...parts);
}

// Rows of name, bar at its offset, and duration.
export function phaseBars(phases, { meanings = false } = {}) {
  const whole = Object.values(phases).reduce((sum, value) => sum + value, 0);
  let offset = 0;
  const rows = present(phases).flatMap((phase) => {
    const bar = html("span", { class: `c${COLORS[phase]}` });
    bar.style.left = `${(100 * offset) / whole}%`;
    bar.style.width = `${(100 * phases[phase]) / whole}%`;
    offset += phases[phase];
    return [
      html("span", { title: MEANINGS[phase] }, NAMES[phase]),
      html("span", { class: "track" }, bar),
      html("span", { class: "number" }, `${seconds(phases[phase])} · ${percent(phases[phase] / whole)}`),
    ];
  });
  const hint = meanings ? [html("p", { class: "hint" }, `${present(phases).map((phase) => `${NAMES[phase]}: ${MEANINGS[phase]}`).join("; ")}.`)] : [];
  return html("div", {}, html("div", { class: "bars" }, ...rows), ...hint);
}

export const legend = () => ["decide", "queue", "prefill", "wire", "load", "rest"].map((phase) =>
  html("li", {}, html("span", { class: `swatch c${COLORS[phase]}`, "aria-hidden": "true" }), NAMES[phase]));
