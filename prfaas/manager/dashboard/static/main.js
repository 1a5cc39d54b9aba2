// Connects the manager's data to the panels.

import { showPool, showPrefixes, showSessions } from "./cache.js";
import { Controls } from "./controls.js";
import { byId, setText } from "./dom.js";
import { present } from "./format.js";
import { showHealth } from "./health.js";
import { Links } from "./links.js";
import { follow, followFigures } from "./live.js";
import { listManagers } from "./managers.js";
import { ClusterMap } from "./map.js";
import { Requests } from "./requests.js";
import { showRoutes } from "./routes.js";
import { showSummary } from "./summary.js";
import { Threshold } from "./threshold.js";
import { Timeline } from "./timeline.js";
import { Traffic } from "./traffic.js";
import { FirstTokens, showPhases } from "./ttft.js";

const controls = new Controls(() => askFigures());
const drawn = [new ClusterMap(), new Threshold(), new Traffic(), new FirstTokens(), new Links(), new Requests(), new Timeline()];
const shown = [showHealth, showSummary, showPhases, showRoutes, showPool, showPrefixes, showSessions];
let now = null;
let figures = null;

// Panels take `view`: the present state, the figures of the time range, and the chosen filters.
function show() {
  if (!now || !figures) return;
  const view = { now, figures, choice: controls.values() };
  for (const panel of drawn) panel.update(view);
  for (const panel of shown) panel(view);
  setText(byId("manager-name"), now.manager.name);
  setText(byId("clock"), `Now ${present(now.at)}`);
  byId("clock").dateTime = new Date(now.at * 1000).toISOString();
  document.title = `${now.manager.name} · prfaas`;
  document.documentElement.dataset.at = now.at;
}

function tell(state, words) {
  const line = byId("connection");
  line.dataset.state = state;
  setText(line, words);
}

const askFigures = followFigures({
  choice: () => controls.query(),
  show: (found) => {
    figures = found;
    controls.offer(found.requests.choices);
    show();
  },
});
follow({
  tell,
  show: (found) => {
    now = found;
    show();
  },
});
listManagers(() => now?.manager.name);
