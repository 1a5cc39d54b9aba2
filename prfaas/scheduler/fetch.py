"""Whether a prefix is fetched from another node before it is extended: PrfaaS, section 3.4.2, abundant bandwidth (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.scheduler.snapshot import InstanceState, RequestFacts, Snapshot
from prfaas.types import AgentName


@dataclass(frozen=True)
class Fetch:
    """Copy the first `num_tokens` tokens of the prompt, which `source` holds and `destination` does not."""

    source: AgentName
    destination: AgentName
    num_tokens: int


def fetch_to(snapshot: Snapshot, request: RequestFacts, site: InstanceState) -> Fetch | None:
    """Return the longest prefix that another node holds, where it is worth bringing to the instance that computes the rest.

    It is when it spares at least `fetch_tokens` tokens, and comes from the same cluster or over a link that is up and
    abundant. Among nodes that hold as much: one of the same cluster, then the first by name.
    """
    clusters = {instance.agent: instance.cluster for instance in snapshot.instances}
    best: Fetch | None = None
    best_rank = (0, False, "")
    for source, num_tokens in request.cached_tokens.items():
        gain = num_tokens - request.cached_at(site.agent)
        if not snapshot.fetch_tokens or gain < snapshot.fetch_tokens or source not in clusters:
            continue
        link = (clusters[source], site.cluster)
        is_near = link[0] == link[1]
        if not is_near and (link in snapshot.links_down or not snapshot.path(*link).is_abundant):
            continue
        rank = (-num_tokens, not is_near, source)
        if best is None or rank < best_rank:
            best, best_rank = Fetch(source, site.agent, num_tokens), rank
    return best
