"""Best threshold and splits for several PD clusters: a small linear program at each threshold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from prfaas.model.capacity import throughput
from prfaas.model.capacity.loads import LoadModel, Loads
from prfaas.model.capacity.program import Demand, Solution, solve
from prfaas.model.deployment import PdCluster
from prfaas.model.planning.plan import Limit, Plan, Split

# A price above this marks a station that limits the throughput.
_BUSY = 1e-9


class ManyPd:
    """Planner for several PD clusters with one threshold for all. The program chooses where each request decodes.

    The program's splits are rounded and then improved one instance at a time. The bound says what that leaves.
    """

    def __init__(self, loads: LoadModel) -> None:
        self._loads = loads
        self._pd = loads.deployment.pd

    def plan(self) -> Plan:
        """Return the best threshold found, with whole splits where nothing is shared."""
        relaxed = self.relaxed()
        starts = _whole_splits([split.num_prefill for split in relaxed.splits], [self._is_free(c) for c in self._pd])
        plans = [self._refine(splits, near=self._threshold_of(relaxed)) for splits in starts]
        return max(plans, key=lambda plan: plan.system_throughput)

    def _refine(self, splits: list[float], *, near: int) -> Plan:
        """Improve threshold and splits in turn and return the plan."""
        threshold = self._best_threshold(splits, near=near)
        improved = self._improve(splits, threshold)
        if improved != splits:
            threshold = self._best_threshold(improved, near=threshold)
        return self._at(threshold, improved)

    def _is_free(self, cluster: PdCluster) -> bool:
        """Return whether N_p is free to choose and must be whole."""
        return cluster.num_prefill is None and not cluster.shared_instances

    def relaxed(self, *, near: int | None = None, tolerance: float = 0.0) -> Plan:
        """Return the best plan whose splits need not be whole, with t within the ratio `tolerance`, searched from `near`."""
        threshold = self._best_threshold(None, near=near, tolerance=tolerance)
        return self._at(threshold, list(self._solve(threshold, None).num_prefill))

    def _threshold_of(self, plan: Plan) -> int:
        return self._loads.everything_offloaded if plan.threshold_tokens is None else plan.threshold_tokens

    def _solve(self, threshold: int, splits: Sequence[float] | None) -> Solution:
        return solve(_short_and_long(self._loads.at(threshold)), self._loads, splits=splits)

    def _best_threshold(
        self, splits: Sequence[float] | None, *, near: int | None = None, tolerance: float = 0.0
    ) -> int:
        low, high = self._loads.everything_offloaded, self._loads.nothing_offloaded
        if not self._loads.deployment.prfaas:
            return high
        known: dict[int, float] = {}

        def value(threshold: int) -> float:
            if threshold not in known:
                known[threshold] = self._solve(threshold, splits).system_throughput
            return known[threshold]

        if near is not None:
            low, high = _around(value, near, low, high)
        return _highest(value, low, high, tolerance=tolerance)

    def _improve(self, splits: list[float], threshold: int) -> list[float]:
        """Move single instances between the roles as long as that sustains more."""
        best = self._solve(threshold, splits).system_throughput
        moved = True
        while moved:
            moved = False
            for candidate in self._neighbours(splits):
                value = self._solve(threshold, candidate).system_throughput
                if value > best * (1 + 1e-9):
                    splits, best, moved = candidate, value, True
                    break
        return splits

    def _neighbours(self, splits: list[float]) -> list[list[float]]:
        return [
            [*splits[:index], splits[index] + step, *splits[index + 1 :]]
            for index, cluster in enumerate(self._pd)
            if self._is_free(cluster)
            for step in (-1.0, 1.0)
            if 0 <= splits[index] + step <= cluster.num_instances
        ]

    def _at(self, threshold: int, splits: list[float]) -> Plan:
        loads, solution = self._loads.at(threshold), self._solve(threshold, splits)
        offload, local = loads.offload_ratio, loads.local_ratio
        deployment, sustained = self._loads.deployment, solution.system_throughput
        decode = zip(self._pd, splits, self._loads.decode_seconds(), strict=True)
        remote_flow, local_flow = solution.remote_flows.sum(), solution.local_flows.sum()
        return Plan(
            name=deployment.name,
            threshold_tokens=threshold if deployment.prfaas and local else None,
            splits=tuple(Split(c.name, n, c.num_decode(n)) for c, n in zip(self._pd, splits, strict=True)),
            offload_ratio=offload,
            local_ratio=local,
            mean_offloaded_tokens=loads.mean_offloaded_tokens if offload else None,
            prfaas_throughput=self._remote(loads) if offload else None,
            pd_prefill_throughput=self._local(loads, splits) if local else None,
            pd_decode_throughput=sum(c.num_decode(n) / seconds for c, n, seconds in decode),
            system_throughput=sustained,
            egress_bytes_per_second=sustained * loads.remote_bytes if deployment.prfaas else None,
            local_bytes_per_second=sustained * loads.local_bytes,
            limit=_limit(solution),
            remote_shares=tuple(
                (solution.remote_flows / remote_flow if remote_flow else solution.remote_flows).tolist()
            ),
            local_shares=tuple((solution.local_flows / local_flow if local_flow else solution.local_flows).tolist()),
        )

    def _remote(self, loads: Loads) -> float:
        """Return Θ_prfaas summed over the clusters."""
        long = loads.offload_ratio
        return sum(
            throughput.prfaas_throughput(
                cluster.num_instances,
                seconds / long,
                egress_bytes_per_second=self._loads.deployment.egress(cluster),
                kv_bytes=loads.remote_bytes / long,
            )
            for cluster, seconds in zip(self._loads.deployment.prfaas, loads.remote_seconds, strict=True)
        )

    def _local(self, loads: Loads, splits: list[float]) -> float:
        """Return Θ_pd-p summed over the clusters."""
        return sum(
            throughput.pd_prefill_throughput(count, seconds / loads.local_ratio)
            for count, seconds in zip(splits, loads.local_seconds, strict=True)
        )


def _whole_splits(relaxed: Sequence[float], free: Sequence[bool]) -> list[list[float]]:
    """Return `relaxed` with whole numbers where `free`: the sum rounded down and up, largest remainders first.

    The throughput is concave in the sum, so one of both is best, up to the distribution over clusters.
    """
    floors = [math.floor(number + 1e-9) if is_free else number for number, is_free in zip(relaxed, free, strict=True)]
    order = sorted((i for i, is_free in enumerate(free) if is_free), key=lambda i: floors[i] - relaxed[i])
    left = sum(relaxed) - sum(floors)
    starts = []
    for extra in {math.floor(left + 1e-9), math.ceil(left - 1e-9)}:
        raised = order[:extra]
        starts.append([float(floor + (index in raised)) for index, floor in enumerate(floors)])
    return starts


def _short_and_long(loads: Loads) -> Demand:
    """Return two bins: short requests may only go to local prefill, long ones only to a PrfaaS cluster."""
    return Demand(
        weight=np.array([loads.local_ratio, loads.offload_ratio]),
        remote_seconds=np.array([[0.0] * len(loads.remote_seconds), loads.remote_seconds]),
        local_seconds=np.array([loads.local_seconds, [0.0] * len(loads.local_seconds)]),
        kv_bytes=np.array([loads.local_bytes, loads.remote_bytes]),
        local=[True, not loads.offload_ratio],
        remote=[not loads.local_ratio, True],
    )


def _limit(solution: Solution) -> Limit:
    if (solution.remote > _BUSY).any():
        return "prfaas"
    if (solution.egress > 0).any() or (solution.paths > 0).any():
        return "link"
    return "pd-prefill" if (solution.local > _BUSY).any() else "pd-decode"


def _around(value: Callable[[int], float], near: int, low: int, high: int) -> tuple[int, int]:
    """Return an interval around `near` that holds the greatest value: grown on each side until the value falls."""
    step = max(near // 32, 2)
    left, right = max(near - step, low), min(near + step, high)
    while left > low and value(left) >= value(min(left + step, high)):
        step *= 2
        left = max(left - step, low)
    step = max(near // 32, 2)
    while right < high and value(right) >= value(max(right - step, low)):
        step *= 2
        right = min(right + step, high)
    return left, right


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
