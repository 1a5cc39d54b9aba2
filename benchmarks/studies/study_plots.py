"""The plots of studies, from their tables: panels as the papers have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.studies.studies import Row, Table
from prfaas.solve.report.plots import save

_BASELINE, _LOCAL, _THIRD, _FOURTH, _FIFTH = "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9"
_COLOURS = (_LOCAL, _BASELINE, _THIRD, _FOURTH, _FIFTH)
_PANEL, _ACROSS = (4.2, 3.4), 3
Draw = Callable[[Figure, Sequence[Table]], None]


def write(study: str, tables: Sequence[Table], folder: Path) -> list[Path]:
    """Write the study's plots into `folder` as SVG; returns the files, none where the study has no plot."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_write(folder / f"{name}.svg", draw, tables) for name, draw in PLOTS.get(study, {}).items()]


def _write(path: Path, draw: Draw, tables: Sequence[Table]) -> Path:
    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure, tables)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    return save(figure, path)


def _panels(figure: Figure, titles: Sequence[str]) -> Iterable[tuple[str, Axes]]:
    """Three in a row, each with its title."""
    across = min(_ACROSS, len(titles))
    down = -(-len(titles) // across)
    figure.set_size_inches(_PANEL[0] * across, _PANEL[1] * down)
    panels: list[Axes] = figure.subplots(down, across, squeeze=False).ravel().tolist()
    for unused in panels[len(titles) :]:
        unused.set_axis_off()
    for title, axes in zip(titles, panels, strict=False):
        axes.set_title(title, fontsize="medium")
        yield title, axes


def _numbers(rows: Iterable[Row], column: int) -> list[float]:
    return [float(row[column]) for row in rows]


def _of(table: Table, column: int) -> list[str]:
    """Return the different values of a column, in order."""
    return list(dict.fromkeys(str(row[column]) for row in table.rows))


def _queueing(figure: Figure, tables: Sequence[Table]) -> None:
    """TTFT over load for each deployment."""
    table = tables[0]
    for (_, axes), column in zip(_panels(figure, ("mean", "P90")), (3, 4), strict=True):
        for colour, name in zip(_COLOURS, _of(table, 1), strict=False):
            rows = [row for row in table.rows if row[1] == name]
            axes.plot(_of(table, 0), _numbers(rows, column), "o-", color=colour, label=name)
        axes.set(xlabel="share of the own exact capacity", ylabel="TTFT (s)", yscale="log")
        axes.legend(fontsize="small")


def _search(figure: Figure, tables: Sequence[Table]) -> None:
    """PrfaaS, Figure 5: capacity over the split, and over t."""
    for (_, axes), table in zip(_panels(figure, [table.title for table in tables]), tables, strict=True):
        axes.plot(_numbers(table.rows, 0), _numbers(table.rows, 1), "-", color=_LOCAL, label="solver, exact")
        axes.plot(_numbers(table.rows, 0), _numbers(table.rows, 2), "o", color=_BASELINE, label="twin, saturated")
        axes.set(xlabel=table.columns[0], ylabel="requests/s")
        axes.legend(fontsize="small")


def _frontier(figure: Figure, tables: Sequence[Table]) -> None:
    """PPD, Figure 1: P99 TTFT against tokens per second, at each load; those that no other of the kind beats are named."""
    table = tables[0]
    for load, axes in _panels(figure, _of(table, 0)):
        for kind, colour in (("baseline", _BASELINE), ("D-local capable", _LOCAL)):
            rows = [row for row in table.rows if (str(row[0]), row[2]) == (load, kind)]
            axes.plot(_numbers(rows, 3), _numbers(rows, 4), "o", color=colour, label=kind)
            best = frontier([(float(row[3]), float(row[4])) for row in rows])
            axes.plot(*zip(*best, strict=True), "-", color=colour, linewidth=0.8)
            for row in rows:
                if (float(row[3]), float(row[4])) in best:
                    axes.annotate(str(row[1]), (float(row[3]), float(row[4])), fontsize=6)
        axes.set(xlabel="tokens/s", ylabel="P99 TTFT (s)", yscale="log")
        axes.legend(fontsize="small")


def _latency(figure: Figure, tables: Sequence[Table]) -> None:
    """PPD, Figure 4: latency over load: its mean, the band from P50 to P90, and how many turns were out of time."""
    table = tables[1]
    places = list(dict.fromkeys(f"{row[0]}, {row[1]}" for row in table.rows))
    for place, axes in _panels(figure, places):
        for colour, mode in ((_BASELINE, "x = 0"), (_LOCAL, "by the table")):
            rows = [row for row in table.rows if (f"{row[0]}, {row[1]}", row[3]) == (place, mode)]
            loads = _numbers(rows, 2)
            axes.plot(loads, _numbers(rows, 4), "o-", color=colour, label=f"{mode}: mean, P50 to P90", markersize=3)
            axes.fill_between(loads, _numbers(rows, 5), _numbers(rows, 6), color=colour, alpha=0.15)
            for row in rows:
                if row[7]:
                    axes.annotate(f"{row[7]} late", (float(row[2]), float(row[4])), fontsize=6, color=colour)
        axes.set(xlabel="conversations/s", ylabel="latency of a turn (s)")
        axes.legend(fontsize="x-small")


def _trade_off(figure: Figure, tables: Sequence[Table]) -> None:
    """PPD, Figure 5: TTFT against TPOT of later turns."""
    table = tables[2]
    ((_, axes),) = _panels(figure, ("1P_3D",))
    fixed = [row for row in table.rows if str(row[0]).startswith("x")]
    axes.plot(_numbers(fixed, 2), _numbers(fixed, 1), "o-", color=_BASELINE, label="x from 0 to 1")
    for row in table.rows:
        if row not in fixed:
            axes.plot(float(row[2]), float(row[1]), "s", color=_LOCAL)
            axes.annotate(f"{row[0]} ({float(row[3]):.0%})", (float(row[2]), float(row[1])), fontsize=6)
    axes.set(xlabel="TPOT of later turns (ms)", ylabel="TTFT of later turns (ms)", yscale="log")
    axes.legend(fontsize="small")


def _overlap(figure: Figure, tables: Sequence[Table]) -> None:
    """Draw the planned and the simulated gain of overlapping."""
    table = tables[0]
    for name, axes in _panels(figure, _of(table, 0)):
        rows = [row for row in table.rows if row[0] == name]
        places = range(len(rows))
        axes.bar([place - 0.2 for place in places], _numbers(rows, 4), 0.4, color=_BASELINE, label="planned")
        axes.bar([place + 0.2 for place in places], _numbers(rows, 5), 0.4, color=_LOCAL, label="in the twin")
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.set_xticks(list(places), [f"{float(row[1]):g}" for row in rows])
        axes.set(xlabel="tokens/s asked of each answer", ylabel="gain of capacity")
        axes.legend(fontsize="small")


def _rapid(column: int, label: str) -> Draw:
    """RAPID-Serve, Figures 6 and 9: what is served, or served well, over what is asked."""

    def draw(figure: Figure, tables: Sequence[Table]) -> None:
        table = next(table for table in tables if table.title == "Over the load")
        for place, axes in _panels(figure, [f"{model}, {trace}" for model, trace in _pairs(table)]):
            for colour, system in zip(_COLOURS, _of(table, 2), strict=False):
                rows = [row for row in table.rows if f"{row[0]}, {row[1]}" == place and row[2] == system]
                axes.plot(_numbers(rows, 3), _numbers(rows, column), "o-", color=colour, label=system, markersize=3)
            axes.set(xlabel="arrivals (req/s)", ylabel=label)
            axes.legend(fontsize="x-small")

    return draw


def _pairs(table: Table) -> list[tuple[str, str]]:
    return list(dict.fromkeys((str(row[0]), str(row[1])) for row in table.rows))


PLOTS: Mapping[str, Mapping[str, Draw]] = MappingProxyType({
    "queueing": {"twin-queueing": _queueing},
    "search": {"twin-search": _search},
    "ppd-figures": {"ppd-frontier": _frontier, "ppd-latency": _latency, "ppd-trade-off": _trade_off},
    "overlap": {"twin-overlap": _overlap},
    "rapid": {"rapid-throughput": _rapid(4, "served (req/s)"), "rapid-goodput": _rapid(5, "goodput (req/s)")},
})  # fmt: skip


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (more is better, less is better) that no point equals or beats in both, ascending."""
    found: list[tuple[float, float]] = []
    for more, less in sorted(set(points), key=lambda point: (-point[0], point[1])):
        if not found or less < found[-1][1]:
            found.append((more, less))
    return found[::-1]
