// Summary of the deployment, with notices.

import { byId, html, metric, setText } from "./dom.js";
import { bytes, count, tokens } from "./format.js";
import { clustersOf } from "./map.js";

export function showSummary(now) {
  setText(byId("manager-name"), now.manager.name);
  const clusters = clustersOf(now);
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const tiles = [
    ["Threshold t", tokens(now.manager.threshold_tokens), metric("prfaas_manager_threshold_tokens"), now.manager.threshold_tokens],
    ["Clusters", count(clusters.length)],
    ["Nodes", count(now.nodes.length)],
    ["Requests running", count(sum(clusters.map((item) => item.running)))],
    ["Requests waiting", count(sum(clusters.map((item) => item.waiting)))],
    ["Requests routed", count(sum(now.decisions.map((item) => item.count)))],
    ["KV held", bytes(sum(now.pool.map((item) => item.num_bytes)))],
    ["Sessions", count(now.sessions.total), metric("prfaas_manager_sessions"), now.sessions.total],
  ];
  const list = byId("tiles");
  tiles.forEach(([name, text, of, value], position) => {
    const tile = list.children[position] ?? list.appendChild(html("div", {}, html("dt", {}, name), html("dd")));
    setText(tile.lastElementChild, text);
    if (of) Object.assign(tile.lastElementChild.dataset, { metric: of, value });
  });
  showNotices(notices(now));
}

function notices(now) {
  const found = [];
  if (now.manager.is_stale) found.push("Redis is unreachable: changes that other managers know may be missing.");
  if (now.manager.is_settling) found.push("This manager has just started: some live nodes may be missing.");
  for (const path of now.paths) if (path.is_down) found.push(`${path.source} → ${path.destination}: all links are down.`);
  return found;
}

function showNotices(texts) {
  const list = byId("notices");
  if ([...list.children].map((item) => item.textContent).join("\n") === texts.join("\n")) return;
  list.replaceChildren(...texts.map((text) => html("li", {}, text)));
}
