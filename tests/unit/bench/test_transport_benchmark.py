"""What a run of the wire's benchmark is asked for."""

from __future__ import annotations

import pytest

from benchmarks.transport.__main__ import PARTS, asked_for


def test_a_run_measures_what_it_is_asked_for_or_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARTS", raising=False)
    assert asked_for("PARTS", PARTS) == list(PARTS)
    monkeypatch.setenv("PARTS", "health bulk")
    assert asked_for("PARTS", PARTS) == ["health", "bulk"]


def test_a_part_that_is_none_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTS", "bulk layer")
    with pytest.raises(SystemExit, match="PARTS: 'layer' is none of bulk, layers, "):
        asked_for("PARTS", PARTS)
