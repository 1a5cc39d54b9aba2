"""Parts of the transport benchmark that a run is asked for."""

from __future__ import annotations

import pytest

from benchmarks.transport.__main__ import PARTS, asked_for


def test_a_run_measures_the_requested_parts_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARTS", raising=False)
    assert asked_for("PARTS", PARTS) == list(PARTS)
    monkeypatch.setenv("PARTS", "health bulk")
    assert asked_for("PARTS", PARTS) == ["health", "bulk"]


def test_an_unknown_part_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTS", "bulk layer")
    with pytest.raises(SystemExit, match="PARTS: 'layer' is none of bulk, layers, "):
        asked_for("PARTS", PARTS)
