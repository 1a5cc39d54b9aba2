// What changed, when, and why.

import { byId, fillTable } from "./dom.js";
import { clock } from "./format.js";

const KINDS = {
  plan: ["new plan", ""],
  congestion: ["path congests", "busy"],
  calm: ["path calms", "good"],
  link_down: ["path down", "bad"],
  link_up: ["path up", "good"],
  role_draining: ["role: drains", "busy"],
  role_changed: ["role changed", ""],
  node_joined: ["node joined", "good"],
  node_left: ["node left", "bad"],
};

export function showChanges(now) {
  fillTable(byId("changes-table"), now.changes, {
    key: (its) => [its.at, its.kind, its.subject].join(" "),
    empty: "Nothing has changed since this manager watches.",
    cells: (its) => {
      const [text, mood] = KINDS[its.kind] ?? [its.kind, ""];
      return [{ text: clock(its.at), nowrap: true }, { text, mood, nowrap: true }, { text: its.subject, nowrap: true }, { text: its.detail, words: true }];
    },
  });
}
