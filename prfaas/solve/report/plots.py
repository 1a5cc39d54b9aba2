"""Plots of a plan: TTFT over load, throughput over splits and over thresholds."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from prfaas.model.capacity.loads import LoadModel
from prfaas.model.capacity.ttft import estimate_ttft
from prfaas.model.cost.curve import FloatArray
from prfaas.model.planning.planner import homogeneous
from prfaas.model.planning.single_pd import SinglePd
from prfaas.solve.study import Study

Corner = Literal["best", "upper right"]
# These colours of Okabe and Ito differ in greyscale and for colour-blind readers.
_REMOTE, _LOCAL, _DECODE, _SYSTEM = "#0072B2", "#E69F00", "#009E73", "#000000"
_SIZE = (6.4, 4.0)
_NUM_THRESHOLDS = 240
# Larger clusters are drawn at so many evenly spaced splits.
_NUM_SPLITS = 64
_NUM_LOADS = 24


def to_svg(figure: Figure, name: str) -> str:
    """Return a figure as SVG with text as text. The same figure gives the same bytes."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as SVG and return the path."""
    path.write_text(to_svg(figure, path.stem), encoding="utf-8")
    return path


def draw_all(study: Study) -> dict[str, Figure]:
    """Return the plots by name. Split and t are single numbers with one PD cluster and PrfaaS clusters only."""
    drawings: dict[str, Callable[[Axes, Study], None]] = {"load": _draw_loads}
    if len(study.main.deployment.pd) == 1 and study.main.deployment.prfaas:
        drawings |= {"split": _draw_splits, "threshold": _draw_thresholds}
    figures = {}
    for name, draw in drawings.items():
        figures[name] = figure = Figure(figsize=_SIZE, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.add_subplot(), study)
    return figures


def _finish(axes: Axes, *, title: str, x: str, y: str, legend: Corner = "best") -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, loc=legend)


def _solver(study: Study) -> tuple[SinglePd, LoadModel]:
    loads = LoadModel(study.main.deployment, study.workload)
    return SinglePd(loads), loads


def _draw_loads(axes: Axes, study: Study) -> None:
    """Draw the TTFT with queues over the arrivals, for the plan and for the PD clusters alone."""
    whole = study.main.deployment
    options = [(whole, study.main.plan, _SYSTEM, "plan")]
    if whole.prfaas:
        options.append((homogeneous(whole, num_added=0), study.alone, _LOCAL, "PD clusters alone"))
    shares = np.linspace(0.1, 0.95, _NUM_LOADS)
    for deployment, plan, colour, name in options:
        rates = shares * plan.system_throughput
        times = [estimate_ttft(plan, deployment, study.workload, arrivals_per_second=float(rate)) for rate in rates]
        axes.plot(rates, [time.mean_seconds for time in times], color=colour, label=f"{name}: mean")
        axes.plot(rates, [time.quantile_seconds for time in times], color=colour, linestyle="--", label=f"{name}: P90")
    axes.set_ylim(bottom=0)
    _finish(axes, title="Time to first token, up to 95 % load", x="requests per second", y="seconds")


def _draw_splits(axes: Axes, study: Study) -> None:
    """Draw each split at the plan's threshold (Figure 5a of the paper)."""
    solver, loads = _solver(study)
    threshold = study.main.plan.threshold_tokens or 0
    (pd,) = study.main.deployment.pd
    plan = study.main.plan
    spaced = np.linspace(0, pd.num_instances, min(pd.num_instances + 1, _NUM_SPLITS)).round()
    splits = np.unique([*spaced, plan.num_prefill])
    at = loads.at(threshold)
    prefilled = np.array([min(solver.long(at), solver.short(at, n)) for n in splits])
    decoded = np.array([solver.decode(n) for n in splits])
    sustained = np.minimum(prefilled, decoded)
    axes.plot(splits, prefilled, color=_LOCAL, marker="s", label="prefill: min(Θ_prfaas/p, Θ_pd-p/(1−p))")
    axes.plot(splits, decoded, color=_DECODE, marker="^", label="decode: Θ_pd-d")
    axes.plot(splits, sustained, color=_SYSTEM, linewidth=2, label="system: Λ_max")
    axes.plot([plan.num_prefill], [plan.system_throughput], "o", color=_SYSTEM, label="plan")
    axes.set_ylim(bottom=0)
    axes.set_xticks(splits[:: max(1, len(splits) // 12)])
    title = f"Split at t = {threshold}: {plan.system_throughput:.2f} req/s at N_p = {plan.num_prefill:g}"
    _finish(axes, title=title, x="N_p", y="requests per second")


def _draw_thresholds(axes: Axes, study: Study) -> None:
    """Draw many thresholds at the plan's split (Figure 5b of the paper)."""
    solver, loads = _solver(study)
    plan = study.main.plan
    best_tokens, best = plan.threshold_tokens or 0, plan.system_throughput
    top = min(3 * (best_tokens or loads.nothing_offloaded), loads.nothing_offloaded)
    thresholds = np.linspace(max(loads.everything_offloaded, 1), top, _NUM_THRESHOLDS).round()
    at = [loads.at(float(t)) for t in thresholds]
    remote = np.array([solver.long(load) for load in at])
    local = np.array([solver.short(load, plan.num_prefill) for load in at])
    decoded = solver.decode(plan.num_prefill)
    axes.plot(thresholds / 1000, _finite(remote), color=_REMOTE, label="Θ_prfaas / p")
    axes.plot(thresholds / 1000, _finite(local), color=_LOCAL, label="Θ_pd-p / (1 − p)")
    axes.axhline(decoded, color=_DECODE, linestyle="--", label="Θ_pd-d")
    sustained = np.minimum(np.minimum(remote, local), decoded)
    axes.plot(thresholds / 1000, sustained, color=_SYSTEM, linewidth=2, label="Λ_max")
    axes.plot([best_tokens / 1000], [best], "o", color=_SYSTEM, label="plan")
    axes.set_ylim(0, 2.2 * best)
    split = f"{plan.num_prefill:g}/{plan.num_decode:g}"
    title = f"Threshold at N_p/N_d = {split}: {best:.2f} req/s at t = {best_tokens}"
    _finish(axes, title=title, x="t, thousand tokens", y="requests per second", legend="upper right")


def _finite(rates: FloatArray) -> FloatArray:
    """Return `rates` with NaN, which is not drawn, where a stage is no limit."""
    return np.where(np.isinf(rates), np.nan, rates)
