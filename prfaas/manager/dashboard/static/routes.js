// Table of routes and their reasons since the manager's start.

import { byId, fillTable, metric } from "./dom.js";
import { count, percent } from "./format.js";

export function showRoutes({ now }) {
  const rows = byReason(now);
  const answered = rows.some((item) => item.answered);
  const of = (item) => (answered ? item.answered : item.count);
  const total = rows.reduce((sum, item) => sum + of(item), 0);
  fillTable(byId("decisions"), rows.sort((a, b) => of(b) - of(a)), {
    key: (item) => `${item.route}/${item.reason}`,
    empty: "No request has been routed yet.",
    cells: (item) => [
      item.route, { text: item.reason, nowrap: true },
      { text: count(item.count), numeric: true, ...routedFigure(item) },
      { text: count(item.answered), numeric: true },
      { text: total ? percent(of(item) / total) : "", numeric: true },
      { text: item.explanation, words: true },
    ],
  });
}

// A reason of a router's own decision has no count at this manager.
function routedFigure(item) {
  const labels = { reason: item.reason, route: item.route };
  return item.isRouted ? { metric: metric("prfaas_manager_decisions_total", labels), value: item.count } : {};
}

function byReason(now) {
  const rows = new Map(now.decisions.map((item) => [`${item.route}/${item.reason}`, { ...item, answered: 0, isRouted: true }]));
  for (const { route, reason, count: number, explanation } of now.answered) {
    const item = rows.get(`${route}/${reason}`) ?? { route, reason, explanation, count: 0, answered: 0, isRouted: false };
    item.answered += number;
    rows.set(`${route}/${reason}`, item);
  }
  return [...rows.values()];
}
