"""Capacity of a deployment from a saturated run: the slower route from prefill to answer, for the mix of the traffic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from prfaas.sim.model.request import SimulatedRequest


def sustained(requests: Sequence[SimulatedRequest]) -> float:
    """Requests per second: the least, over the reasons, of its rate over its share. The faster way was never full."""
    ends = defaultdict[str, list[float]](list)
    for request in requests:
        ends[request.reason].append(request.decode_end)
    return min(_rate(sorted(ending)) * len(requests) / len(ending) for ending in ends.values())


def _rate(ends: Sequence[float]) -> float:
    """Between the first tenth and the last fifth."""
    first, last = len(ends) // 10, len(ends) - len(ends) // 5
    return (last - first) / (ends[last] - ends[first])
