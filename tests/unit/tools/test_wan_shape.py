"""What an emulated link can carry."""

from __future__ import annotations

import pytest

from tools.wan import PAYLOAD_RATIO, WanShape

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("began", "ended", "bits"),
    [
        (0.0, 2.0, 2000e6),  # the fast phase
        (2.0, 4.0, 600e6),  # the slow one
        (1.5, 2.5, 500e6 + 150e6),
        (1.0, 7.0, 1000e6 + 600e6 + 2000e6 + 300e6),
    ],
)
def test_an_alternating_link_carries_what_its_phases_allow(began: float, ended: float, bits: float) -> None:
    shape = WanShape(1e9, 0.04, 0.0, 0.3e9, 2.0)
    carried = shape.payload_bytes_between(int(began * SECOND), int(ended * SECOND))
    assert carried == pytest.approx(bits / 8 * PAYLOAD_RATIO)


def test_a_steady_link_carries_its_rate() -> None:
    assert WanShape(8e9, 0.04).payload_bytes_between(5, 5 + 3 * SECOND) == pytest.approx(3e9 * PAYLOAD_RATIO)
