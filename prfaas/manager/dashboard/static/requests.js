// Panel of recent requests with the explanation of each decision.

import { byId, fillTable, html } from "./dom.js";
import { clock, count, seconds, tokens } from "./format.js";

export function showRequests(now) {
  fillTable(byId("requests-table"), now.requests, {
    key: (item) => item.id,
    empty: "This manager has not decided a request yet.",
    cells: (item) => [
      { text: clock(item.at), nowrap: true }, item.route, { text: item.reason, nowrap: true },
      { text: count(item.num_prompt_tokens), numeric: true },
      { text: item.num_uncached_tokens === null ? "" : count(item.num_uncached_tokens), numeric: true },
      { text: tokens(item.threshold_tokens), numeric: true },
      item.prefill ?? item.decode ?? "nobody", item.decode ?? "nobody", item.session || "none",
      answer(item.ended), { text: item.ended?.ttft_seconds ? seconds(item.ended.ttft_seconds) : "", numeric: true },
      { text: "Explain", label: `Explain the request of ${clock(item.at)}, ${item.id.slice(0, 8)}`, press: () => explain(item) },
    ],
  });
}

function answer(ended) {
  if (!ended) return "no report";
  if (ended.outcome === "completed") return { text: "as decided", mood: "good" };
  return { text: `${ended.outcome.replace("_", " ")}${ended.fallback ? `: ${ended.fallback}` : ""}`, mood: ended.outcome === "failed" ? "bad" : "busy" };
}

async function explain(request) {
  const response = await fetch(`/decisions/${request.id}`);
  const body = byId("explanation-body");
  body.replaceChildren(...(response.ok ? parts(request, await response.json()) : [html("p", {}, "This manager no longer has this decision.")]));
  byId("explanation").showModal();
}

function parts(request, { explanation, decision, facts, snapshot }) {
  const uncached = request.num_uncached_tokens;
  const sentences = [
    `${decision.route}: ${explanation}.`,
    `The prompt has ${count(facts.num_prompt_tokens)} tokens${uncached === null ? "" : `; ${count(uncached)} of them are not cached at the decode node`}. The threshold was ${tokens(snapshot.threshold_tokens)}.`,
  ];
  if (facts.session_agent) sentences.push(`The previous turn ran on ${facts.session_agent}.`);
  if (facts.excluded?.length) sentences.push(`Instances that failed: ${facts.excluded.join(", ")}.`);
  if (snapshot.links_down?.length) sentences.push(`Paths that were down: ${snapshot.links_down.map((item) => item.join(" → ")).join(", ")}.`);
  for (const path of snapshot.paths ?? []) {
    sentences.push(`From ${path.source} to ${path.destination} the threshold was ${tokens(path.threshold_tokens)}, the bandwidth ${path.is_abundant ? "abundant" : "scarce"}.`);
  }
  if (request.ended?.ttft_seconds) sentences.push(`The first token arrived after ${seconds(request.ended.ttft_seconds)}${phases(request.ended.phases)}.`);
  return [...sentences.map((text) => html("p", {}, text)), html("h3", {}, "Candidate instances"), candidates(decision, facts, snapshot)];
}

function phases(item) {
  const words = Object.entries(item).map(([name, value]) => `${name} ${seconds(value)}`);
  return words.length ? ` (${words.join(", ")})` : "";
}

function candidates(decision, facts, snapshot) {
  const head = ["Instance", "Cluster", "Role", "Requests", "Cached tokens", "Chosen"];
  const rows = snapshot.instances.map((item) => [
    item.instance, item.cluster, item.role, count(item.num_requests), count(facts.cached_tokens?.[item.agent] ?? 0),
    [decision.prefill === item.instance ? "prefills" : "", decision.decode === item.instance ? "decodes" : ""].filter(Boolean).join(", "),
  ]);
  return html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Candidate instances" },
    html("table", {},
      html("thead", {}, html("tr", {}, ...head.map((text) => html("th", {}, text)))),
      html("tbody", {}, ...rows.map((row) => html("tr", {}, ...row.map((text) => html("td", {}, text)))))));
}
