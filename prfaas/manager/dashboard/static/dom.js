// Elements, and tables that change in place so that the focus stays.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

export const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

// Name of a metric in the form of /metrics.
export function metric(name, labels = {}) {
  const parts = Object.entries(labels).sort().map(([key, value]) => `${key}=${JSON.stringify(String(value))}`);
  return parts.length ? `${name}{${parts.join(",")}}` : name;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// A cell is a text, or {text, metric, value, mood, numeric, ratio, press, node}: a figure, its metric, a meter, a button.
function setCell(cell, wanted) {
  const entry = typeof wanted === "string" ? { text: wanted } : wanted;
  cell.className = [entry.numeric ? "n" : "", entry.mood ?? "", entry.nowrap ? "nowrap" : "", entry.words ? "words" : ""].filter(Boolean).join(" ");
  if (entry.metric) {
    cell.dataset.metric = entry.metric;
    cell.dataset.value = entry.value;
  }
  if (entry.exact !== undefined) cell.dataset.exact = entry.exact;
  if (entry.node) return setNode(cell, entry);
  if (entry.press) return setButton(cell, entry);
  if (entry.ratio !== undefined) return setMeter(cell, entry);
  setText(cell, entry.text);
}

// A node is made again only if what it shows has changed.
function setNode(cell, entry) {
  if (cell.dataset.of === entry.of) return;
  cell.dataset.of = entry.of;
  cell.replaceChildren(entry.node());
}

function setButton(cell, entry) {
  const button = cell.firstElementChild ?? cell.appendChild(html("button", { type: "button" }));
  setText(button, entry.text);
  if (entry.label) button.setAttribute("aria-label", entry.label);
  button.onclick = entry.press;
}

function setMeter(cell, entry) {
  const meter = cell.firstElementChild ?? cell.appendChild(html("meter", { min: 0, max: 1 }));
  meter.value = entry.ratio;
  meter.setAttribute("aria-label", entry.text);
  meter.title = entry.text;
}

// Rows by key, in order; `cells` gives an item's cells, the first of which names the row.
export function fillTable(table, items, { key, cells, empty }) {
  const body = table.tBodies[0];
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const rows = items.map((item) => {
    const name = String(key(item));
    const row = known.get(name) ?? html("tr", { "data-key": name });
    known.delete(name);
    const wanted = cells(item);
    while (row.cells.length < wanted.length) {
      row.append(row.cells.length ? html("td") : html("th", { scope: "row" }));
    }
    wanted.forEach((cell, position) => setCell(row.cells[position], cell));
    return row;
  });
  for (const row of known.values()) row.remove();
  if (!rows.length) rows.push(emptyRow(table, empty));
  rows.forEach((row, position) => {
    if (body.rows[position] !== row) body.insertBefore(row, body.rows[position] ?? null);
  });
}

function emptyRow(table, text) {
  return html("tr", { class: "empty" }, html("td", { colspan: table.tHead.rows[0].cells.length }, text));
}
