// What is held where: pools, hottest prefixes, sessions.

import { byId, fillTable, metric, setText } from "./dom.js";
import { bytes, count, seconds } from "./format.js";

const KINDS = { full_attention: "full attention", sliding_window: "sliding window", linear_state: "linear state" };
const kind = (name) => KINDS[name] ?? name;

export function showPool(now) {
  const parts = byClusterGroupAndTier(now.pool);
  const total = parts.reduce((sum, its) => sum + its.num_bytes, 0);
  fillTable(byId("pool-table"), parts, {
    key: (its) => `${its.cluster} ${its.kind} ${its.tier}`,
    empty: "The index knows of no block yet.",
    cells: (its) => {
      const labels = { cluster: its.cluster, group: its.kind, tier: its.tier };
      return [
        its.cluster, { text: kind(its.kind), nowrap: true }, its.tier,
        { text: count(its.num_blocks), numeric: true, metric: metric("prfaas_manager_held_blocks", labels), value: its.num_blocks },
        { text: bytes(its.num_bytes), numeric: true, metric: metric("prfaas_manager_held_bytes", labels), value: its.num_bytes },
        { text: `${its.cluster}, ${kind(its.kind)}, ${its.tier}: ${bytes(its.num_bytes)} of ${bytes(total)}`, ratio: total ? its.num_bytes / total : 0 },
      ];
    },
  });
  fillHoldings(now.pool);
}

function byClusterGroupAndTier(holdings) {
  const parts = new Map();
  for (const { cluster, kind: group, tier, num_blocks, num_bytes } of holdings) {
    const key = [cluster, group, tier].join("\n");
    const its = parts.get(key) ?? { cluster, kind: group, tier, num_blocks: 0, num_bytes: 0 };
    its.num_blocks += num_blocks;
    its.num_bytes += num_bytes;
    parts.set(key, its);
  }
  return [...parts.entries()].sort(([a], [b]) => a.localeCompare(b)).map(([, its]) => its);
}

function fillHoldings(holdings) {
  fillTable(byId("holdings-table"), holdings, {
    key: (its) => [its.node, its.model, its.rank, its.group, its.tier].join(" "),
    empty: "The index knows of no block yet.",
    cells: (its) => [
      its.node, its.cluster, its.model, { text: String(its.rank), numeric: true }, { text: kind(its.kind), nowrap: true }, its.tier,
      { text: count(its.num_blocks), numeric: true }, { text: bytes(its.num_bytes), numeric: true },
    ],
  });
}

export function showPrefixes(now) {
  fillTable(byId("prefixes-table"), now.prefixes, {
    key: (its) => `${its.model} ${its.hash}`,
    empty: "No cached prefix has been asked for lately.",
    cells: (its) => [
      { text: its.hash.slice(0, 12), nowrap: true }, its.model, { text: count(its.num_tokens), numeric: true },
      { text: `${its.hits_per_second.toFixed(2)}/s`, numeric: true },
      its.holders.length ? its.holders.join(", ") : "nobody",
    ],
  });
}

export function showSessions(now) {
  const { total, by_node: byNode, latest } = now.sessions;
  const nodes = Object.entries(byNode).map(([node, number]) => `${count(number)} at ${node}`).join(", ");
  const words = byId("sessions-words");
  setText(words, total ? `${count(total)} remembered: ${nodes}` : "None is remembered.");
  words.dataset.metric = metric("prfaas_manager_sessions");
  words.dataset.value = total;
  fillTable(byId("sessions-table"), latest, {
    key: (its) => `${its.tenant} ${its.name}`,
    empty: "No request has named a session yet (the router's header x-session-id does).",
    cells: (its) => [
      its.name, its.tenant || "none", its.node, { text: `${count(its.num_prompt_tokens)} tokens`, numeric: true },
      { text: seconds(Math.floor(its.idle_seconds)), numeric: true },
    ],
  });
}
