"""Table of TTFT by distance, with and without missing measurements."""

from __future__ import annotations

from typing import Any

from tools.distance_table import distance_table


def _link(*, nixl: dict[str, float] | None = None, **not_measured: str) -> dict[str, Any]:
    beyond = {"median": 0.5, "min": 0.25, "max": 0.75}
    return {
        "rtt_seconds": 0.03,
        "bits_per_second": 32_665_067,
        "transfer_seconds": 3.3,
        "ttft_seconds": {"local": {"median": 3.26}},
        "beyond_local_seconds": {
            "layer by layer": beyond,
            "store and forward": beyond | {"median": 3.6},
            "pull after prefill": beyond | {"median": 4.0},
            **({"NixlConnector": nixl} if nixl else {}),
        },
        "not_measured": not_measured,
        "bar_seconds": 0.525,
    }


def test_row_shows_each_method_with_its_spread_or_why_it_was_not_measured() -> None:
    links = [
        _link(NixlConnector="skipped: not installed"),
        _link(nixl={"median": 4.5, "min": 4.0, "max": 5.0}),
    ]
    rows = distance_table({"ttft_over_distance": {"links": links}}).splitlines()
    ways = " | ".join(f"+{median} s (0.25 to 0.75)" for median in ("0.50", "3.60", "4.00"))
    shared = f"| 30 ms | 3.30 s each (32.7 Mbit/s) | 3.26 s | {ways}"
    ends = ("skipped: not installed", "+4.50 s (4.00 to 5.00)")
    assert rows[2:] == [f"{shared} | {end} | +0.53 s |" for end in ends]
    assert len({row.count("|") for row in rows}) == 1
