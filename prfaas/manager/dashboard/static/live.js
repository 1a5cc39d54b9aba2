// The stream of the manager: its history once, then a document twice a second; for ever, also over its restarts.

const SILENT_MS = 4000; // events come twice a second
const RETRY_MS = 1000;
const SAMPLES = 900;

// Why there are no events: a stream that is refused does not say so itself.
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

  // A manager that has restarted knows nothing of before; what this page has seen of that stays.
  function takeHistory(event) {
    const earlier = samples;
    samples = JSON.parse(event.data).samples;
    const begins = samples.length ? samples[0].at : Infinity;
    samples = [...earlier.filter((its) => its.at < begins), ...samples].slice(-SAMPLES);
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
      tell("lost", `${await reason()}; these are its last figures.`);
      setTimeout(connect, RETRY_MS);
    };
  }

  setInterval(() => {
    if (heardAt && performance.now() - heardAt > SILENT_MS) {
      tell("lost", `No news for ${Math.round((performance.now() - heardAt) / 1000)} s; these are the last figures.`);
    }
  }, RETRY_MS);
  connect();
}
