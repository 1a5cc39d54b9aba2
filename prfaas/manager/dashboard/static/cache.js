// Panels of pools, hottest prefixes and sessions.

import { byId, fillTable, metric, setText } from "./dom.js";
import { bytes, count, seconds } from "./format.js";

const KINDS = { full_attention: "full attention", sliding_window: "sliding window", linear_state: "linear state" };
const kind = (name) => KINDS[name] ?? name;

export function showPool({ now }) {
  const parts = byClusterGroupAndTier(now.pool);
  const total = parts.reduce((sum, item) => sum + item.num_bytes, 0);
  fillTable(byId("pool-table"), parts, {
    key: (item) => `${item.cluster} ${item.kind} ${item.tier}`,
    empty: "The index has no blocks yet.",
    cells: (item) => {
      const labels = { cluster: item.cluster, group: item.kind, tier: item.tier };
      return [
        item.cluster, { text: kind(item.kind), nowrap: true }, item.tier,
        { text: count(item.num_blocks), numeric: true, metric: metric("prfaas_manager_held_blocks", labels), value: item.num_blocks },
        { text: bytes(item.num_bytes), numeric: true, metric: metric("prfaas_manager_held_bytes", labels), value: item.num_bytes },
        { text: `${item.cluster}, ${kind(item.kind)}, ${item.tier}: ${bytes(item.num_bytes)} of ${bytes(total)}`, ratio: total ? item.num_bytes / total : 0 },
      ];
    },
  });
  fillHoldings(now.pool);
}

function byClusterGroupAndTier(holdings) {
  const parts = new Map();
  for (const { cluster, kind: group, tier, num_blocks, num_bytes } of holdings) {
    const key = [cluster, group, tier].join("\n");
    const item = parts.get(key) ?? { cluster, kind: group, tier, num_blocks: 0, num_bytes: 0 };
    item.num_blocks += num_blocks;
    item.num_bytes += num_bytes;
    parts.set(key, item);
  }
  return [...parts.entries()].sort(([a], [b]) => a.localeCompare(b)).map(([, item]) => item);
}

function fillHoldings(holdings) {
  fillTable(byId("holdings-table"), holdings, {
    key: (item) => [item.node, item.model, item.rank, item.group, item.tier].join(" "),
    empty: "The index has no blocks yet.",
    cells: (item) => [
      item.node, item.cluster, item.model, { text: String(item.rank), numeric: true }, { text: kind(item.kind), nowrap: true }, item.tier,
      { text: count(item.num_blocks), numeric: true }, { text: bytes(item.num_bytes), numeric: true },
    ],
  });
}

export function showPrefixes({ now }) {
  fillTable(byId("prefixes-table"), now.prefixes, {
    key: (item) => `${item.model} ${item.hash}`,
    empty: "No cached prefix was requested lately.",
    cells: (item) => [
      { text: item.hash.slice(0, 12), nowrap: true }, item.model, { text: count(item.num_tokens), numeric: true },
      { text: `${item.hits_per_second.toFixed(2)}/s`, numeric: true },
      item.holders.length ? item.holders.join(", ") : "nobody",
    ],
  });
}

export function showSessions({ now }) {
  const { total, by_node: byNode, latest } = now.sessions;
  const nodes = Object.entries(byNode).map(([node, number]) => `${count(number)} at ${node}`).join(", ");
  const words = byId("sessions-words");
  setText(words, total ? `${count(total)} sessions: ${nodes}` : "No sessions.");
  words.dataset.metric = metric("prfaas_manager_sessions");
  words.dataset.value = total;
  fillTable(byId("sessions-table"), latest, {
    key: (item) => `${item.tenant} ${item.name}`,
    empty: "No request had a session yet. Routers read it from the header x-session-id.",
    cells: (item) => [
      item.name, item.tenant || "none", item.node, { text: `${count(item.num_prompt_tokens)} tokens`, numeric: true },
      { text: seconds(Math.floor(item.idle_seconds)), numeric: true },
    ],
  });
}
