"""Plots of runs: distributions of latency, load over time, latency over load, throughput against latency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from prfaas.sim.run import SimulationRun
from prfaas.sim.summary import Distribution
from prfaas.solve.report.plots import save

Named = tuple[str, SimulationRun]
# These colours of Okabe and Ito differ in greyscale and for colour-blind readers.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
_SIZE = (6.4, 4.0)
# Drawn over time: the requests in each stage, and loads by the first word of their name, with their unit.
_STAGES = ("waiting", "prefill", "transfer", "decode")
_OVER_TIME = {"busy": "busy share", "memory": "share of KV memory", "egress": "egress (bytes/s)"}
_LATENCIES: dict[str, Callable[[SimulationRun], Distribution]] = {
    "ttft": lambda run: run.summary.ttft,
    "itl": lambda run: run.summary.itl,
    "end_to_end": lambda run: run.summary.end_to_end,
}


def write_all(runs: Sequence[Named], folder: Path) -> list[Path]:
    """Write each plot into `folder` as SVG and return the files. The frontier and the load need several runs."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [_write(folder / f"{name}-cdf.svg", _cdf(runs, name)) for name in _LATENCIES]
    for name, run in runs:
        drawn = {
            "over-time": _over_time(run, [stage for stage in run.summary.over_time if stage in _STAGES], "requests")
        }
        for kind, label in _OVER_TIME.items():
            loads = [load for load in run.summary.over_time if load.split()[0] == kind]
            drawn |= {f"{kind}-over-time": _over_time(run, loads, label)} if loads else {}
        files += [_write(folder / f"{_file_name(name)}-{what}.svg", draw) for what, draw in drawn.items()]
    if len(runs) > 1:
        files.append(_write(folder / "frontier.svg", lambda axes: _draw_frontier(axes, runs)))
    if len({run.rate for _, run in runs}) > 1:
        files.append(_write(folder / "load.svg", lambda axes: _draw_load(axes, runs)))
    return files


def _write(path: Path, draw: Callable[[Axes], None]) -> Path:
    figure = Figure(figsize=_SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    axes.grid(alpha=0.3)
    return save(figure, path)


def _cdf(runs: Sequence[Named], latency: str) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for colour, (name, run) in zip(cycle(_COLOURS), runs, strict=False):
            percentiles = _LATENCIES[latency](run).percentiles
            axes.plot(percentiles, [n / 100 for n in range(len(percentiles))], color=colour, label=name)
        axes.set(xlabel=f"{latency.replace('_', ' ')} (s)", ylabel="share of requests", xscale="log")
        axes.legend()

    return draw


def _over_time(run: SimulationRun, series: Sequence[str], label: str) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for colour, name in zip(_COLOURS, series, strict=False):
            counts = run.summary.over_time[name]
            axes.plot([(n + 0.5) / len(counts) for n in range(len(counts))], counts, color=colour, label=name)
        axes.set(xlabel="share of the run's time", ylabel=label)
        axes.legend()

    return draw


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in name)


def _draw_frontier(axes: Axes, runs: Sequence[Named]) -> None:
    """Draw throughput against P90 TTFT; the line joins the points that no point beats in both."""
    for colour, (name, run) in zip(cycle(_COLOURS), runs, strict=False):
        axes.plot(run.summary.throughput, run.summary.ttft.quantile(0.9), "o", color=colour, label=name)
    best = frontier([(run.summary.throughput, run.summary.ttft.quantile(0.9)) for _, run in runs])
    axes.plot(*zip(*best, strict=True), "-", color="grey", linewidth=0.8, zorder=0)
    axes.set(xlabel="throughput (req/s)", ylabel="P90 TTFT (s)", yscale="log")
    axes.legend()


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (more is better, less is better) that no point equals or beats in both, ascending."""
    found: list[tuple[float, float]] = []
    for more, less in sorted(set(points), key=lambda point: (-point[0], point[1])):
        if not found or less < found[-1][1]:
            found.append((more, less))
    return found[::-1]


def _draw_load(axes: Axes, runs: Sequence[Named]) -> None:
    ordered = sorted((run for _, run in runs), key=lambda run: run.rate)
    rates = [run.rate for run in ordered]
    axes.plot(rates, [run.summary.ttft.mean for run in ordered], "o-", color=_COLOURS[0], label="mean")
    axes.plot(rates, [run.summary.ttft.quantile(0.9) for run in ordered], "o-", color=_COLOURS[1], label="P90")
    axes.set(xlabel="arrivals (req/s)", ylabel="TTFT (s)", yscale="log")
    axes.legend()
