"""Best routes and splits for several PD clusters, or for tenants: a small linear program over bins of lengths."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np

from prfaas.model.capacity.bound import bin_edges, binned
from prfaas.model.capacity.loads import LoadModel
from prfaas.model.capacity.program import Demand, Solution, best_whole, is_whole, solve
from prfaas.model.cost.curve import FloatArray
from prfaas.model.planning.plan import Limit, Plan, PlannedRoute, Split
from prfaas.model.planning.single_pd import first_at_least

_NUM_BINS = 32
# Plans this ratio apart are equally good.
_CLOSE = 5e-4
# Upper end of the last range of lengths, and the least share of a route.
_LONGEST, _LEAST_SHARE = (1 << 31) - 1, 1e-5
# A share above this is all requests, up to rounding.
_MOST = 1.0 - 1e-9
# A price above this marks a station that limits the throughput.
_BUSY = 1e-9


class ManyPd:
    """Planner for several PD clusters. The program chooses where requests of each length and tenant decode.

    Branch and bound over the program finds the best whole splits.
    """

    def __init__(self, loads: LoadModel) -> None:
        self._loads = loads
        self._pd = loads.deployment.pd

    def plan(self) -> Plan:
        """Return the best plan, with whole splits where nothing is shared.

        If the clusters are alike, its threshold alone decides: routers then divide the rest better by load.
        """
        plan = self._by_length()
        count = plan.num_prefill / len(self._pd)
        if not self._is_even() or (count % 1 and is_whole(self._pd[0])):
            return plan
        even = self.at(self._threshold(plan.offload_ratio), [count] * len(self._pd))
        return even if even.system_throughput >= plan.system_throughput * (1 - _CLOSE) else plan

    def _is_even(self) -> bool:
        """Return whether clusters, paths and tenants are alike."""
        deployment = self._loads.deployment
        kinds = {replace(pd, name="") for pd in self._pd}
        rates = {deployment.path_bytes_per_second(j.name, d.name) for j in deployment.prfaas for d in self._pd}
        return len(kinds) == 1 and len(rates) < 2 and not deployment.tenants

    def _by_length(self) -> Plan:
        """Return the best routes by length and tenant. As many requests exceed the threshold as leave.

        Where decode limits the throughput, they leave as much room in prefill and transfers as they can.
        """
        loads, edges = self._loads, bin_edges(self._loads.lengths, _NUM_BINS)
        demand = binned(loads, edges)
        sustained, splits = best_whole(demand, loads)
        slack = (1 + _CLOSE) / max(sustained, _BUSY)
        scaled = [roles.num_decode(n) * slack for roles, n in zip(loads.roles, splits, strict=True)]
        solution = solve(demand, loads, box=[(count, count) for count in splits], num_decode=scaled)
        threshold = self._threshold(float(demand.weight @ solution.shares[:, len(self._pd) :].sum(axis=1)))
        plan = self._plan(threshold, splits, demand, replace(solution, system_throughput=sustained))
        limit: Limit = "pd-decode" if solution.system_throughput > sustained else plan.limit
        return replace(plan, limit=limit, routes=self._routes(edges, demand, solution))

    def _threshold(self, offload_ratio: float) -> int:
        """Return the least threshold that no more requests exceed."""
        loads = self._loads
        low, high = loads.everything_offloaded, loads.nothing_offloaded
        return first_at_least(lambda t: loads.at(t).offload_ratio <= offload_ratio + 1.0 - _MOST, low, high)

    def _routes(self, edges: Sequence[float], demand: Demand, solution: Solution) -> tuple[PlannedRoute, ...]:
        """Return the routes of each tenant and range of lengths."""
        deployment = self._loads.deployment
        ranges = list(pairwise([0, *map(math.floor, edges[1:-1]), _LONGEST]))
        bound = {tenant.clusters for tenant in deployment.tenants}
        groups = [clusters if clusters in bound else frozenset() for _, clusters in deployment.traffic]
        ends: list[tuple[str, str | None]] = [(pd.name, None) for pd in deployment.pd]
        ends += [(deployment.pd[way.target].name, deployment.prfaas[way.source].name) for way in solution.routes]
        rows = zip(product(groups, ranges), solution.shares * demand.weight[:, None], strict=True)
        return tuple(
            PlannedRoute(clusters, *within, *end, float(share))
            for (clusters, within), shares in rows
            for end, share in zip(ends, shares, strict=True)
            if share > _LEAST_SHARE
        )

    def at(self, threshold: int, splits: Sequence[float]) -> Plan:
        """Return the operating point of a given threshold and splits."""
        low, high = self._loads.lengths.support
        demand = binned(self._loads, [low - 1.0, min(max(threshold, low - 1.0), high), high])
        # The first bin of each tenant stays, and the second leaves if it has a route.
        is_long = np.arange(len(demand.weight)) % 2 == 1
        stays = ~is_long | ~demand.remote.any(axis=1)
        demand = replace(demand, local=demand.local & stays[:, None], remote=demand.remote & is_long[:, None])
        solution = solve(demand, self._loads, box=[(count, count) for count in splits])
        return self._plan(threshold, splits, demand, solution)

    def _plan(self, threshold: int, splits: Sequence[float], demand: Demand, solution: Solution) -> Plan:
        loads, deployment = self._loads.at(threshold), self._loads.deployment
        flows, sustained = demand.weight @ solution.shares, solution.system_throughput
        sources = np.array([way.source for way in solution.routes], dtype=int)
        sent = solution.shares[:, len(self._pd) :].sum(axis=1)
        offload, sent_bytes = float(sent @ demand.weight), float(sent @ demand.kv_bytes)
        decode = [roles.num_decode(n) for roles, n in zip(self._loads.roles, splits, strict=True)]
        local = [(n, seconds) for n, seconds in zip(splits, loads.local_seconds, strict=True) if seconds]
        return Plan(
            name=deployment.name,
            threshold_tokens=threshold if deployment.prfaas and (loads.local_ratio or offload < _MOST) else None,
            splits=tuple(Split(pd.name, *counts) for pd, *counts in zip(self._pd, splits, decode, strict=True)),
            offload_ratio=offload,
            local_ratio=1.0 - offload,
            mean_offloaded_tokens=loads.mean_offloaded_tokens if loads.offload_ratio else None,
            prfaas_throughput=offload * sum(self._loads.remote_rates(loads)) if offload else None,
            pd_prefill_throughput=sum(n * loads.local_ratio / seconds for n, seconds in local) if local else None,
            pd_decode_throughput=sum(
                n / seconds for n, seconds in zip(decode, self._loads.decode_seconds(), strict=True)
            ),
            system_throughput=sustained,
            egress_bytes_per_second=sustained * sent_bytes if deployment.prfaas else None,
            local_bytes_per_second=sustained * (float(demand.kv_bytes.sum()) - sent_bytes),
            limit=_limit(solution),
            remote_shares=_parts(np.bincount(sources, flows[len(self._pd) :], len(deployment.prfaas)).astype(float)),
            local_shares=_parts(flows[: len(self._pd)]),
        )


def _parts(flows: FloatArray) -> tuple[float, ...]:
    """Return each flow's part of all."""
    return tuple((flows / (flows.sum() or 1.0)).tolist())


def _limit(solution: Solution) -> Limit:
    if (solution.remote > _BUSY).any():
        return "prfaas"
    if (solution.egress > 0).any() or (solution.paths > 0).any():
        return "link"
    return "pd-prefill" if (solution.local > _BUSY).any() else "pd-decode"
