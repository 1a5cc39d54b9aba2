"""Linear program that routes the requests of each length bin so that the arrival rate is greatest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from prfaas.model.capacity.loads import LoadModel
from prfaas.model.cost.curve import FloatArray
from prfaas.model.deployment import PdCluster

Indices = NDArray[np.int64]

BYTES_PER_GBIT = 125e6


@dataclass(frozen=True)
class Demand:
    """Weight, seconds and bytes that an arriving request brings to each length bin.

    Shapes: weight, kv_bytes [bin]; remote_seconds [bin, PrfaaS cluster]; local_seconds [bin, PD cluster]. A bin outside
    `local` or `remote` must not take that route; None allows all.
    """

    weight: FloatArray
    remote_seconds: FloatArray
    local_seconds: FloatArray
    kv_bytes: FloatArray
    local: Sequence[bool] | None = None
    remote: Sequence[bool] | None = None


@dataclass(frozen=True)
class RemoteRoute:
    """Route from one PrfaaS cluster to one PD cluster, by index, over one listed path or none."""

    source: int
    target: int
    path: int | None


@dataclass(frozen=True)
class Solution:
    """Optimum of the program: rates, and the price of each station in requests per second per unit.

    `remote` and `local` price busy instances, `decode` decode instances, `roles` an instance whose role is free.
    `egress`, `paths` and `intra` price bytes per second. `remote_flows` [PrfaaS] and `local_flows` [PD] are requests
    per second. `decode_costs` [PD] prices the decode time of one prefilled request.
    """

    system_throughput: float
    num_prefill: tuple[float, ...]
    remote_flows: FloatArray
    local_flows: FloatArray
    routes: tuple[RemoteRoute, ...]
    remote: FloatArray
    egress: FloatArray
    paths: FloatArray
    local: FloatArray
    intra: FloatArray
    decode: FloatArray
    roles: FloatArray
    decode_costs: FloatArray

    def worth(self) -> list[float]:
        """Return the value of one more instance of each cluster, then of one more Gbit/s of each egress and path."""
        return [*self.remote, *self.roles, *(self.egress * BYTES_PER_GBIT), *(self.paths * BYTES_PER_GBIT)]

    def capacity_value(self, loads: LoadModel, splits: Sequence[float | None] | None) -> float:
        """Return the worth of all stations together at these prices."""
        deployment = loads.deployment
        instances = sum(float(price) * c.num_instances for price, c in zip(self.remote, deployment.prfaas, strict=True))
        egress = _worth(self.egress, [c.egress_bytes_per_second for c in deployment.prfaas])
        paths = _worth(self.paths, [path.bytes_per_second for path in deployment.paths])
        fixed = splits if splits is not None else [None] * len(deployment.pd)
        roles = 0.0
        for d, (cluster, split) in enumerate(zip(deployment.pd, fixed, strict=True)):
            prefill = float(self.local[d] + self.intra[d] * (cluster.intra_bytes_per_second or 0.0))
            roles += _roles_value(cluster, prefill, decode=float(self.decode[d]), split=split)
        return float(instances + egress + paths + roles)


def _worth(prices: FloatArray, capacities: list[float]) -> float:
    return sum(float(price) * capacity for price, capacity in zip(prices, capacities, strict=True) if price > 0)


def _roles_value(cluster: PdCluster, prefill: float, *, decode: float, split: float | None) -> float:
    if split is not None:
        return prefill * split + decode * cluster.num_decode(split)
    full, rest = cluster.num_instances, cluster.roles - cluster.num_instances
    return max(prefill * full + decode * rest, prefill * rest + decode * full)


def find_routes(loads: LoadModel) -> tuple[RemoteRoute, ...]:
    """Return each pair of clusters that KV can travel between."""
    deployment = loads.deployment
    if not deployment.paths:
        pairs = [(j, d) for j in range(len(deployment.prfaas)) for d in range(len(deployment.pd))]
        return tuple(RemoteRoute(j, d, None) for j, d in pairs)
    sources = {cluster.name: index for index, cluster in enumerate(deployment.prfaas)}
    targets = {cluster.name: index for index, cluster in enumerate(deployment.pd)}
    return tuple(RemoteRoute(sources[path.source], targets[path.target], i) for i, path in enumerate(deployment.paths))


class _Columns:
    """Column of each variable: local[bin, pd], remote[bin, route], num_prefill[pd], num_decode[pd], rate.

    A local or remote variable is the arrival rate for which that part of the bin takes the route.
    """

    def __init__(self, num_bins: int, num_pd: int, num_routes: int) -> None:
        self.local = np.arange(num_bins * num_pd).reshape(num_bins, num_pd)
        self.remote = self.local.size + np.arange(num_bins * num_routes).reshape(num_bins, num_routes)
        self.num_prefill = self.local.size + self.remote.size + np.arange(num_pd)
        self.num_decode = self.num_prefill + num_pd
        self.rate = int(self.num_decode[-1]) + 1


class _Rows:
    """Constraints low ≤ Σ value · column ≤ high, row by row as HiGHS takes them."""

    def __init__(self) -> None:
        self.starts: list[int] = [0]
        self.columns: list[Indices] = []
        self.values: list[FloatArray] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, low: float, high: float, *terms: tuple[Any, Any]) -> int:
        """Append a row and return its number."""
        for columns, values in terms:
            flat = np.ravel(columns)
            self.columns.append(flat)
            self.values.append(np.broadcast_to(np.ravel(values), flat.shape))
        self.starts.append(self.starts[-1] + sum(np.size(columns) for columns, _ in terms))
        self.low.append(low)
        self.high.append(high)
        return len(self.high) - 1

    def at_most(self, high: float, *terms: tuple[Any, Any]) -> int:
        """Append Σ value · column ≤ high."""
        return self.add(-highspy.kHighsInf, high, *terms)


def solve(demand: Demand, loads: LoadModel, *, splits: Sequence[float] | None = None) -> Solution:
    """Return the optimum; `splits` fixes N_p of each PD cluster."""
    routes = find_routes(loads)
    columns = _Columns(len(demand.weight), len(loads.deployment.pd), len(routes))
    rows, limits = _limits(demand, loads, routes, columns)
    for local, remote in zip(columns.local, columns.remote, strict=True):
        rows.add(0.0, 0.0, (local, 1.0), (remote, 1.0), ([columns.rate], -1.0))
    outcome = _minimise(rows, _bounds(demand, loads, columns, splits), objective=columns.rate)
    return _read(outcome, limits, demand=demand, loads=loads, routes=routes, columns=columns)


@dataclass(frozen=True)
class _Outcome:
    """Values [column], and prices [row]: what one more on a row's right side adds to the rate."""

    values: FloatArray
    prices: FloatArray


def _minimise(rows: _Rows, bounds: FloatArray, *, objective: int) -> _Outcome:
    """Maximise the column `objective` within `bounds` [column, 2]."""
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(bounds), len(rows.high)
    program.col_cost_ = np.where(np.arange(len(bounds)) == objective, -1.0, 0.0)
    program.col_lower_, program.col_upper_ = np.ascontiguousarray(bounds.T)
    program.row_lower_, program.row_upper_ = np.array(rows.low), np.array(rows.high)
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.array(rows.starts)
    program.a_matrix_.index_ = np.concatenate(rows.columns)
    program.a_matrix_.value_ = np.concatenate(rows.values)
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.silent()
    solver.passModel(program)
    solver.run()
    status = solver.getModelStatus()
    # An optimum exists: zero traffic is feasible, and the stations are finite.
    assert status == highspy.HighsModelStatus.kOptimal, status
    solution = solver.getSolution()
    return _Outcome(np.array(solution.col_value), np.maximum(-np.array(solution.row_dual), 0.0))


@dataclass(frozen=True)
class _LimitRows:
    """Rows that price each station; None where it is no limit."""

    remote: list[int]
    egress: list[int | None]
    paths: list[int | None]
    local: list[int]
    intra: list[int | None]
    decode: list[int]
    roles: list[int]


def _limits(
    demand: Demand, loads: LoadModel, routes: Sequence[RemoteRoute], columns: _Columns
) -> tuple[_Rows, _LimitRows]:
    rows, deployment = _Rows(), loads.deployment
    limits = _LimitRows([], [], [], [], [], [], [])
    for j, cluster in enumerate(deployment.prfaas):
        mine = [r for r, route in enumerate(routes) if route.source == j]
        seconds = np.repeat(demand.remote_seconds[:, [j]], len(mine), axis=1)
        limits.remote.append(rows.at_most(cluster.num_instances, (columns.remote[:, mine], seconds)))
        limits.egress.append(
            _add_bytes(rows, cluster.egress_bytes_per_second, columns.remote[:, mine], demand.kv_bytes)
        )
    for index, path in enumerate(deployment.paths):
        mine = [r for r, route in enumerate(routes) if route.path == index]
        limits.paths.append(_add_bytes(rows, path.bytes_per_second, columns.remote[:, mine], demand.kv_bytes))
    for d, pd in enumerate(deployment.pd):
        _limit_pd(d, pd, rows, limits, demand=demand, loads=loads, routes=routes, columns=columns)
    return rows, limits


def _add_bytes(rows: _Rows, capacity: float, chosen: Any, kv_bytes: FloatArray) -> int | None:
    """Limit bytes per second, counted in Gbit so that the program's numbers are of one order."""
    if math.isinf(capacity):
        return None
    return rows.at_most(
        capacity / BYTES_PER_GBIT, (chosen, np.repeat(kv_bytes[:, None] / BYTES_PER_GBIT, chosen.shape[1], axis=1))
    )


def _limit_pd(
    d: int,
    cluster: PdCluster,
    rows: _Rows,
    limits: _LimitRows,
    *,
    demand: Demand,
    loads: LoadModel,
    routes: Sequence[RemoteRoute],
    columns: _Columns,
) -> None:
    prefill, decode = columns.num_prefill[d], columns.num_decode[d]
    local, remote = columns.local[:, d], columns.remote[:, [r for r, route in enumerate(routes) if route.target == d]]
    limits.local.append(rows.at_most(0.0, (local, demand.local_seconds[:, d]), ([prefill], -1.0)))
    intra = cluster.intra_bytes_per_second
    limits.intra.append(
        None
        if intra is None
        else rows.at_most(0.0, (local, demand.kv_bytes / BYTES_PER_GBIT), ([prefill], -intra / BYTES_PER_GBIT))
    )
    each = decode_seconds_per_prefilled(loads)[d]
    shares = np.repeat(demand.weight[:, None], remote.shape[1], axis=1)
    limits.decode.append(rows.at_most(0.0, (local, each * demand.weight), (remote, each * shares), ([decode], -1.0)))
    limits.roles.append(rows.at_most(cluster.roles, ([prefill, decode], 1.0)))


def decode_seconds_per_prefilled(loads: LoadModel) -> list[float]:
    """Return decode instance-seconds per request that goes through prefill, with the share of appended turns."""
    prefilled = 1.0 - loads.workload.appended_ratio
    return [seconds / prefilled for seconds in loads.decode_seconds()]


def _bounds(demand: Demand, loads: LoadModel, columns: _Columns, splits: Sequence[float] | None) -> FloatArray:
    bounds = np.zeros((columns.rate + 1, 2))
    bounds[:, 1] = np.inf
    if demand.local is not None:
        bounds[np.ravel(columns.local[~np.asarray(demand.local)]), 1] = 0.0
    if demand.remote is not None:
        bounds[np.ravel(columns.remote[~np.asarray(demand.remote)]), 1] = 0.0
    for d, cluster in enumerate(loads.deployment.pd):
        fixed = splits[d] if splits is not None else cluster.num_prefill
        bounds[columns.num_prefill[d]] = (0.0, cluster.num_instances) if fixed is None else (fixed, fixed)
        bounds[columns.num_decode[d], 1] = cluster.num_instances
    return bounds


def _read(
    outcome: _Outcome,
    limits: _LimitRows,
    *,
    demand: Demand,
    loads: LoadModel,
    routes: tuple[RemoteRoute, ...],
    columns: _Columns,
) -> Solution:
    def of(rows: Sequence[int | None], unit: float = 1.0) -> FloatArray:
        return np.array([0.0 if row is None else outcome.prices[row] / unit for row in rows])

    decode = of(limits.decode)
    flows = outcome.values[columns.remote] * demand.weight[:, None]
    sources = [np.flatnonzero([route.source == j for route in routes]) for j in range(len(limits.remote))]
    return Solution(
        system_throughput=float(outcome.values[columns.rate]),
        num_prefill=tuple(float(n) for n in outcome.values[columns.num_prefill]),
        remote_flows=np.array([float(flows[:, mine].sum()) for mine in sources]),
        local_flows=(outcome.values[columns.local] * demand.weight[:, None]).sum(axis=0),
        routes=routes,
        remote=of(limits.remote),
        egress=of(limits.egress, BYTES_PER_GBIT),
        paths=of(limits.paths, BYTES_PER_GBIT),
        local=of(limits.local),
        intra=of(limits.intra, BYTES_PER_GBIT),
        decode=decode,
        roles=of(limits.roles),
        decode_costs=decode * np.array(decode_seconds_per_prefilled(loads)),
    )
