// Data of the manager: its present state as a stream, and the figures of the chosen time range every two seconds.

const SILENT_MS = 4000; // Events arrive twice a second.
const RETRY_MS = 1000;
const FIGURES_MS = 2000;

// Returns why there are no events, since a refused stream has no reason itself.
async function reason() {
  const response = await fetch("events").catch(() => null);
  if (response?.status === 503) return (await response.json()).error;
  response?.body?.cancel();
  return "The manager does not answer";
}

// Calls `show(now)` at each event and `tell(state, words)` when the connection changes.
export function follow({ show, tell }) {
  let heardAt = 0;
  let source = null;

  function take(event) {
    const now = JSON.parse(event.data);
    heardAt = performance.now();
    tell("live", "Live");
    show(now);
  }

  function connect() {
    source = new EventSource("events");
    source.addEventListener("now", take);
    source.onerror = async () => {
      source.close();
      tell("lost", `${await reason()}; the figures are the last known ones.`);
      setTimeout(connect, RETRY_MS);
    };
  }

  setInterval(() => {
    if (heardAt && performance.now() - heardAt > SILENT_MS) {
      tell("lost", `No data for ${Math.round((performance.now() - heardAt) / 1000)} s; the figures are the last known ones.`);
    }
  }, RETRY_MS);
  connect();
}

// Calls `show(figures)` for the present choice, and returns a function that asks again at once.
export function followFigures({ choice, show }) {
  let timer = null;

  async function ask() {
    clearTimeout(timer);
    const asked = choice();
    const response = await fetch(`figures?${asked}`).catch(() => null);
    if (response?.ok) {
      const figures = await response.json();
      if (String(choice()) === String(asked)) show(figures); // Else a newer choice is on its way.
    }
    clearTimeout(timer);
    timer = setTimeout(ask, FIGURES_MS);
  }

  ask();
  return ask;
}
