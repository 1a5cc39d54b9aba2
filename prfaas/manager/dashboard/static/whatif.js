// Panel of what-if questions to the solver, beside the present plan.

import { byId, fillTable, html, setText } from "./dom.js";
import { bitRate, count, percent, seconds, tokens } from "./format.js";

const GBIT = 125e6; // Bytes per second.

export class WhatIf {
  constructor() {
    this.form = byId("what-if-form");
    this.form.addEventListener("submit", (event) => this.solve(event));
    byId("what-if-reset").addEventListener("click", () => this.load());
  }

  // The form is created once, so that input in progress stays.
  update({ now }) {
    const alive = new Set(now.nodes.map((item) => item.cluster)).size;
    if (!now.manager.can_plan) {
      setText(byId("what-if-words"), "The manager has no deployment file: set `deployment` to use the solver.");
    } else if (alive && this.alive !== alive) {
      this.alive = alive;
      this.load();
    }
  }

  async load() {
    const response = await fetch("what-if");
    if (!response.ok) return;
    this.present = await response.json();
    const { source, clusters, arrivals_per_second: arrivals } = this.present;
    setText(byId("what-if-words"), `The solver uses the measured traffic, or the file's trace until there is enough traffic (${source}).`);
    const groups = clusters.map((item) => group(item.name, item.kind === "pd" ? pdFields(item) : prfaasFields(item)));
    byId("what-if-fields").replaceChildren(...groups, group("traffic", [["arrivals_per_second", "requests per second", arrivals ? Number(arrivals.toPrecision(3)) : ""]]));
    this.form.hidden = false;
  }

  question() {
    const clusters = {};
    for (const item of this.present.clusters) {
      clusters[item.name] = item.kind === "pd"
        ? { instances: this.number(item.name, "instances"), num_prefill: this.number(item.name, "num_prefill") }
        : { instances: this.number(item.name, "instances"), ...this.egress(item) };
    }
    return { clusters, arrivals_per_second: this.number("traffic", "arrivals_per_second") };
  }

  // An egress is sent only if it was changed, since the field shows a rounded value.
  egress(cluster) {
    const field = this.form.elements[`${cluster.name}/egress`];
    if (field.value === field.defaultValue) return {};
    return { egress_bytes_per_second: field.value === "" ? null : Number(field.value) * GBIT };
  }

  number(cluster, name) {
    const { value } = this.form.elements[`${cluster}/${name}`];
    return value === "" ? null : Number(value);
  }

  async solve(event) {
    event.preventDefault();
    const status = byId("what-if-status");
    setText(status, "Solving…");
    const body = JSON.stringify(this.question());
    const response = await fetch("what-if", { method: "POST", headers: { "Content-Type": "application/json" }, body }).catch(() => null);
    const answer = response ? await response.json() : { error: "the manager does not answer" };
    if (!response?.ok) return setText(status, `Not solved: ${answer.error}`);
    setText(status, verdict(answer));
    byId("what-if-result").hidden = false;
    fillTable(byId("what-if-table"), rows(answer), { key: ([name]) => name, empty: "", cells: ([name, today, then]) => [name, { text: today, numeric: true }, { text: then, numeric: true }] });
  }
}

function group(name, fields) {
  const inputs = fields.map(([key, label, value, hint]) =>
    html("label", {}, label, html("input", { name: `${name}/${key}`, type: "number", min: 0, step: key === "instances" || key === "num_prefill" ? 1 : "any", value, placeholder: hint })));
  return html("fieldset", {}, html("legend", {}, name), ...inputs);
}

const pdFields = (item) => [
  ["instances", "instances", item.instances],
  ["num_prefill", "of which prefill", item.num_prefill ?? "", "the best"],
];

const prfaasFields = (item) => [
  ["instances", "instances", item.instances],
  ["egress", "egress, Gbit/s", item.egress_bytes_per_second === null ? "" : Number((item.egress_bytes_per_second / GBIT).toPrecision(4)), "no limit"],
];

function verdict({ today, what_if: then }) {
  const gain = then.requests_per_second / today.requests_per_second - 1;
  if (!Number.isFinite(gain)) return "Solved.";
  return `Sustains ${percent(Math.abs(gain))} ${gain < 0 ? "less" : "more"} than today.`;
}

function rows({ today, what_if: then }) {
  const row = (name, format) => [name, format(today), format(then)];
  const splits = (item) => Object.entries(item.splits).map(([name, [p, d]]) => `${name}: ${round(p)} prefill, ${round(d)} decode`).join("; ");
  return [
    row("Sustained requests per second", (item) => item.requests_per_second.toFixed(3)),
    row("Limited by", (item) => item.limit.replaceAll("_", " ")),
    row("Threshold t", (item) => (item.threshold_tokens === null ? "none" : tokens(item.threshold_tokens))),
    row("Offloaded", (item) => percent(item.offload_ratio)),
    row("Split", splits),
    row("Egress", (item) => (item.egress_bytes_per_second === null ? "none" : bitRate(item.egress_bytes_per_second))),
    row("Arriving requests per second", (item) => (item.arrivals_per_second ? item.arrivals_per_second.toFixed(2) : "unknown")),
    row("Mean TTFT at these arrivals", (item) => ttft(item)),
  ];
}

const round = (value) => (Number.isInteger(value) ? count(value) : value.toFixed(2));

function ttft(item) {
  if (!item.arrivals_per_second) return "unknown";
  return item.ttft_seconds === null ? "unbounded" : seconds(item.ttft_seconds);
}
