"""Knobs of `make demo-wan`."""

import re

import pytest

from tools.demo_wan.command import KNOBS, apply_knob, main
from tools.wan import WanShape, obstacle

SHAPE = WanShape(1e9, 0.08)


def test_knob_changes_one_property() -> None:
    assert apply_knob(SHAPE, "rtt 200ms") == WanShape(1e9, 0.2)
    assert apply_knob(SHAPE, "rate 300Mbps") == WanShape(3e8, 0.08)
    assert apply_knob(SHAPE, "loss 0.001") == WanShape(1e9, 0.08, 0.001)


@pytest.mark.parametrize(
    "line", ["", "rtt", "rtt much", "rate 5", "rate 0bps", "rate 1e999Gbps", "loss 1", "loss -1", "loss x", "speed 3"]
)
def test_unknown_knob_or_value_is_refused_with_the_accepted_form(line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(KNOBS)) as refused:
        apply_knob(SHAPE, line)
    assert repr(line) in str(refused.value)


@pytest.mark.parametrize("flags", [("--rtt", "much"), ("--loss", "2"), ("--rate", "5")])
@pytest.mark.root
def test_invalid_link_is_refused_in_one_line(
    flags: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if obstacle():
        pytest.skip(f"an emulated link {obstacle()}")
    monkeypatch.setattr("sys.argv", ["demo-wan", *flags])
    assert main() == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and repr(" ".join(flags).removeprefix("--")) in errors


@pytest.mark.root
def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert obstacle() == "needs ip and cc (Debian: iproute2, gcc)"
