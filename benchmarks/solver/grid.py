"""The paper's search, for comparison: an exhaustive grid over thresholds and splits."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.model.capacity.loads import LoadModel
from prfaas.model.planning.single_pd import SinglePd


@dataclass(frozen=True)
class GridOptimum:
    """The best point of a grid, and of how many."""

    threshold_tokens: int
    num_prefill: int
    system_throughput: float
    num_points: int


def grid_search(loads: LoadModel, *, step_tokens: int) -> GridOptimum:
    """Return every threshold on a grid of `step_tokens` with every split."""
    (cluster,) = loads.deployment.pd
    solver = SinglePd(loads)
    thresholds = range(loads.everything_offloaded, loads.nothing_offloaded + 1, step_tokens)
    best = (0.0, 0, 0)
    for threshold in thresholds:
        at = loads.at(threshold)
        long = solver.long(at)
        for split in range(cluster.num_instances + 1):
            sustained = min(long, solver.short(at, split), solver.decode(split))
            best = max(best, (sustained, threshold, split))
    return GridOptimum(best[1], best[2], best[0], len(thresholds) * (cluster.num_instances + 1))
