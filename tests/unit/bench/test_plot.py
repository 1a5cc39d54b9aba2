"""The plot of the transport's measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks.transport.plot import LINKS, draw

NAMES = ("iperf3 -n 1G", "iperf3 -n 64M")
ROWS = [{"link": link, "name": name, "figure": {"median": 0.5}} for link in LINKS for name in NAMES]


def test_equal_rows_are_equal_bytes(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        draw(ROWS, tmp_path / folder / "transport.svg")
    first, second = (tmp_path / folder / "transport.svg" for folder in ("first", "second"))
    assert first.read_bytes() == second.read_bytes() and b"<svg" in first.read_bytes()
