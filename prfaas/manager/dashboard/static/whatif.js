// Questions to the solver: the measured traffic on other numbers of instances, splits and rates, beside the plan of today.

import { byId, fillTable, html, setText } from "./dom.js";
import { bitRate, count, percent, seconds, tokens } from "./format.js";

const GBIT = 125e6; // bytes per second

export class WhatIf {
  constructor() {
    this.form = byId("what-if-form");
    this.form.addEventListener("submit", (event) => this.solve(event));
    byId("what-if-reset").addEventListener("click", () => this.load());
  }

  // The form is made once, when there is something to solve: what somebody is writing stays.
  update(now) {
    const alive = new Set(now.nodes.map((its) => its.cluster)).size;
    if (!now.manager.can_plan) {
      setText(byId("what-if-words"), "The manager has no deployment file, so there is nothing to solve: set `deployment`.");
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
    setText(byId("what-if-words"), `The solver on the traffic that was measured, or on the file's trace until there is enough (${source}).`);
    const groups = clusters.map((its) => group(its.name, its.kind === "pd" ? pdFields(its) : prfaasFields(its)));
    byId("what-if-fields").replaceChildren(...groups, group("traffic", [["arrivals_per_second", "requests a second", arrivals || ""]]));
    this.form.hidden = false;
  }

  question() {
    const clusters = {};
    for (const its of this.present.clusters) {
      clusters[its.name] = its.kind === "pd"
        ? { instances: this.number(its.name, "instances"), num_prefill: this.number(its.name, "num_prefill") }
        : { instances: this.number(its.name, "instances"), ...this.egress(its) };
    }
    return { clusters, arrivals_per_second: this.number("traffic", "arrivals_per_second") };
  }

  // Only an egress that somebody has changed is asked about: the field shows it rounded.
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
    const said = response ? await response.json() : { error: "the manager does not answer" };
    if (!response?.ok) return setText(status, `Not solved: ${said.error}`);
    setText(status, verdict(said));
    byId("what-if-result").hidden = false;
    fillTable(byId("what-if-table"), rows(said), { key: ([name]) => name, empty: "", cells: ([name, today, then]) => [name, { text: today, numeric: true }, { text: then, numeric: true }] });
  }
}

function group(name, fields) {
  const inputs = fields.map(([key, label, value, hint]) =>
    html("label", {}, label, html("input", { name: `${name}/${key}`, type: "number", min: 0, step: key === "instances" || key === "num_prefill" ? 1 : "any", value, placeholder: hint })));
  return html("fieldset", {}, html("legend", {}, name), ...inputs);
}

const pdFields = (its) => [
  ["instances", "instances", its.instances],
  ["num_prefill", "of them prefill", its.num_prefill ?? "", "the best"],
];

const prfaasFields = (its) => [
  ["instances", "instances", its.instances],
  ["egress", "egress, Gbit/s", its.egress_bytes_per_second === null ? "" : Number((its.egress_bytes_per_second / GBIT).toPrecision(4)), "no limit"],
];

function verdict({ today, what_if: then }) {
  const gain = then.requests_per_second / today.requests_per_second - 1;
  if (!Number.isFinite(gain)) return "Solved.";
  return `Sustains ${percent(Math.abs(gain))} ${gain < 0 ? "less" : "more"} than today.`;
}

function rows({ today, what_if: then }) {
  const row = (name, format) => [name, format(today), format(then)];
  const splits = (its) => Object.entries(its.splits).map(([name, [p, d]]) => `${name}: ${round(p)} prefill, ${round(d)} decode`).join("; ");
  return [
    row("Requests a second that it sustains", (its) => its.requests_per_second.toFixed(3)),
    row("Limited by", (its) => its.limit.replaceAll("_", " ")),
    row("Threshold t", (its) => (its.threshold_tokens === null ? "none" : tokens(its.threshold_tokens))),
    row("Offloaded", (its) => percent(its.offload_ratio)),
    row("Split", splits),
    row("Egress", (its) => (its.egress_bytes_per_second === null ? "none" : bitRate(its.egress_bytes_per_second))),
    row("Requests a second that arrive", (its) => (its.arrivals_per_second ? its.arrivals_per_second.toFixed(2) : "unknown")),
    row("Mean TTFT at these", (its) => ttft(its)),
  ];
}

const round = (value) => (Number.isInteger(value) ? count(value) : value.toFixed(2));

function ttft(its) {
  if (!its.arrivals_per_second) return "unknown";
  return its.ttft_seconds === null ? "without bound" : seconds(its.ttft_seconds);
}
