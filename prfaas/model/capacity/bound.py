"""Upper bound on what any routing policy can sustain, and the value of each resource at that bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prfaas.model.capacity.loads import LoadModel
from prfaas.model.capacity.program import Demand, Solution, solve
from prfaas.model.cost.curve import ONE, Cost, FloatArray, OfNewTokens, WeightedCost
from prfaas.model.cost.lengths import Lengths

_NUM_BINS = 160


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
        return dict(zip(_dual_names(loads), self.solution.worth(), strict=True))


def lp_bound(loads: LoadModel, *, splits: Sequence[float] | None = None) -> Bound:
    """Return the bound with free, fractional roles, or with N_p fixed to `splits`, one for each PD cluster."""
    solution = solve(binned(loads), loads, splits=splits)
    return Bound(float(max(_dual_value(loads, solution, splits), solution.system_throughput)), solution)


def integer_bound(loads: LoadModel, fractional: Bound) -> Bound:
    """Return the bound over whole splits of a single PD cluster.

    The program's value is concave in N_p, so the best whole N_p is one of the two beside the fractional optimum.
    """
    (cluster,) = loads.deployment.pd
    if cluster.num_prefill is not None:
        return lp_bound(loads, splits=[cluster.num_prefill])
    (free,) = fractional.solution.num_prefill
    candidates = {math.floor(free + 1e-7), math.ceil(free - 1e-7)}
    return max((lp_bound(loads, splits=[count]) for count in candidates), key=lambda bound: bound.system_throughput)


def binned(loads: LoadModel) -> Demand:
    """Return the distribution in bins of about equal mass and of about equal work."""
    edges = bin_edges(loads.lengths)
    deployment = loads.deployment

    def sums(cost: Cost) -> FloatArray:
        partial = loads.lengths.cumulative(cost)
        return np.diff([partial(edge) for edge in edges])

    return Demand(
        weight=sums(ONE),
        remote_seconds=_columns([sums(cluster.profile.prefill) for cluster in deployment.prfaas], len(edges) - 1),
        local_seconds=_columns([sums(cluster.profile.prefill) for cluster in deployment.pd], len(edges) - 1),
        kv_bytes=sums(OfNewTokens(deployment.model.curve())),
    )


def _columns(columns: list[FloatArray], rows: int) -> FloatArray:
    return np.column_stack(columns) if columns else np.zeros((rows, 0))


def bin_edges(lengths: Lengths) -> list[float]:
    """Return increasing edges from below the least length to the greatest."""
    new, _, weights = lengths.points(_NUM_BINS)
    by_mass = np.interp(np.linspace(0, 1, _NUM_BINS), np.cumsum(weights) / weights.sum(), new)
    low, high = lengths.support
    spaced = np.geomspace(max(low, 1.0), high, _NUM_BINS // 2)
    inner = np.unique(np.floor(np.concatenate((by_mass, spaced))))
    return [low - 1.0, *(edge for edge in inner.tolist() if low <= edge < high), high]


def _dual_names(loads: LoadModel) -> list[str]:
    deployment = loads.deployment
    prfaas = [f"instance:{cluster.name}" for cluster in deployment.prfaas]
    pd = [f"instance:{cluster.name}" for cluster in deployment.pd]
    egress = [f"gbps:{cluster.name}" for cluster in deployment.prfaas]
    paths = [f"gbps:{path.source}->{path.target}" for path in deployment.paths]
    return [*prfaas, *pd, *egress, *paths]


def _dual_value(loads: LoadModel, solution: Solution, splits: Sequence[float] | None) -> float:
    """Return the worth of all stations at the program's prices over the least cost of a request (weak duality)."""
    least = loads.lengths.expected_minimum(option_costs(loads, solution))
    return solution.capacity_value(loads, splits) / least if least > 0 else math.inf


def option_costs(loads: LoadModel, solution: Solution) -> list[Cost]:
    """Return the cost of a request at the program's prices on each route it can take."""
    deployment, kv = loads.deployment, OfNewTokens(loads.deployment.model.curve())
    decode = solution.decode_costs
    costs: list[Cost] = []
    for index, cluster in enumerate(deployment.pd):
        local = ((solution.local[index], cluster.profile.prefill), (solution.intra[index], kv))
        costs.append(WeightedCost(((decode[index], ONE), *local)))
    for route in solution.routes:
        seconds = (solution.remote[route.source], deployment.prfaas[route.source].profile.prefill)
        price = solution.egress[route.source] + (0.0 if route.path is None else solution.paths[route.path])
        costs.append(WeightedCost(((decode[route.target], ONE), seconds, (price, kv))))
    return costs
