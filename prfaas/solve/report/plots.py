"""A matplotlib figure as a file: of the same figure the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from prfaas.errors import ConfigError
from prfaas.solve.report.surfaces import (
    Frontier,
    SplitSearch,
    Surface,
    ThresholdSearch,
    frontier,
    split_search,
    surface,
    threshold_search,
)
from prfaas.solve.study import Study

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
