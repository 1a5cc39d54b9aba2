"""The numbers behind the plots: throughput over threshold, split and number of instances."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from prfaas.model.capacity.loads import LoadModel
from prfaas.model.cost.curve import FloatArray
from prfaas.model.planning.deployment import Deployment
from prfaas.model.planning.planner import best_plan, homogeneous
from prfaas.model.planning.single_pd import SinglePd
from prfaas.solve.study import Study

_NUM_THRESHOLDS = 240
_NUM_SPLITS = 64  # of more instances, so many evenly spaced splits are drawn
_NUM_SIZES = 9


@dataclass(frozen=True)
class SplitSearch:
    """Figure 5a: the plan's threshold, every split. Arrays [split], requests per second."""

    threshold_tokens: int
    num_prefill: FloatArray
    prefilled: FloatArray
    decoded: FloatArray
    sustained: FloatArray


@dataclass(frozen=True)
class ThresholdSearch:
    """Figure 5b: the plan's split, many thresholds. Arrays [threshold], requests per second; a stage without limit is NaN."""

    split: str
    thresholds: FloatArray
    remote: FloatArray
    local: FloatArray
    decoded: float
    sustained: FloatArray
    best_tokens: int
    best: float


@dataclass(frozen=True)
class Surface:
    """Λ_max [split, threshold]."""

    num_prefill: FloatArray
    thresholds: FloatArray
    sustained: FloatArray
    best_tokens: int
    best_split: float


@dataclass(frozen=True)
class Frontier:
    """Λ_max and price of deployments with other numbers of instances, the best of them, and homogeneous ones."""

    prices: list[float]
    sustained: list[float]
    best_prices: list[float]
    best_sustained: list[float]
    homogeneous_prices: list[float]
    homogeneous_sustained: list[float]
    price: float
    planned: float
    inferred: bool


def _solver(study: Study) -> tuple[SinglePd, LoadModel]:
    loads = LoadModel(study.main.deployment, study.workload, study.method)
    return SinglePd(loads), loads


def _splits(study: Study) -> FloatArray:
    (pd,) = study.main.deployment.pd
    return np.unique(np.linspace(0, pd.num_instances, min(pd.num_instances + 1, _NUM_SPLITS)).round())


def _thresholds(study: Study, loads: LoadModel) -> FloatArray:
    top = min(3 * (study.main.plan.threshold_tokens or loads.nothing_offloaded), loads.nothing_offloaded)
    return np.linspace(max(loads.everything_offloaded, 1), top, _NUM_THRESHOLDS).round()


def split_search(study: Study) -> SplitSearch:
    """Return every split at the plan's threshold."""
    solver, loads = _solver(study)
    plan, splits = study.main.plan, _splits(study)
    threshold = plan.threshold_tokens or 0
    at = loads.at(threshold)
    prefilled = np.array([min(solver.long(at), solver.short(at, n)) for n in splits])
    decoded = np.array([solver.decode(n) for n in splits])
    return SplitSearch(threshold, splits, prefilled, decoded, np.minimum(prefilled, decoded))


def threshold_search(study: Study) -> ThresholdSearch:
    """Many thresholds at the plan's split."""
    solver, loads = _solver(study)
    plan, thresholds = study.main.plan, _thresholds(study, loads)
    at = [loads.at(float(t)) for t in thresholds]
    remote = np.array([solver.long(load) for load in at])
    local = np.array([solver.short(load, plan.num_prefill) for load in at])
    decoded = solver.decode(plan.num_prefill)
    return ThresholdSearch(
        split=f"{plan.num_prefill:g}/{plan.num_decode:g}",
        thresholds=thresholds,
        remote=np.where(np.isinf(remote), np.nan, remote),
        local=np.where(np.isinf(local), np.nan, local),
        decoded=decoded,
        sustained=np.minimum(np.minimum(remote, local), decoded),
        best_tokens=plan.threshold_tokens or 0,
        best=plan.system_throughput,
    )


def surface(study: Study) -> Surface:
    """Λ_max over splits and thresholds."""
    solver, loads = _solver(study)
    splits, thresholds = _splits(study), _thresholds(study, loads)
    at = [loads.at(float(t)) for t in thresholds]
    sustained = np.array([[min(solver.long(a), solver.short(a, n), solver.decode(n)) for a in at] for n in splits])
    plan = study.main.plan
    return Surface(splits, thresholds, sustained, plan.threshold_tokens or 0, plan.num_prefill)


def frontier(study: Study) -> Frontier:
    """Other numbers of PrfaaS and PD instances, up to twice as many, each planned anew."""
    deployment = study.main.deployment
    candidates = [_sized(deployment, remote, local) for remote in _sizes(0) for local in _sizes(1)]
    points = sorted(_priced(candidate, study) for candidate in candidates if candidate is not None)
    best: list[tuple[float, float]] = []
    for price, sustained in points:
        if not best or sustained > best[-1][1]:
            best.append((price, sustained))
    plain = [homogeneous(replace(deployment, prfaas=(), links=()), num_added=n) for n in _added(deployment)]
    same = sorted(_priced(candidate, study) for candidate in plain)
    return Frontier(
        *_columns(points),
        *_columns(best),
        *_columns(same),
        price=deployment.price_per_hour or 0.0,
        planned=study.main.plan.system_throughput,
        inferred="prices" in study.inferred,
    )


def _sizes(least: int) -> FloatArray:
    return np.linspace(0.25 if least else 0.0, 2.0, _NUM_SIZES)


def _added(deployment: Deployment) -> list[int]:
    (pd,) = deployment.pd
    return [round(share * pd.num_instances) for share in np.linspace(-0.75, 2.0, 12)]


def _sized(deployment: Deployment, remote: float, local: float) -> Deployment | None:
    """Return the deployment with other numbers of instances; None where a cluster of it would be empty but not all are."""
    counts = [round(cluster.num_instances * remote) for cluster in deployment.prfaas]
    prfaas = tuple(
        replace(cluster, num_instances=count) for cluster, count in zip(deployment.prfaas, counts, strict=True) if count
    )
    (pd,) = deployment.pd
    size = round(pd.num_instances * local)
    if size < 1 or (not prfaas and size < 2):
        return None
    grown = replace(pd, num_instances=size, num_prefill=None, shared_instances=min(pd.shared_instances, size))
    return replace(deployment, prfaas=prfaas, pd=(grown,))


def _priced(deployment: Deployment, study: Study) -> tuple[float, float]:
    plan = best_plan(deployment, study.workload, method=study.method)
    return deployment.price_per_hour or 0.0, plan.system_throughput


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [price for price, _ in points], [sustained for _, sustained in points]
