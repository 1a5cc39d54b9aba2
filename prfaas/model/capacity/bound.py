"""Upper bound on what any routing policy can sustain, and the value of each resource at that bound."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prfaas.model.capacity.loads import LoadModel
from prfaas.model.capacity.program import (
    BYTES_PER_GBIT,
    Box,
    Demand,
    Solution,
    by_tenant,
    find_routes,
    is_whole,
    routes_within,
    solve,
    whole_box,
)
from prfaas.model.cost.curve import Cost, FloatArray, of_new_tokens, unit_cost, weighted_sum
from prfaas.model.cost.lengths import Lengths

_NUM_BINS = 160
# Boxes that promise less than this ratio more than a known split are not searched; the bound includes them.
_SEARCHED = 3e-4
# A number of instances this close to a whole one is whole.
_WHOLE = 1e-6


@dataclass(frozen=True)
class Bound:
    """Λ that no policy exceeds, and the program's prices.

    `system_throughput` is a bound by weak duality, evaluated on the distribution itself. It therefore also holds for
    policies that split within a bin.
    """

    system_throughput: float
    solution: Solution

    def duals(self, loads: LoadModel) -> dict[str, float]:
        """Return the requests per second that one more instance of a cluster, or Gbit/s of a path, would add."""
        deployment, solution = loads.deployment, self.solution
        names = [f"instance:{cluster.name}" for cluster in deployment.clusters]
        names += [f"gbps:{cluster.name}" for cluster in deployment.prfaas]
        names += [f"gbps:{path.name}" for path in deployment.paths]
        prices = (solution.remote, solution.roles, solution.egress * BYTES_PER_GBIT, solution.paths * BYTES_PER_GBIT)
        return dict(zip(names, np.concatenate(prices).tolist(), strict=True))


def lp_bound(loads: LoadModel, *, box: Box | None = None) -> Bound:
    """Return the bound with fractional roles; `box` bounds N_p of each PD cluster."""
    limits = box or whole_box(loads)
    solution = solve(binned(loads, bin_edges(loads.lengths, _NUM_BINS)), loads, box=limits)
    return Bound(float(max(_dual_value(loads, solution, limits), solution.system_throughput)), solution)


def whole_bound(loads: LoadModel, fractional: Bound) -> Bound:
    """Return the bound over all whole splits, by branch and bound from the fractional one."""
    rounded = [
        (round(count), round(count)) if is_whole(pd) else (count, count)
        for count, pd in zip(fractional.solution.num_prefill, loads.deployment.pd, strict=True)
    ]
    best, highest = lp_bound(loads, box=rounded), 0.0
    boxes = [(fractional, whole_box(loads))]
    while boxes:
        bound, box = boxes.pop()
        if bound.system_throughput <= best.system_throughput * (1 + _SEARCHED):
            highest = max(highest, bound.system_throughput)
            continue
        index = _most_fractional(loads, bound.solution)
        if index is None:
            best = bound
        else:
            boxes += _halves(loads, box, index, bound.solution.num_prefill[index])
    return Bound(max(highest, best.system_throughput), best.solution)


def _most_fractional(loads: LoadModel, solution: Solution) -> int | None:
    """Return the PD cluster whose N_p is farthest from whole, or None."""
    pairs = zip(solution.num_prefill, loads.deployment.pd, strict=True)
    distances = [abs(count - round(count)) if is_whole(pd) else 0.0 for count, pd in pairs]
    index = int(np.argmax(distances))
    return index if distances[index] > _WHOLE else None


def _halves(loads: LoadModel, box: Box, index: int, count: float) -> list[tuple[Bound, Box]]:
    """Return both sides of a box around N_p of one cluster, the better one last."""
    low, high = box[index]
    cut = min(max(math.floor(count + _WHOLE), low), high - 1)
    sides = [[*box[:index], side, *box[index + 1 :]] for side in ((low, cut), (cut + 1, high))]
    halves: list[tuple[Bound, Box]] = [(lp_bound(loads, box=side), side) for side in sides]
    return sorted(halves, key=lambda half: half[0].system_throughput)


def binned(loads: LoadModel, edges: Sequence[float]) -> Demand:
    """Return the distribution in bins between increasing edges. Each bin may take every route of its tenant."""
    deployment = loads.deployment

    def sums(cost: Cost) -> FloatArray:
        partial = loads.lengths.cumulative(cost)
        return np.diff([partial(edge) for edge in edges])

    demand = Demand(
        weight=sums(unit_cost),
        remote_seconds=_columns([sums(cluster.profile.prefill.at) for cluster in deployment.prfaas], len(edges) - 1),
        local_seconds=_columns([sums(cluster.profile.prefill.at) for cluster in deployment.pd], len(edges) - 1),
        kv_bytes=sums(of_new_tokens(deployment.model.curve())),
        local=np.ones((len(edges) - 1, len(deployment.pd)), dtype=bool),
        remote=np.ones((len(edges) - 1, len(find_routes(loads))), dtype=bool),
    )
    return by_tenant(demand, loads)


def _columns(columns: list[FloatArray], rows: int) -> FloatArray:
    return np.column_stack(columns) if columns else np.zeros((rows, 0))


def bin_edges(lengths: Lengths, num_bins: int) -> list[float]:
    """Return increasing edges from below the least length to the greatest, of bins of about equal mass or work."""
    new, _, weights = lengths.points(_NUM_BINS)
    by_mass = np.interp(np.linspace(0, 1, num_bins), np.cumsum(weights) / weights.sum(), new)
    low, high = lengths.support
    spaced = np.geomspace(max(low, 1.0), high, num_bins // 2)
    inner = np.unique(np.floor(np.concatenate((by_mass, spaced))))
    return [low - 1.0, *(edge for edge in inner.tolist() if low <= edge < high), high]


def _dual_value(loads: LoadModel, solution: Solution, box: Box) -> float:
    """Return the worth of all stations at the program's prices over the least cost of a request (weak duality)."""
    costs, least = option_costs(loads, solution), 0.0
    for ratio, clusters in loads.deployment.traffic:
        allowed = np.concatenate(routes_within(loads, clusters))
        least += ratio * loads.lengths.expected_minimum([costs[index] for index in np.flatnonzero(allowed)])
    return solution.capacity_value(loads, box) / least if least > 0 else math.inf


def option_costs(loads: LoadModel, solution: Solution) -> list[Cost]:
    """Return the cost of a request at the program's prices on each route it can take."""
    deployment, kv = loads.deployment, of_new_tokens(loads.deployment.model.curve())
    decode = solution.decode_costs
    costs: list[Cost] = []
    for index, cluster in enumerate(deployment.pd):
        costs.append(weighted_sum(((decode[index], unit_cost), (solution.local[index], cluster.profile.prefill.at))))
    for route in solution.routes:
        seconds = (solution.remote[route.source], deployment.prfaas[route.source].profile.prefill.at)
        price = solution.egress[route.source] + (0.0 if route.path is None else solution.paths[route.path])
        costs.append(weighted_sum(((decode[route.target], unit_cost), seconds, (price, kv))))
    return costs
