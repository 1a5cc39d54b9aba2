"""The numbers behind the plots: throughput over threshold, split and number of instances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from prfaas.errors import ConfigError
from prfaas.model.capacity.loads import LoadModel
from prfaas.model.cost.curve import FloatArray
from prfaas.model.deployment import Deployment
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
    plain = [homogeneous(replace(deployment, prfaas=(), paths=()), num_added=n) for n in _added(deployment)]
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


_DPI = 120  # of a PNG


def save(figure: Figure, path: Path) -> Path:
    """Write it as its suffix says, SVG or PNG, without the day and without names drawn by chance; returns the path."""
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, dpi=_DPI, metadata=metadata)
    return path


# A palette that stays apart in greyscale and for colour-blind readers (Okabe and Ito).
_REMOTE, _LOCAL, _DECODE, _SYSTEM = "#0072B2", "#E69F00", "#009E73", "#000000"
_SIZE = (6.4, 4.0)


def write_all(study: Study, folder: Path) -> list[Path]:
    """Write every plot into `folder` as SVG and PNG; returns the files.

    Raises:
        ConfigError: the deployment has several PD clusters, or no PrfaaS cluster: these plots have one split and one t.
    """
    deployment = study.main.deployment
    if len(deployment.pd) != 1 or not deployment.prfaas:
        raise ConfigError("--plot: the plots show one PD cluster and at least one PrfaaS cluster")
    drawings: dict[str, Callable[[Axes, Figure], None]] = {
        "split": lambda axes, _: _draw_split(axes, split_search(study)),
        "threshold": lambda axes, _: _draw_threshold(axes, threshold_search(study)),
        "surface": lambda axes, figure: _draw_surface(axes, figure, surface(study)),
    }
    if deployment.price_per_hour is not None:
        drawings["cost"] = lambda axes, _: _draw_frontier(axes, frontier(study))
    return [file for name, draw in drawings.items() for file in _write(folder / name, draw)]


def _write(path: Path, draw: Callable[[Axes, Figure], None]) -> list[Path]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes, figure)
    return [save(figure, path.with_suffix(suffix)) for suffix in (".svg", ".png")]


def _finish(axes: Axes, *, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_split(axes: Axes, search: SplitSearch) -> None:
    axes.plot(
        search.num_prefill, search.prefilled, color=_LOCAL, marker="s", label="prefill: min(Θ_prfaas/p, Θ_pd-p/(1−p))"
    )
    axes.plot(search.num_prefill, search.decoded, color=_DECODE, marker="^", label="decode: Θ_pd-d")
    axes.plot(search.num_prefill, search.sustained, color=_SYSTEM, marker="o", linewidth=2, label="system: Λ_max")
    best = int(np.argmax(search.sustained))
    found = f"{search.sustained[best]:.2f} req/s at N_p = {search.num_prefill[best]:g}"
    axes.set_ylim(bottom=0)
    axes.set_xticks(search.num_prefill[:: max(1, len(search.num_prefill) // 12)])
    _finish(axes, title=f"Split at t = {search.threshold_tokens}: {found}", x="N_p", y="requests per second")
    axes.legend(fontsize=8)


def _draw_threshold(axes: Axes, search: ThresholdSearch) -> None:
    thousands = search.thresholds / 1000
    axes.plot(thousands, search.remote, color=_REMOTE, label="Θ_prfaas / p")
    axes.plot(thousands, search.local, color=_LOCAL, label="Θ_pd-p / (1 − p)")
    axes.axhline(search.decoded, color=_DECODE, linestyle="--", label="Θ_pd-d")
    axes.plot(thousands, search.sustained, color=_SYSTEM, linewidth=2, label="Λ_max")
    axes.plot([search.best_tokens / 1000], [search.best], "o", color=_SYSTEM)
    found = f"{search.best:.2f} req/s at t = {search.best_tokens}"
    axes.set_ylim(0, 2.2 * search.best)
    _finish(
        axes, title=f"Threshold at N_p/N_d = {search.split}: {found}", x="t, thousand tokens", y="requests per second"
    )
    axes.legend(fontsize=8, loc="upper right")


def _draw_surface(axes: Axes, figure: Figure, drawn: Surface) -> None:
    edges = np.append(drawn.num_prefill, drawn.num_prefill[-1] + 1) - 0.5
    mesh = axes.pcolormesh(drawn.thresholds / 1000, edges, drawn.sustained[:, :-1], cmap="viridis", rasterized=True)
    axes.plot([drawn.best_tokens / 1000], [drawn.best_split], "o", color="white", markeredgecolor="black")
    figure.colorbar(mesh, ax=axes, label="Λ_max, requests per second")
    _finish(axes, title="Λ_max over threshold and split", x="t, thousand tokens", y="N_p")
    axes.grid(visible=False)


def _draw_frontier(axes: Axes, drawn: Frontier) -> None:
    axes.plot(drawn.prices, drawn.sustained, ".", color="#BBBBBB", label="every number of instances, planned anew")
    axes.plot(
        drawn.best_prices, drawn.best_sustained, color=_REMOTE, drawstyle="steps-post", label="best for the money"
    )
    axes.plot(
        drawn.homogeneous_prices,
        drawn.homogeneous_sustained,
        color=_LOCAL,
        marker="s",
        markersize=3,
        label="homogeneous PD",
    )
    axes.plot([drawn.price], [drawn.planned], "o", color=_SYSTEM, label="this deployment")
    axes.set_ylim(bottom=0)
    unit = "price per hour (inferred prices)" if drawn.inferred else "price per hour"
    _finish(axes, title="Throughput for the money", x=unit, y="Λ_max, requests per second")
    axes.legend(fontsize=8, loc="lower right")
