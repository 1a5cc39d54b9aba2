// Estimate by the manager's model of the same traffic without any PrfaaS instance.

const ASK_MS = 60_000;
const RETRY_MS = 5_000;

export class AllLocal {
  constructor() {
    this.answer = null;
    this.dueAt = 0;
  }

  update({ now }) {
    if (!now.manager.can_plan || performance.now() < this.dueAt) return;
    this.dueAt = performance.now() + ASK_MS;
    this.ask(now).then((answer) => {
      if (answer) this.answer = answer;
      else this.dueAt = performance.now() + RETRY_MS;
    });
  }

  async ask(now) {
    const far = new Set(now.nodes.filter((node) => node.cluster_kind === "prfaas").map((node) => node.cluster));
    const form = await fetch("what-if").then((response) => response.json()).catch(() => ({}));
    const clusters = (form.clusters ?? []).filter((item) => far.has(item.name)).map((item) => [item.name, { instances: 0 }]);
    if (!form.clusters?.length) return null;
    const body = JSON.stringify({ clusters: Object.fromEntries(clusters) });
    const headers = { "Content-Type": "application/json" };
    const response = await fetch("what-if", { method: "POST", headers, body }).catch(() => null);
    return response?.ok ? response.json() : null;
  }
}
