"""Hedged recompute: when a decode engine stops waiting for a prompt's KV and computes the prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.hedge import MARGIN_RATIO, InboundProgress, decide, remaining_seconds

LOCAL_SECONDS = 2.0
MIN_WAIT_SECONDS = 1.0


def _decide(progress: InboundProgress, local_seconds: float = LOCAL_SECONDS) -> tuple[str, str]:
    decision = decide(progress, local_seconds=local_seconds, min_wait_seconds=MIN_WAIT_SECONDS)
    return decision.action, decision.reason


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        (InboundProgress(0.5), ("wait", "no_hurry")),
        (InboundProgress(2.4), ("wait", "arrives_first")),
        (InboundProgress(2.6), ("recompute", "not_begun")),
        (InboundProgress(2.6, 1000, 1000, 0.0, 2.0), ("recompute", "not_begun")),
        (InboundProgress(9.0, 1000, 500, 2.0, 0.1), ("wait", "arrives_first")),
        (InboundProgress(9.0, 1000, 900, 2.0, 0.1), ("recompute", "slow")),
        (InboundProgress(9.0, 1000, 10, 8.0, 0.6), ("wait", "arrives_first")),
        (InboundProgress(9.0, 1000, 10, 8.0, 0.7), ("recompute", "paused")),
    ],
)
def test_the_earlier_end_is_chosen(progress: InboundProgress, expected: tuple[str, str]) -> None:
    assert _decide(progress) == expected


def test_a_transfer_at_a_steady_rate_is_predicted_exactly() -> None:
    for done in (0.1, 0.5, 0.9):
        progress = InboundProgress(30.0, 1000, round(1000 * (1 - done)), flowing_seconds=10 * done, paused_seconds=0.01)
        assert remaining_seconds(progress) == pytest.approx(10 * (1 - done), rel=0.01)


def test_a_link_that_fails_at_any_time_adds_at_most_one_and_a_third_local_prefills() -> None:
    """The transfer would take as long as a local prefill; its bytes stop at some time and never come again."""
    worst = 0.0
    for percent in range(100):
        failed_at = LOCAL_SECONDS * percent / 100
        now, missing = failed_at, 10_000 - 100 * percent
        while _decide(InboundProgress(now, 10_000, missing, now if percent else 0.0, now - failed_at))[0] == "wait":
            now += 0.01
        worst = max(worst, now + LOCAL_SECONDS - LOCAL_SECONDS)
    assert worst <= (1 + MARGIN_RATIO) * LOCAL_SECONDS + 0.02


@given(
    waited=st.floats(0, 1e4),
    total=st.integers(0, 1 << 40),
    missing=st.floats(0, 1),
    flowing=st.floats(0, 1e4),
    paused=st.floats(0, 1e4),
    local=st.floats(1e-3, 1e3),
)
def test_a_recompute_always_ends_before_the_predicted_transfer(
    waited: float, total: int, missing: float, flowing: float, paused: float, local: float
) -> None:
    progress = InboundProgress(waited, total, int(total * missing), flowing, paused)
    decision = decide(progress, local_seconds=local, min_wait_seconds=MIN_WAIT_SECONDS)
    assert decision.remaining_seconds >= 0
    if decision.action == "recompute":
        assert waited >= MIN_WAIT_SECONDS and decision.remaining_seconds > local
