"""Tables of transport results, compared with recorded rows."""

from __future__ import annotations

from typing import Any

from tools.wire_tables import health_table, prefill_table, shares_table


def _row(link: str, part: str, name: str, figure: Any, **more: str) -> dict[str, Any]:
    return {"link": link, "part": part, "name": name, "figure": figure, "bar": "-", **more}


def _median(median: float) -> dict[str, float]:
    return {"median": median, "min": 0.5 * median, "max": 2 * median}


def _cells(table: str, label: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_shares_table_shows_the_best_median_of_each_link() -> None:
    table = shares_table(
        [
            _row("metro", "bulk", "1 GiB as 64 layers, warm, of the link", _median(0.924), measured_on="2026-11-22"),
            _row("metro", "bulk", "iperf3 -n 1G -P 2 bbr, of the link", _median(0.899), measured_on="2026-11-22"),
            _row("metro", "bulk", "iperf3 -n 1G -P 16 bbr, of the link", _median(0.985), measured_on="2026-11-22"),
            _row("metro", "bulk", "iperf3 -n 1G -P 16 cubic, of the link", _median(0.99), measured_on="2026-11-22"),
            _row("metro", "bulk", "lmcache, 1 GiB, cold, of the link", "skipped: not installed"),
            _row("metro", "layers", "exposed after the last of 64 layers, ms", _median(18.9), measured_on="2026-11-23"),
            _row("bursty", "bulk", "mooncake, default, 1 GiB, of the link", _median(0.84)),
            _row("bursty", "bulk", "mooncake, 16 lanes, 1 GiB, of the link", _median(0.88)),
            _row("bursty", "bulk", "CPU over iperf3 with as many connections", {"ratio": 1.3, "seconds_per_gb": 1.8}),
        ]
    )
    assert _cells(table, "1 GiB as 64 layers, warm") == ["0.924", "", "", ""]
    assert _cells(table, "best of 2, 8 or 16 iperf3 streams, timed as a whole")[0] == "0.985"
    assert _cells(table, "best peer, cold")[0] == ""
    assert _cells(table, "Mooncake TE over TCP, 16 lanes (its default: 4)")[3] == "0.88 (0.84)"
    assert _cells(table, "processor seconds per GB, both ends (over iperf3 with as many connections)")[3] == "1.8 (1.3)"
    assert _cells(table, "measured on") == ["2026-11-22, 2026-11-23, earlier", "", "", "earlier"]


def test_prefill_table_shows_exposed_time_for_states_by_layer_and_in_one_burst() -> None:
    name = "Ring-2.5-1T, 16K tokens, states {}: exposed ms"
    rows = [
        _row("metro", "bulk", "1 GiB as 64 layers, warm, of the link", _median(0.924)),
        _row("metro", "layers", name.format("by layer"), _median(187.9), measured_on="2026-11-22"),
        _row("metro", "layers", name.format("in one burst"), _median(222.4), measured_on="2026-11-22"),
    ]
    table = prefill_table(rows)
    assert _cells(table, "Ring-2.5-1T (294 MB of states)") == ["188, 222", "", ""]
    assert _cells(table, "measured on") == ["2026-11-22", "", ""]


def test_health_table_shows_the_median_with_minimum_and_maximum() -> None:
    rows = [
        _row("alternating", "health", "error", {"median": 0.003, "min": 0.0, "max": 0.358}),
        _row("alternating", "health", "congested on an idle link, samples", 0),
    ]
    assert _cells(health_table(rows), "error") == ["0.003 (0 to 0.358)", "-"]
    assert _cells(health_table(rows), "congested on an idle link, samples") == ["0", "-"]
