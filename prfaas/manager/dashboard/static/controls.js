// Time range, filters and colors. Each stays in the page's address or in this browser.

import { byId, html } from "./dom.js";

const FILTERS = ["model", "tenant", "cluster"];

export class Controls {
  constructor(changed) {
    this.form = byId("controls");
    this.wanted = new URLSearchParams(location.hash.slice(1));
    if (["300", "900", "3600"].includes(this.wanted.get("range"))) this.form.elements.range.value = this.wanted.get("range");
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("change", (event) => {
      if (event.target.id === "theme") return;
      this.wanted = new URLSearchParams(this.values());
      history.replaceState(null, "", `#${this.wanted}`);
      changed();
    });
    offerColors();
  }

  values() {
    const chosen = FILTERS.map((name) => [name, this.wanted.get(name) ?? ""]).filter(([, value]) => value);
    const filters = this.form.elements.model.options.length > 1 || chosen.length === 0
      ? FILTERS.map((name) => [name, this.form.elements[name].value]).filter(([, value]) => value) : chosen;
    return { range: this.form.elements.range.value, ...Object.fromEntries(filters) };
  }

  query() {
    const { range, ...filters } = this.values();
    return new URLSearchParams({ seconds: range, ...filters });
  }

  // A filter appears once there is something to choose.
  offer(choices) {
    for (const name of FILTERS) {
      const select = this.form.elements[name];
      const value = select.value || this.wanted.get(name) || "";
      const names = [...new Set([...choices[name], value].filter(Boolean))].sort();
      const known = [...select.options].slice(1).map((option) => option.value);
      if (known.join("\n") !== names.join("\n")) {
        select.replaceChildren(select.options[0], ...names.map((text) => html("option", { value: text }, text)));
        select.value = value;
      }
      select.parentElement.hidden = names.length < 2 && !value;
    }
  }
}

function offerColors() {
  const select = byId("theme");
  const apply = () => {
    document.documentElement.dataset.theme = select.value;
    dispatchEvent(new Event("colors"));
  };
  select.value = localStorage.getItem("theme") ?? "";
  select.onchange = () => {
    localStorage.setItem("theme", select.value);
    apply();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}
