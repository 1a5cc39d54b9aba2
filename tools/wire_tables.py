"""Tables of benchmarks/README.md from the results of `make bench AREA=transport`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tools.missed_bars import RESULTS

Row = Mapping[str, Any]
LINKS = ("metro", "regional", "continental", "bursty")
STATE_MEGABYTES = {"Kimi-Linear-48B-A3B": 43, "Qwen3.5-397B-A17B": 192, "Ring-2.5-1T": 294}


class LinkRows:
    """Recorded rows of one link."""

    def __init__(self, rows: Sequence[Row], link: str) -> None:
        self._rows = [row for row in rows if row["link"] == link]

    def figures(self, pattern: str) -> list[Any]:
        """Return the figures of the rows with this name. A skipped row has its reason instead."""
        return [row["figure"] for row in self._rows if re.fullmatch(pattern, row["name"])]

    def best(self, pattern: str) -> str:
        """Return the highest median; empty if nothing was measured."""
        medians = [figure["median"] for figure in self.figures(pattern) if isinstance(figure, dict)]
        return f"{max(medians):g}" if medians else ""

    def days(self, pattern: str = ".*") -> str:
        """Return the days on which the rows with this name were measured."""
        days = {row.get("measured_on", "earlier") for row in self._rows if re.fullmatch(pattern, row["name"])}
        return ", ".join(sorted(days))


def _beside_default(engine: str, test: str) -> Callable[[LinkRows], str]:
    """Return a cell with the result for 16 lanes, and for the engine's default number in brackets."""

    def cell(link: LinkRows) -> str:
        most, default = link.best(f"{engine}, 16 lanes, {test}"), link.best(f"{engine}, default, {test}")
        return f"{most} ({default})" if most and default else most

    return cell


def _processor_time(link: LinkRows) -> str:
    figures = link.figures("CPU over iperf3.*")[:1]
    return "".join(f"{figure['seconds_per_gb']:g} ({figure['ratio']:g})" for figure in figures)


def _best(pattern: str) -> Callable[[LinkRows], str]:
    return lambda link: link.best(pattern)


_ROWS: dict[str, Callable[[LinkRows], str]] = {
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
    "measured on": LinkRows.days,
}


def shares_table(rows: Sequence[Row]) -> str:
    """Return the comparison with other transports, one column per link."""
    links = [LinkRows(rows, link) for link in LINKS]
    return _table([("", *LINKS), *((label, *map(cell, links)) for label, cell in _ROWS.items())])


def prefill_table(rows: Sequence[Row]) -> str:
    """Return the exposed transfer time after prefill per model, with states sent by layer and in one burst."""
    links = LINKS[:3]

    def cell(model: str, link: str) -> str:
        found = LinkRows(rows, link)
        both = (found.best(f"{re.escape(model)}, .*states {when}: exposed ms") for when in ("by layer", "in one burst"))
        return ", ".join(f"{float(figure):.0f}" for figure in both if figure)

    body = [
        (f"{model} ({size} MB of states)", *(cell(model, link) for link in links))
        for model, size in STATE_MEGABYTES.items()
    ]
    days = [LinkRows(rows, link).days(".*: exposed ms") for link in links]
    return _table([("", *links), *body, ("measured on", *days)])


def health_table(rows: Sequence[Row]) -> str:
    """Return the accuracy of what links report about themselves."""
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
    """Return the tables of the committed results by their names on the page."""
    rows = json.loads(RESULTS.read_text())
    return {
        "the wire beside its peers": shares_table(rows),
        "the wire behind a prefill": prefill_table(rows),
        "how true a link's word is": health_table(rows),
    }
