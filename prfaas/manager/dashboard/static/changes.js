// Panel of changes and their reasons.

import { byId, fillTable } from "./dom.js";
import { clock } from "./format.js";

const KINDS = {
  plan: ["new plan", ""],
  congestion: ["path congested", "busy"],
  calm: ["congestion over", "good"],
  link_down: ["path down", "bad"],
  link_up: ["path up", "good"],
  role_draining: ["role: drains", "busy"],
  role_changed: ["role changed", ""],
  node_joined: ["node joined", "good"],
  silent: ["silent", "bad"],
  answers: ["answers again", "good"],
  node_left: ["node left", "bad"],
};

export function showChanges(now) {
  fillTable(byId("changes-table"), now.changes, {
    key: (item) => [item.at, item.kind, item.subject].join(" "),
    empty: "No changes since this manager started.",
    cells: (item) => {
      const [text, mood] = KINDS[item.kind] ?? [item.kind, ""];
      return [{ text: clock(item.at), nowrap: true }, { text, mood, nowrap: true }, { text: item.subject, nowrap: true }, { text: item.detail, words: true }];
    },
  });
}
