"""Routes by length and tenant that a plan prescribes where one threshold for all requests would waste capacity."""

import hashlib
from dataclasses import replace
from itertools import accumulate

from prfaas.scheduler.placement import usable
from prfaas.scheduler.snapshot import RequestFacts, Snapshot


def within_planned_route(snapshot: Snapshot, request: RequestFacts) -> Snapshot:
    """Return the snapshot with the clusters and the threshold of the route that the plan prescribes.

    Requests of equal length are divided by `request.seed`. The snapshot is unchanged for sessions and for prompts with
    cached tokens, and where the plan prescribes nothing or a route has no healthy instance or no link.
    """
    has_node = request.session_agent or request.num_cached_tokens or any(request.cached_tokens.values())
    if not snapshot.routes or has_node:
        return snapshot
    instances, num_tokens = usable(snapshot.instances, request), request.num_prompt_tokens
    decoding = {instance.cluster for instance in instances if instance.decodes}
    prefilling = {instance.cluster for instance in instances if instance.prefills_for_others}
    routes = [
        route
        for route in snapshot.routes
        if route.above_tokens < num_tokens <= route.up_to_tokens
        and route.clusters == request.clusters
        and route.decode in decoding
        and (route.source is None or route.source in prefilling)
        and (route.source, route.decode) not in snapshot.links_down
    ]
    if not routes:
        return snapshot
    sums = list(accumulate(route.share for route in routes))
    digest = hashlib.blake2b(str(request.seed).encode(), digest_size=4).digest()
    place = int.from_bytes(digest) / 2**32 * sums[-1]
    chosen = next(route for route, end in zip(routes, sums, strict=True) if place < end)
    # Congestion has multiplied the thresholds of paths, and multiplies this route's too.
    threshold, before = chosen.above_tokens if chosen.source else num_tokens, max(snapshot.threshold_tokens, 1)
    return replace(
        snapshot,
        threshold_tokens=threshold,
        instances=tuple(i for i in snapshot.instances if i.cluster in (chosen.decode, chosen.source)),
        paths=tuple(replace(p, threshold_tokens=p.threshold_tokens * threshold // before) for p in snapshot.paths),
    )
