"""Best threshold and splits for several PD clusters: a small linear program at each threshold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from prfaas.model.capacity import throughput
from prfaas.model.capacity.loads import LoadModel, Loads
from prfaas.model.capacity.program import Demand, Solution, best_whole, by_tenant, find_routes, routes_within, solve
from prfaas.model.planning.plan import Limit, Plan, Split

# Thresholds tried for whole and for fractional splits, before t is sought between the best and its neighbours.
_NUM_SCANNED, _NUM_RELAXED = 64, 10
# Plans this ratio apart are equally good.
_CLOSE = 1e-4
# Ratio to which t of fractional splits is sought.
_RELAXED = 0.005
# A price above this marks a station that limits the throughput.
_BUSY = 1e-9


class ManyPd:
    """Planner for several PD clusters with one threshold for all. The program chooses where each request decodes.

    At each threshold, branch and bound over the program finds the best whole splits.
    """

    def __init__(self, loads: LoadModel) -> None:
        self._loads = loads
        self._pd = loads.deployment.pd

    def plan(self) -> Plan:
        """Return the best threshold, with whole splits where nothing is shared."""
        upper = self._scan(_NUM_SCANNED)
        self._refine_fractional(upper)
        whole: dict[int, float] = {}

        def value(threshold: int) -> float:
            if threshold not in whole:
                whole[threshold] = best_whole(self._demand(threshold), self._loads)[0]
            return whole[threshold]

        # Without whole numbers a threshold sustains at least as much, so the rest need no search.
        for threshold in sorted(upper, key=lambda t: -upper[t]):
            if whole and upper[threshold] <= max(whole.values()) * (1 + _CLOSE):
                break
            value(threshold)
        best = max(whole, key=lambda t: whole[t])
        if max(upper.values()) > whole[best] * (1 + _CLOSE):
            best = _refined(value, sorted(upper), best, tolerance=0.0)
        return self.at(best, best_whole(self._demand(best), self._loads)[1])

    def relaxed(self) -> Plan:
        """Return the best plan whose splits need not be whole, with t within one part in 200."""
        best = self._refine_fractional(self._scan(_NUM_RELAXED), tolerance=_RELAXED)
        return self.at(best, self._solve(best).num_prefill)

    def _refine_fractional(self, known: dict[int, float], *, tolerance: float = 0.0) -> int:
        """Return the best threshold for fractional splits, and add what is tried to `known`."""
        scanned = sorted(known)

        def value(threshold: int) -> float:
            if threshold not in known:
                known[threshold] = self._solve(threshold).system_throughput
            return known[threshold]

        return _refined(value, scanned, max(scanned, key=value), tolerance=tolerance)

    def _scan(self, count: int) -> dict[int, float]:
        """Return what fractional splits sustain at thresholds over the whole range: each length of a short trace."""
        low, high = self._loads.everything_offloaded, self._loads.nothing_offloaded
        if not self._loads.deployment.prfaas:
            return {high: self._solve(high).system_throughput}
        lengths = np.ceil(self._loads.lengths.points(count)[0]).astype(int).tolist()
        return {t: self._solve(t).system_throughput for t in sorted({low, *lengths, high})}

    def _demand(self, threshold: int) -> Demand:
        everything = self._loads.at(self._loads.nothing_offloaded).local_seconds
        demand = _short_and_long(self._loads.at(threshold), everything, len(find_routes(self._loads)))
        return by_tenant(demand, self._loads)

    def _solve(self, threshold: int, splits: Sequence[float] | None = None) -> Solution:
        box = None if splits is None else [(count, count) for count in splits]
        return solve(self._demand(threshold), self._loads, box=box)

    def at(self, threshold: int, splits: Sequence[float]) -> Plan:
        """Return the operating point of a given threshold and splits."""
        loads, solution = self._loads.at(threshold), self._solve(threshold, splits)
        deployment, sustained = self._loads.deployment, solution.system_throughput
        reach = sum(ratio for ratio, within in deployment.traffic if routes_within(self._loads, within)[1].any())
        offload = loads.offload_ratio * reach
        local = loads.local_ratio + loads.offload_ratio * (1.0 - reach)
        decode = zip(self._pd, splits, self._loads.decode_seconds(), strict=True)
        remote_flow, local_flow = solution.remote_flows.sum(), solution.local_flows.sum()
        return Plan(
            name=deployment.name,
            threshold_tokens=threshold if deployment.prfaas and local else None,
            splits=tuple(Split(c.name, n, c.num_decode(n)) for c, n in zip(self._pd, splits, strict=True)),
            offload_ratio=offload,
            local_ratio=local,
            mean_offloaded_tokens=loads.mean_offloaded_tokens if offload else None,
            prfaas_throughput=offload * sum(self._loads.remote_rates(loads)) if offload else None,
            pd_prefill_throughput=self._local(loads, splits) if loads.local_ratio else None,
            pd_decode_throughput=sum(c.num_decode(n) / seconds for c, n, seconds in decode),
            system_throughput=sustained,
            egress_bytes_per_second=sustained * loads.remote_bytes * reach if deployment.prfaas else None,
            local_bytes_per_second=sustained * (loads.local_bytes + loads.remote_bytes * (1.0 - reach)),
            limit=_limit(solution),
            remote_shares=tuple(
                (solution.remote_flows / remote_flow if remote_flow else solution.remote_flows).tolist()
            ),
            local_shares=tuple((solution.local_flows / local_flow if local_flow else solution.local_flows).tolist()),
        )

    def _local(self, loads: Loads, splits: Sequence[float]) -> float:
        """Return Θ_pd-p summed over the clusters."""
        return sum(
            throughput.pd_prefill_throughput(count, seconds / loads.local_ratio)
            for count, seconds in zip(splits, loads.local_seconds, strict=True)
        )


def _short_and_long(loads: Loads, everything: Sequence[float], num_routes: int) -> Demand:
    """Return two bins: short requests may only go to local prefill, long ones only to a PrfaaS cluster.

    `everything` are the seconds of local prefill without offloading.
    """
    return Demand(
        weight=np.array([loads.local_ratio, loads.offload_ratio]),
        remote_seconds=np.array([[0.0] * len(loads.remote_seconds), loads.remote_seconds]),
        local_seconds=np.array([loads.local_seconds, np.subtract(everything, loads.local_seconds).clip(min=0.0)]),
        kv_bytes=np.array([loads.local_bytes, loads.remote_bytes]),
        local=np.repeat([[True], [not loads.offload_ratio]], len(loads.local_seconds), axis=1),
        remote=np.repeat([[not loads.local_ratio], [True]], num_routes, axis=1),
    )


def _limit(solution: Solution) -> Limit:
    if (solution.remote > _BUSY).any():
        return "prfaas"
    if (solution.egress > 0).any() or (solution.paths > 0).any():
        return "link"
    return "pd-prefill" if (solution.local > _BUSY).any() else "pd-decode"


def _refined(value: Callable[[int], float], scanned: Sequence[int], best: int, *, tolerance: float) -> int:
    """Return the best integer between the scanned neighbours of `best`."""
    index = scanned.index(best)
    low, high = scanned[max(index - 1, 0)], scanned[min(index + 1, len(scanned) - 1)]
    return max(best, _highest(value, low, high, tolerance=tolerance), key=value)


def _highest(value: Callable[[int], float], low: int, high: int, *, tolerance: float) -> int:
    """Return the integer in [low, high] with the greatest value, for values that rise and then fall: golden section."""
    golden = (math.sqrt(5) - 1) / 2
    while high - low > max(3, tolerance * high):
        left, right = high - math.ceil(golden * (high - low)), low + math.ceil(golden * (high - low))
        left, right = (left, right) if left < right else (right - 1, right)
        if value(left) >= value(right):
            high = right
        else:
            low = left
    inside = range(low, high + 1) if high - low <= 3 else (low, (low + high) // 2, high)
    return max(inside, key=value)
