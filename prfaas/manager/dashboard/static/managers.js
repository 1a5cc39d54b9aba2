// Links to the pages of the managers that write the other clusters.

import { byId, html } from "./dom.js";

const ASK_MS = 10_000;
const ANYWHERE = ["0.0.0.0", "[::]"];
const isLoopback = (host) => host === "localhost" || host === "[::1]" || host.startsWith("127.");

// An owner is "<address> <name>-<random> <URL>". Its page may listen on any address, or on loopback alone.
function managerOf(owner) {
  const [address, label, page] = owner.split(" ");
  const name = label?.replace(/-[0-9a-f]{8}$/, "") ?? address;
  if (!page) return { name };
  const url = new URL(page);
  if (ANYWHERE.includes(url.hostname)) url.hostname = address.slice(0, address.lastIndexOf(":"));
  return { name, url: isLoopback(url.hostname) && !isLoopback(location.hostname) ? null : url.href };
}

export function listManagers(ownName) {
  let known = "";

  async function ask() {
    const response = await fetch("managers").catch(() => null);
    if (response?.ok && ownName()) {
      const owners = [...new Set(Object.values(await response.json()))].map(managerOf).filter((item) => item.name !== ownName());
      const text = JSON.stringify(owners);
      if (text !== known) {
        known = text;
        byId("managers").replaceChildren(...(owners.length ? [" · others:"] : []), ...owners.map(entry));
      }
    }
    setTimeout(ask, known || ownName() ? ASK_MS : 500);
  }

  ask();
}

const entry = ({ name, url }) => (url ? html("a", { href: url }, name) : ` ${name} (its page is on loopback)`);
