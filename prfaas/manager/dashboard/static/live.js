// Event stream of the manager: the history once, then a document twice a second. Reconnects after every break.

const SILENT_MS = 4000; // Events arrive twice a second.
const RETRY_MS = 1000;
const SAMPLES = 900;

// Returns why there are no events, since a refused stream has no reason itself.
async function reason() {
  const response = await fetch("events").catch(() => null);
  if (response?.status === 503) return (await response.json()).error;
  response?.body?.cancel();
  return "The manager does not answer";
}

// Calls `show(document, samples)` at each event and `tell(state, words)` when the connection changes.
export function follow({ show, tell }) {
  let samples = [];
  let heardAt = 0;
  let source = null;

  function add(sample) {
    if (!sample || (samples.length && samples.at(-1).at >= sample.at)) return;
    samples.push(sample);
    samples = samples.slice(-SAMPLES);
  }

  // A restarted manager has no history, so the page keeps the samples that it has seen.
  function takeHistory(event) {
    const earlier = samples;
    samples = JSON.parse(event.data).samples;
    const begins = samples.length ? samples[0].at : Infinity;
    samples = [...earlier.filter((item) => item.at < begins), ...samples].slice(-SAMPLES);
  }

  function takeNow(event) {
    const now = JSON.parse(event.data);
    heardAt = performance.now();
    add(now.sample);
    tell("live", `Live, ${now.manager.name}`);
    show(now, samples);
  }

  function connect() {
    source = new EventSource("events");
    source.addEventListener("history", takeHistory);
    source.addEventListener("now", takeNow);
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
