// Connects the stream to the panels.

import { showPool, showPrefixes, showSessions } from "./cache.js";
import { showChanges } from "./changes.js";
import { byId, html, setText } from "./dom.js";
import { Links } from "./links.js";
import { follow } from "./live.js";
import { ClusterMap } from "./map.js";
import { showRequests } from "./requests.js";
import { showSummary } from "./summary.js";
import { FirstTokens } from "./ttft.js";
import { Routes, Threshold } from "./traffic.js";
import { WhatIf } from "./whatif.js";

const drawn = [new ClusterMap(), new Threshold(), new Routes(), new FirstTokens(), new Links(), new WhatIf()];
const shown = [showSummary, showPool, showPrefixes, showSessions, showChanges, showRequests];

function show(now, samples) {
  for (const panel of drawn) panel.update(now, samples);
  for (const panel of shown) panel(now);
  document.documentElement.dataset.at = now.at;
}

function tell(state, words) {
  const line = byId("connection");
  line.dataset.state = state;
  setText(line, words);
}

function offerColours() {
  const choice = byId("theme");
  const apply = () => (document.documentElement.dataset.theme = choice.value);
  choice.value = localStorage.getItem("theme") ?? "";
  choice.onchange = () => {
    localStorage.setItem("theme", choice.value);
    apply();
  };
  apply();
}

function listContents() {
  for (const title of document.querySelectorAll("main h2")) {
    byId("contents").append(html("li", {}, html("a", { href: `#${title.parentElement.id}` }, title.textContent)));
  }
}

offerColours();
listContents();
follow({ show, tell });
