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
from prfaas.model.capacity.roles import RoleCurve
from prfaas.model.cost.curve import FloatArray
from prfaas.model.deployment import PdCluster

Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]

BYTES_PER_GBIT = 125e6
# Whole splits are proved best to this ratio.
_MIP_GAP = 1e-5
# Ratio of the throughput that sending a bin may cost. Without it the program may send KV for nothing.
_IDLE_COST = 1e-6


@dataclass(frozen=True)
class Demand:
    """Weight, seconds and bytes that an arriving request brings to each length bin.

    Shapes: weight, kv_bytes [bin]; remote_seconds [bin, PrfaaS cluster]; local_seconds [bin, PD cluster]. A bin must not
    take the routes outside `local` [bin, PD cluster] and `remote` [bin, route].
    """

    weight: FloatArray
    remote_seconds: FloatArray
    local_seconds: FloatArray
    kv_bytes: FloatArray
    local: Mask
    remote: Mask


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
    `egress` and `paths` price bytes per second. `decode_costs` [PD] prices the decode time of one request. `shares` are
    the parts of each bin that take each route: [bin, PD clusters, then routes].
    """

    system_throughput: float
    num_prefill: tuple[float, ...]
    routes: tuple[RemoteRoute, ...]
    remote: FloatArray
    egress: FloatArray
    paths: FloatArray
    local: FloatArray
    decode: FloatArray
    roles: FloatArray
    decode_costs: FloatArray
    shares: FloatArray

    def capacity_value(self, loads: LoadModel, box: Box) -> float:
        """Return the worth of all stations together at these prices, with the best N_p of the box."""
        deployment = loads.deployment
        instances = sum(float(price) * c.num_instances for price, c in zip(self.remote, deployment.prfaas, strict=True))
        egress = _worth(self.egress, [c.egress_bytes_per_second for c in deployment.prfaas])
        paths = _worth(self.paths, [path.bytes_per_second for path in deployment.paths])
        roles = 0.0
        for d, (curve, bounds) in enumerate(zip(loads.roles, box, strict=True)):
            roles += _roles_value(curve, float(self.local[d]), decode=float(self.decode[d]), bounds=bounds)
        return float(instances + egress + paths + roles)


def _worth(prices: FloatArray, capacities: list[float]) -> float:
    return sum(float(price) * capacity for price, capacity in zip(prices, capacities, strict=True) if price > 0)


def _roles_value(curve: RoleCurve, prefill: float, *, decode: float, bounds: tuple[float, float]) -> float:
    """Return the greatest worth of a cluster's roles: at a bound, or at a corner between them."""
    low, high = bounds
    counts = [low, high, *(count for count, _ in curve.corners if low < count < high)]
    return max(prefill * count + decode * curve.num_decode(count) for count in counts)


def find_routes(loads: LoadModel) -> tuple[RemoteRoute, ...]:
    """Return each pair of clusters that KV can travel between."""
    deployment = loads.deployment
    if not deployment.paths:
        pairs = [(j, d) for j in range(len(deployment.prfaas)) for d in range(len(deployment.pd))]
        return tuple(RemoteRoute(j, d, None) for j, d in pairs)
    sources = {cluster.name: index for index, cluster in enumerate(deployment.prfaas)}
    targets = {cluster.name: index for index, cluster in enumerate(deployment.pd)}
    return tuple(RemoteRoute(sources[path.source], targets[path.target], i) for i, path in enumerate(deployment.paths))


def routes_within(loads: LoadModel, clusters: frozenset[str]) -> tuple[Mask, Mask]:
    """Return which PD clusters, and which routes, stay within some clusters."""
    prfaas, pd = loads.deployment.prfaas, loads.deployment.pd
    local = np.array([cluster.name in clusters for cluster in pd], dtype=bool)
    routes = find_routes(loads)
    remote = [local[route.target] and prfaas[route.source].name in clusters for route in routes]
    return local, np.array(remote, dtype=bool)


def by_tenant(demand: Demand, loads: LoadModel) -> Demand:
    """Return the demand with its bins for each share of the traffic that may use the same clusters.

    A share without any route to it has its long requests prefilled locally, as routers do.
    """
    parts = []
    for ratio, clusters in loads.deployment.traffic:
        local, remote = routes_within(loads, clusters)
        parts.append(
            Demand(
                demand.weight * ratio,
                demand.remote_seconds * ratio,
                demand.local_seconds * ratio,
                demand.kv_bytes * ratio,
                (demand.local | (not remote.any())) & local,
                demand.remote & remote,
            )
        )
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return Demand(*map(np.concatenate, columns))


# Least and greatest N_p of each PD cluster.
Box = Sequence[tuple[float, float]]


def whole_box(loads: LoadModel) -> Box:
    """Return the N_p that each PD cluster may have."""
    return [
        (0.0, curve.most_prefill) if pd.num_prefill is None else (min(float(pd.num_prefill), curve.most_prefill),) * 2
        for pd, curve in zip(loads.deployment.pd, loads.roles, strict=True)
    ]


def is_whole(cluster: PdCluster) -> bool:
    """Return whether N_p must be a whole number: an instance that is not shared has one role."""
    return not cluster.shared_instances


def solve(
    demand: Demand, loads: LoadModel, *, box: Box | None = None, num_decode: Sequence[float] | None = None
) -> Solution:
    """Return the optimum with fractional roles; `box` bounds N_p of each PD cluster.

    With `num_decode`, each cluster's N_d for one request per second, decode is scaled with the rate and limits nothing
    but its division.
    """
    return _Program(demand, loads, num_decode).solve(box or whole_box(loads))


def best_whole(demand: Demand, loads: LoadModel) -> tuple[float, tuple[float, ...]]:
    """Return the greatest rate with whole N_p, and these N_p, by branch and bound."""
    return _Program(demand, loads).best_whole(whole_box(loads))


class _Program:
    """Columns and rows of the program, as HiGHS takes them.

    The columns are local[bin, pd], remote[bin, route], num_prefill[pd], num_decode[pd] and rate. A local or remote
    column is the arrival rate for which that part of the bin takes the route. Each row is low ≤ Σ value · column ≤ high.
    """

    def __init__(self, demand: Demand, loads: LoadModel, scaled: Sequence[float] | None = None) -> None:
        self._demand, self._loads, self._scaled = demand, loads, scaled
        self._routes = find_routes(loads)
        num_bins, num_pd, num_routes = len(demand.weight), len(loads.deployment.pd), len(self._routes)
        self._local = np.arange(num_bins * num_pd).reshape(num_bins, num_pd)
        self._remote = self._local.size + np.arange(num_bins * num_routes).reshape(num_bins, num_routes)
        self._num_prefill = self._local.size + self._remote.size + np.arange(num_pd)
        self._num_decode = self._num_prefill + num_pd
        self._rate = int(self._num_decode[-1]) + 1
        self._starts: list[int] = [0]
        self._columns: list[Indices] = []
        self._values: list[FloatArray] = []
        self._low: list[float] = []
        self._high: list[float] = []
        # Rows that price each station, by its field in `Solution`; none where it is no limit.
        self._priced: dict[str, list[list[int]]] = {
            name: [] for name in ("remote", "egress", "paths", "local", "decode", "roles")
        }

    def solve(self, box: Box) -> Solution:
        """Maximise the rate and read the solution."""
        self._add_rows()
        return self._read(*self._maximise(self._bounds(box)))

    def best_whole(self, box: Box) -> tuple[float, tuple[float, ...]]:
        """Maximise the rate with whole N_p; return the rate and N_p."""
        self._add_rows()
        pairs = zip(self._num_prefill, self._loads.deployment.pd, strict=True)
        whole = [int(column) for column, pd in pairs if is_whole(pd)]
        values, _ = self._maximise(self._bounds(box), whole)
        counts = values[self._num_prefill]
        counts = np.where(np.isin(self._num_prefill, whole), counts.round(), counts)
        return float(values[self._rate]), tuple(counts.tolist())

    def _add_rows(self) -> None:
        self._limit_remote()
        for index, pd in enumerate(self._loads.deployment.pd):
            self._limit_pd(index, pd)
        for local, remote in zip(self._local, self._remote, strict=True):
            self._add(0.0, 0.0, (local, 1.0), (remote, 1.0), ([self._rate], -1.0))

    def _add(self, low: float, high: float, *terms: tuple[Any, Any]) -> int:
        """Append a row and return its number."""
        for columns, values in terms:
            flat = np.ravel(columns)
            self._columns.append(flat)
            self._values.append(np.broadcast_to(np.ravel(values), flat.shape))
        self._starts.append(self._starts[-1] + sum(np.size(columns) for columns, _ in terms))
        self._low.append(low)
        self._high.append(high)
        return len(self._high) - 1

    def _limit(self, station: str, capacity: float, *terms: tuple[Any, Any]) -> None:
        """Append Σ value · column ≤ capacity, or nothing if the capacity is infinite."""
        self._priced[station].append([] if math.isinf(capacity) else [self._add(-highspy.kHighsInf, capacity, *terms)])

    def _limit_bytes(self, station: str, bytes_per_second: float, routes: list[int]) -> None:
        """Limit the bytes of some routes, counted in Gbit so that the program's numbers are of one order."""
        gbits = np.repeat(self._demand.kv_bytes[:, None] / BYTES_PER_GBIT, len(routes), axis=1)
        self._limit(station, bytes_per_second / BYTES_PER_GBIT, (self._remote[:, routes], gbits))

    def _limit_remote(self) -> None:
        deployment = self._loads.deployment
        for j, cluster in enumerate(deployment.prfaas):
            routes = [r for r, route in enumerate(self._routes) if route.source == j]
            seconds = np.repeat(self._demand.remote_seconds[:, [j]], len(routes), axis=1)
            self._limit("remote", cluster.num_instances, (self._remote[:, routes], seconds))
            self._limit_bytes("egress", cluster.egress_bytes_per_second, routes)
        for index, path in enumerate(deployment.paths):
            routes = [r for r, route in enumerate(self._routes) if route.path == index]
            self._limit_bytes("paths", path.bytes_per_second, routes)

    def _limit_pd(self, index: int, cluster: PdCluster) -> None:
        demand, prefill, decode = self._demand, self._num_prefill[index], self._num_decode[index]
        local = self._local[:, index]
        remote = self._remote[:, [r for r, route in enumerate(self._routes) if route.target == index]]
        self._limit("local", 0.0, (local, demand.local_seconds[:, index]), ([prefill], -1.0))
        seconds = self._loads.decode_seconds()[index]
        weights = np.repeat(demand.weight[:, None], remote.shape[1], axis=1)
        limit = ([decode], -1.0) if self._scaled is None else ([self._rate], -self._scaled[index])
        self._limit("decode", 0.0, (local, seconds * demand.weight), (remote, seconds * weights), limit)
        sides = self._loads.roles[index].limits()
        rows = [self._add(-highspy.kHighsInf, most, ([prefill, decode], values)) for *values, most in sides]
        self._priced["roles"].append(rows)

    def _bounds(self, box: Box) -> FloatArray:
        """Return the least and the greatest value of each column, [column, 2]."""
        bounds = np.zeros((self._rate + 1, 2))
        bounds[:, 1] = np.inf
        for allowed, columns in ((self._demand.local, self._local), (self._demand.remote, self._remote)):
            bounds[columns[~allowed], 1] = 0.0
        for index, cluster in enumerate(self._loads.deployment.pd):
            bounds[self._num_prefill[index]] = box[index]
            bounds[self._num_decode[index], 1] = cluster.num_instances
        return bounds

    def _maximise(self, bounds: FloatArray, whole: Sequence[int] = ()) -> tuple[FloatArray, FloatArray]:
        """Maximise the rate. Return values [column], and prices [row]: the gain by one more on a row's right side.

        The columns `whole` take whole numbers; the prices then mean nothing.
        """
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(bounds), len(self._high)
        program.col_cost_ = np.where(np.arange(len(bounds)) == self._rate, -1.0, 0.0)
        program.col_cost_[self._remote.ravel()] = _IDLE_COST
        program.col_lower_, program.col_upper_ = np.ascontiguousarray(bounds.T)
        program.row_lower_, program.row_upper_ = np.array(self._low), np.array(self._high)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.array(self._starts)
        program.a_matrix_.index_ = np.concatenate(self._columns)
        program.a_matrix_.value_ = np.concatenate(self._values)
        if whole:
            kinds = [highspy.HighsVarType.kContinuous] * len(bounds)
            for column in whole:
                kinds[column] = highspy.HighsVarType.kInteger
            program.integrality_ = kinds
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        solver.silent()
        solver.setOptionValue("mip_rel_gap", _MIP_GAP)
        solver.passModel(program)
        solver.run()
        status = solver.getModelStatus()
        # An optimum exists: zero traffic is feasible, and the stations are finite.
        assert status == highspy.HighsModelStatus.kOptimal, status
        solution = solver.getSolution()
        duals = np.array(solution.row_dual) if not whole else np.zeros(len(self._high))
        return np.array(solution.col_value), np.maximum(-duals, 0.0)

    def _read(self, values: FloatArray, prices: FloatArray) -> Solution:
        def of(station: str, unit: float = 1.0) -> FloatArray:
            return np.array([sum(prices[rows]) / unit for rows in self._priced[station]])

        return Solution(
            system_throughput=float(values[self._rate]),
            num_prefill=tuple(float(n) for n in values[self._num_prefill]),
            routes=self._routes,
            remote=of("remote"),
            egress=of("egress", BYTES_PER_GBIT),
            paths=of("paths", BYTES_PER_GBIT),
            local=of("local"),
            decode=of("decode"),
            roles=of("roles"),
            decode_costs=of("decode") * np.array(self._loads.decode_seconds()),
            shares=np.hstack([values[self._local], values[self._remote]]) / max(values[self._rate], 1e-12),
        )
