"""What `make bench AREA=transport` has recorded, as the tables of benchmarks/README.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tools.missed_bars import RESULTS

Row = Mapping[str, Any]
LINKS = ("metro", "regional", "continental", "bursty")
MODELS = {"Kimi-Linear-48B-A3B": 43, "Qwen3.5-397B-A17B": 192, "Ring-2.5-1T": 294}  # and megabytes of states


class Recorded:
    """The rows of one link."""

    def __init__(self, rows: Sequence[Row], link: str) -> None:
        self._rows = [row for row in rows if row["link"] == link]

    def figures(self, pattern: str) -> list[Any]:
        """Of the rows whose whole name fits; of one that was skipped, the words that say why."""
        return [row["figure"] for row in self._rows if re.fullmatch(pattern, row["name"])]

    def best(self, pattern: str) -> str:
        """The highest median; "" where nothing was measured."""
        medians = [its["median"] for its in self.figures(pattern) if isinstance(its, dict)]
        return f"{max(medians):g}" if medians else ""

    def days(self, pattern: str = ".*") -> str:
        """On which the rows were measured whose whole name fits."""
        days = {row.get("measured_on", "earlier") for row in self._rows if re.fullmatch(pattern, row["name"])}
        return ", ".join(sorted(days))


def _beside_default(engine: str, what: str) -> Callable[[Recorded], str]:
    """With 16 lanes, and with its own number."""

    def cell(its: Recorded) -> str:
        most, default = its.best(f"{engine}, 16 lanes, {what}"), its.best(f"{engine}, default, {what}")
        return f"{most} ({default})" if most and default else most

    return cell


def _processor_time(its: Recorded) -> str:
    return "".join(
        f"{figure['seconds_per_gb']:g} ({figure['ratio']:g})" for figure in its.figures("CPU over iperf3.*")[:1]
    )


def _best(pattern: str) -> Callable[[Recorded], str]:
    return lambda its: its.best(pattern)


_ROWS: dict[str, Callable[[Recorded], str]] = {
    "1 GiB as 64 layers, warm": _best("1 GiB as 64 layers, warm, of the link"),
    "best of 2, 8 or 16 iperf3 streams, timed as a whole": _best("iperf3 -n 1G -P [0-9]+ bbr, of the link"),
    "Mooncake TE over TCP, 16 lanes (its default: 4)": _beside_default("mooncake", "1 GiB, of the link"),
    "NIXL over UCX's TCP": _best("nixl, .*, 1 GiB, of the link"),
    "64 MiB as 16 layers, warm": _best("64 MiB as 16 layers, warm, of the link"),
    "Mooncake, 16 lanes, a call for each layer": _best("mooncake, 16 lanes, 64 MiB by layer, of the link"),
    "64 MiB, cold": _best("64 MiB as 16 layers, cold, of the link"),
    "best peer, cold": _best("(iperf3|mooncake|nixl|lmcache).*, cold, of the link"),
    "1 GiB without BBR (cubic)": _best("1 GiB without BBR .*, of the link"),
    "1 GiB under TLS 1.3, warm": _best("1 GiB under TLS 1.3, warm, of the link"),
    "exposed after the last of 64 layers that come at 0.9 of the link, ms": _best("exposed after .* layers, ms"),
    "urgent 8 MiB beside 2 GiB, over twice its time alone + one round trip": _best("urgent 8 MiB beside 2 GiB, .*"),
    "processor seconds per GB, both ends (over iperf3 with as many connections)": _processor_time,
    "measured on": Recorded.days,
}


def shares_table(rows: Sequence[Row]) -> str:
    """The wire beside its peers, a column for each link."""
    links = [Recorded(rows, link) for link in LINKS]
    return _table([("", *LINKS), *((label, *map(cell, links)) for label, cell in _ROWS.items())])


def prefill_table(rows: Sequence[Row]) -> str:
    """What requests of each model wait for after their prefill, states by layer and in one burst."""
    links = LINKS[:3]

    def cell(model: str, link: str) -> str:
        its = Recorded(rows, link)
        both = (its.best(f"{re.escape(model)}, .*states {when}: exposed ms") for when in ("by layer", "in one burst"))
        return ", ".join(f"{float(figure):.0f}" for figure in both if figure)

    body = [
        (f"{model} ({size} MB of states)", *(cell(model, link) for link in links)) for model, size in MODELS.items()
    ]
    days = [Recorded(rows, link).days(".*: exposed ms") for link in links]
    return _table([("", *links), *body, ("measured on", *days)])


def health_table(rows: Sequence[Row]) -> str:
    """How true what a link says of itself is."""
    found = [(row["name"], _spread(row["figure"]), row["bar"]) for row in rows if row["part"] == "health"]
    return _table([("row", "measured", "target"), *found])


def _spread(figure: Any) -> str:
    if not isinstance(figure, dict):
        return f"{figure:g}" if isinstance(figure, int | float) else str(figure)
    return f"{figure['median']:g} ({figure['min']:g} to {figure['max']:g})"


def _table(lines: Sequence[tuple[str, ...]]) -> str:
    head, *body = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ("---",) * len(head), *body])


def current() -> dict[str, str]:
    """Each table of the page by the name that it has there, of the results in the tree."""
    rows = json.loads(RESULTS.read_text())
    return {
        "the wire beside its peers": shares_table(rows),
        "the wire behind a prefill": prefill_table(rows),
        "how true a link's word is": health_table(rows),
    }
