"""Capacity of emulated links, and the arguments for netem."""

import pytest

from tools.wan import PAYLOAD_RATIO, PROFILES, WanShape
from tools.wan.__main__ import main
from tools.wan.netem import arguments

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("began", "ended", "bits"),
    [
        (0.0, 2.0, 2000e6),  # Only the fast phase.
        (2.0, 4.0, 600e6),  # Only the slow phase.
        (1.5, 2.5, 500e6 + 150e6),
        (1.0, 7.0, 1000e6 + 600e6 + 2000e6 + 300e6),
    ],
)
def test_alternating_link_carries_the_rate_of_each_phase(began: float, ended: float, bits: float) -> None:
    shape = WanShape(1e9, 0.04, 0.0, 0.3e9, 2.0)
    carried = shape.payload_bytes_between(int(began * SECOND), int(ended * SECOND))
    assert carried == pytest.approx(bits / 8 * PAYLOAD_RATIO)


def test_steady_link_carries_its_rate() -> None:
    assert WanShape(8e9, 0.04).payload_bytes_between(5, 5 + 3 * SECOND) == pytest.approx(3e9 * PAYLOAD_RATIO)


def test_netem_arguments_state_one_way_delay_loss_rate_and_queue() -> None:
    command = arguments(PROFILES["regional"], at_seconds=0.0)
    assert command[:-1] == ["delay", "15000us", "loss", "0.01%", "rate", "5000000000bit", "24", "limit"]
    assert int(command[-1]) == pytest.approx(5e9 / 8 * (0.030 + 0.015) / 1538, rel=1e-3)


@pytest.mark.parametrize(
    ("at_seconds", "rate"), [(0.5, "1000000000bit"), (2.5, "300000000bit"), (4.1, "1000000000bit")]
)
def test_netem_arguments_follow_the_phase(at_seconds: float, rate: str) -> None:
    assert rate in arguments(PROFILES["bursty"], at_seconds=at_seconds)


def test_far_command_after_the_profile_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["wan", "regional", "--far", "iperf3 -s", "sh"])
    with pytest.raises(SystemExit):
        main()
    assert "--far must precede the profile" in capsys.readouterr().err
