// Panel of the latest requests: waterfall, and a drill-down with the explanation of the decision.

import { byId, fillTable, html, setText } from "./dom.js";
import { clock, count, seconds, tokens } from "./format.js";
import { legend, phaseBars, strip } from "./waterfall.js";

export class Requests {
  constructor() {
    this.isPaused = false;
    byId("phase-legend").append(...legend());
    const button = byId("requests-pause");
    button.addEventListener("click", () => {
      this.isPaused = !this.isPaused;
      button.setAttribute("aria-pressed", this.isPaused);
      setText(button, this.isPaused ? "Resume" : "Pause");
    });
  }

  update({ now, choice }) {
    this.now = now;
    this.showLatest();
    if (this.isPaused) return;
    const rows = now.requests.filter((item) => passes(item, choice));
    const longest = Math.max(0.001, ...rows.map((item) => item.ended?.ttft_seconds ?? 0));
    fillTable(byId("requests-table"), rows, {
      key: (item) => item.id,
      empty: now.requests.length ? "No latest request passes the filters." : "This manager has not decided a request yet.",
      cells: (item) => [
        { text: clock(item.at), nowrap: true }, item.route, { text: item.reason.replaceAll("_", " "), nowrap: true },
        { text: count(item.num_prompt_tokens), numeric: true },
        { text: item.num_uncached_tokens === null ? "" : count(item.num_uncached_tokens), numeric: true },
        { text: tokens(item.threshold_tokens), numeric: true },
        { text: item.prefill ?? item.decode ?? "nobody", nowrap: true }, { text: item.decode ?? "nobody", nowrap: true },
        { text: item.session || "none", nowrap: true },
        { text: item.ended?.ttft_seconds ? seconds(item.ended.ttft_seconds) : "", numeric: true },
        { node: () => strip(item.ended?.phases ?? {}, longest), of: JSON.stringify([item.ended?.phases, longest]) },
        answer(item.ended),
        { text: "Explain", label: `Explain the request of ${clock(item.at)}, ${item.id.slice(0, 8)}`, press: () => explain(item) },
      ],
    });
  }

  // Why the latest remote request left, or why the latest request did not.
  showLatest() {
    const { requests, decisions } = this.now;
    const item = requests.find(({ route }) => route === "remote") ?? requests[0];
    const line = byId("latest-request");
    if (!item || line.dataset.of === item.id) return;
    line.dataset.of = item.id;
    const why = decisions.find(({ route, reason }) => route === item.route && reason === item.reason)?.explanation ?? item.reason;
    const button = html("button", { type: "button" }, "Explain");
    button.onclick = () => explain(this.now.requests.find(({ id }) => id === item.id) ?? item);
    const uncached = item.num_uncached_tokens === null ? "" : `${count(item.num_uncached_tokens)} uncached tokens, `;
    line.replaceChildren(html("strong", {}, `Latest ${item.route} request`), ` at ${clock(item.at)}: ${uncached}t ${tokens(item.threshold_tokens)}; ${why}. `, button);
  }
}

function passes(item, { model, tenant, cluster }) {
  return (!model || item.model === model) && (!tenant || item.tenant === tenant) && (!cluster || item.clusters.includes(cluster));
}

function answer(ended) {
  if (!ended) return "no report yet";
  if (ended.outcome === "completed") return { text: "as decided", mood: "good", nowrap: true };
  return { text: `${ended.outcome.replace("_", " ")}${ended.fallback ? `: ${ended.fallback}` : ""}`, mood: ended.outcome === "failed" ? "bad" : "busy" };
}

async function explain(request) {
  const response = await fetch(`/decisions/${request.id}`);
  const body = byId("explanation-body");
  setText(byId("explanation-title"), `Request of ${clock(request.at)}: ${request.route}, ${request.reason.replaceAll("_", " ")}`);
  body.replaceChildren(...(response.ok ? parts(request, await response.json()) : [html("p", {}, "This manager no longer has this decision.")]));
  byId("explanation").showModal();
}

function parts(request, { explanation, decision, facts, snapshot, routes }) {
  const uncached = request.num_uncached_tokens;
  const sentences = [
    `${decision.route}: ${explanation}.`,
    `The prompt has ${count(facts.num_prompt_tokens)} tokens${uncached === null ? "" : `; ${count(uncached)} of them are not cached at the decode node`}. The deciding threshold was ${tokens(request.threshold_tokens)}.`,
  ];
  if (request.model) sentences.push(`Model ${request.model}${request.tenant ? `, tenant ${request.tenant}` : ""}.`);
  if (facts.session_agent) sentences.push(`The previous turn ran on ${facts.session_agent}.`);
  if (facts.excluded?.length) sentences.push(`Instances that failed: ${facts.excluded.join(", ")}.`);
  if (snapshot.links_down?.length) sentences.push(`Paths that were down: ${snapshot.links_down.map((item) => item.join(" → ")).join(", ")}.`);
  for (const path of routes) {
    const costs = path.transfer_seconds === null ? "" : ` Sending the KV of the uncached tokens takes ${seconds(path.transfer_seconds)}, computing it locally ${seconds(path.local_prefill_seconds)}.`;
    const raised = path.threshold_tokens > snapshot.threshold_tokens ? `, raised from ${tokens(snapshot.threshold_tokens)} by congestion` : "";
    sentences.push(`From ${path.source} to ${path.destination} the threshold was ${tokens(path.threshold_tokens)}${raised}.${costs}`);
  }
  const { ended } = request;
  const times = ended?.ttft_seconds
    ? [html("h3", {}, `First token after ${seconds(ended.ttft_seconds)}`), ...(Object.keys(ended.phases).length ? [phaseBars(ended.phases, { meanings: true })] : [])]
    : [];
  return [...times, html("h3", {}, "Decision"), ...sentences.map((text) => html("p", {}, text)), html("h3", {}, "Candidate instances"), candidates(decision, facts, snapshot)];
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
