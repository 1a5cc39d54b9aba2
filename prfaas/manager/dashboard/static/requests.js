// Recent requests, and for each one why it went where it went.

import { byId, fillTable, html } from "./dom.js";
import { clock, count, seconds, tokens } from "./format.js";

export function showRequests(now) {
  fillTable(byId("requests-table"), now.requests, {
    key: (its) => its.id,
    empty: "This manager has not decided a request yet.",
    cells: (its) => [
      { text: clock(its.at), nowrap: true }, its.route, { text: its.reason, nowrap: true },
      { text: count(its.num_prompt_tokens), numeric: true },
      { text: its.num_uncached_tokens === null ? "" : count(its.num_uncached_tokens), numeric: true },
      { text: tokens(its.threshold_tokens), numeric: true },
      its.prefill ?? its.decode ?? "nobody", its.decode ?? "nobody", its.session || "none",
      answer(its.ended), { text: its.ended?.ttft_seconds ? seconds(its.ended.ttft_seconds) : "", numeric: true },
      { text: "Explain", label: `Explain the request of ${clock(its.at)}, ${its.id.slice(0, 8)}`, press: () => explain(its) },
    ],
  });
}

function answer(ended) {
  if (!ended) return "not reported";
  if (ended.outcome === "answered") return { text: "as decided", mood: "good" };
  return { text: `${ended.outcome.replace("_", " ")}${ended.fallback ? `: ${ended.fallback}` : ""}`, mood: ended.outcome === "failed" ? "bad" : "busy" };
}

async function explain(request) {
  const response = await fetch(`/decisions/${request.id}`);
  const body = byId("explanation-body");
  body.replaceChildren(...(response.ok ? parts(request, await response.json()) : [html("p", {}, "This manager does not know it any more.")]));
  byId("explanation").showModal();
}

function parts(request, { explanation, decision, facts, snapshot }) {
  const uncached = request.num_uncached_tokens;
  const sentences = [
    `${decision.route}: ${explanation}.`,
    `The prompt has ${count(facts.num_prompt_tokens)} tokens${uncached === null ? "" : `; ${count(uncached)} of them are not cached where it is decoded`}. t was ${tokens(snapshot.threshold_tokens)}.`,
  ];
  if (facts.session_agent) sentences.push(`Its conversation was last answered at ${facts.session_agent}.`);
  if (facts.excluded?.length) sentences.push(`Already tried: ${facts.excluded.join(", ")}.`);
  if (snapshot.links_down?.length) sentences.push(`Down at that moment: ${snapshot.links_down.map((its) => its.join(" → ")).join(", ")}.`);
  for (const path of snapshot.paths ?? []) {
    sentences.push(`From ${path.source} to ${path.destination} t was ${tokens(path.threshold_tokens)}, the bandwidth ${path.is_abundant ? "abundant" : "scarce"}.`);
  }
  if (request.ended?.ttft_seconds) sentences.push(`Its first token came after ${seconds(request.ended.ttft_seconds)}${phases(request.ended.phases)}.`);
  return [...sentences.map((text) => html("p", {}, text)), html("h3", {}, "Who could have taken it"), candidates(decision, facts, snapshot)];
}

function phases(its) {
  const words = Object.entries(its).map(([name, value]) => `${name} ${seconds(value)}`);
  return words.length ? ` (${words.join(", ")})` : "";
}

function candidates(decision, facts, snapshot) {
  const head = ["Instance", "Cluster", "Role", "Requests", "Cached tokens", "Chosen"];
  const rows = snapshot.instances.map((its) => [
    its.instance, its.cluster, its.role, count(its.num_requests), count(facts.cached_tokens?.[its.agent] ?? 0),
    [decision.prefill === its.instance ? "prefills" : "", decision.decode === its.instance ? "decodes" : ""].filter(Boolean).join(", "),
  ]);
  return html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Who could have taken it" },
    html("table", {},
      html("thead", {}, html("tr", {}, ...head.map((text) => html("th", {}, text)))),
      html("tbody", {}, ...rows.map((row) => html("tr", {}, ...row.map((text) => html("td", {}, text)))))));
}
