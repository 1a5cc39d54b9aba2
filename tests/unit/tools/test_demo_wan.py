"""The knobs of `make demo-wan`."""

from __future__ import annotations

import pytest

from tools.demo_wan.__main__ import turned
from tools.wan import WanShape, obstacle

SHAPE = WanShape(1e9, 0.08)


def test_a_knob_turns_one_thing() -> None:
    assert turned(SHAPE, "rtt 200ms") == WanShape(1e9, 0.2)
    assert turned(SHAPE, "rate 300Mbps") == WanShape(3e8, 0.08)
    assert turned(SHAPE, "loss 0.001") == WanShape(1e9, 0.08, 0.001)


@pytest.mark.parametrize("line", ["", "rtt", "rtt much", "rate 5", "loss 1", "loss -1", "loss x", "speed 3"])
def test_what_is_no_knob_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        turned(SHAPE, line)


@pytest.mark.root
def test_what_a_link_needs_and_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert obstacle() == "needs ip and cc (Debian: iproute2, gcc)"
