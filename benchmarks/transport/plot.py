"""Plot of a measurement: the share of each link that each engine uses. Run `python -m benchmarks.transport.plot`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from prfaas.solve.report.plots import save

RESULT = Path(__file__).parents[1] / "results" / "transport.json"
PLOT = Path(__file__).parents[2] / "docs" / "images" / "transport.svg"
LINKS = ("metro", "regional", "continental", "bursty")
WIDTH = 0.8  # Width of a group of bars, relative to the distance of two groups.
# These colours differ in greyscale and for colour-blind readers (Okabe and Ito).
COLOURS = ("#000000", "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#D55E00")


class Bars(NamedTuple):
    """Bars of one engine. A row belongs to the engine if its name contains all these words."""

    label: str
    words: tuple[str, ...]


BULK = (
    Bars("prfaas", ("1 GiB as 64 layers, warm",)),
    Bars("best iperf3", ("iperf3 -n 1G",)),
    Bars("Mooncake, 16 lanes", ("mooncake, 16 lanes, 1 GiB",)),
    Bars("Mooncake, default", ("mooncake, default, 1 GiB",)),
    Bars("NIXL", ("nixl", "1 GiB")),
    Bars("LMCache", ("lmcache", "1 GiB")),
)
SMALL = (
    Bars("prfaas", ("64 MiB as 16 layers, warm",)),
    Bars("iperf3, cold", ("iperf3 -n 64M",)),
    Bars("Mooncake, 16 lanes", ("mooncake, 16 lanes, 64 MiB by layer",)),
    Bars("Mooncake, default", ("mooncake, default, 64 MiB by layer",)),
    Bars("NIXL", ("nixl", "64 MiB by layer")),
    Bars("LMCache", ("lmcache", "64 MiB by layer")),
)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the plot of these rows as SVG."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    _draw(left, rows, BULK, title="1 GiB at once, warm")
    _draw(right, rows, SMALL, title="64 MiB, a call for each of 16 layers")
    left.set_ylabel("share of what the link can carry")
    save(figure, path)


def _draw(axes: Axes, rows: Sequence[dict[str, Any]], engines: Sequence[Bars], *, title: str) -> None:
    drawn = [
        (engine, found)
        for engine in engines
        if (found := [best(rows, link, engine.words) for link in LINKS]) and any(found)
    ]
    colours = dict(zip([engine.label for engine in engines], COLOURS, strict=False))
    for number, (engine, shares) in enumerate(drawn):
        at = [link + (number + 0.5) * WIDTH / len(drawn) - WIDTH / 2 for link in range(len(LINKS))]
        heights = [share or 0.0 for share in shares]
        axes.bar(at, heights, width=WIDTH / len(drawn), color=colours[engine.label], label=engine.label)
    axes.set_title(title, fontsize=11)
    axes.set_xticks(range(len(LINKS)), LINKS)
    axes.grid(visible=True, axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)


def best(rows: Sequence[dict[str, Any]], link: str, words: Sequence[str]) -> float | None:
    """Return the highest median of the link's rows whose names contain these words, or None."""
    found = [
        row["figure"]["median"]
        for row in rows
        if row["link"] == link and all(word in row["name"] for word in words) and isinstance(row["figure"], dict)
    ]
    return max(found, default=None)


if __name__ == "__main__":
    draw(json.loads(RESULT.read_text()), PLOT)
