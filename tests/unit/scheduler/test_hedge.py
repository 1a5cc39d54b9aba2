"""Hedged recompute: when a decode engine stops waiting for a prompt's KV and computes the prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.hedge import MARGIN_RATIO, PAUSE_FACTOR, InboundProgress, RecomputeQueue, decide

LOCAL_SECONDS = 2.0
MIN_WAIT_SECONDS = 1.0


def _decide(progress: InboundProgress, local_seconds: float = LOCAL_SECONDS) -> tuple[str, str]:
    decision = decide(progress, local_seconds=local_seconds, min_wait_seconds=MIN_WAIT_SECONDS)
    return decision.action, decision.reason


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        (InboundProgress(0.5, is_open=False), ("wait", "no_hurry")),
        (InboundProgress(1.1, is_open=False), ("recompute", "not_begun")),
        (InboundProgress(2.4, 1000, 1000, 0.0, 2.0), ("wait", "arrives_first")),
        (InboundProgress(2.6, 1000, 1000, 0.0, 2.0), ("recompute", "not_begun")),
        (InboundProgress(9.0, 1000, 500, 2.0, 0.1), ("wait", "arrives_first")),
        (InboundProgress(9.0, 1000, 900, 2.0, 0.1), ("recompute", "slow")),
        (InboundProgress(9.0, 1000, 10, 8.0, 0.6), ("wait", "arrives_first")),
        (InboundProgress(9.0, 1000, 10, 8.0, 0.7), ("recompute", "paused")),
    ],
)
def test_the_earlier_end_is_chosen(progress: InboundProgress, expected: tuple[str, str]) -> None:
    assert _decide(progress) == expected


def test_a_link_that_fails_at_any_time_adds_at_most_one_and_a_third_local_prefills() -> None:
    """The transfer would take as long as a local prefill; its bytes stop at some time and never come again."""
    worst = 0.0
    for percent in range(100):
        failed_at = LOCAL_SECONDS * percent / 100
        now, missing = failed_at, 10_000 - 100 * percent
        while _decide(InboundProgress(now, 10_000, missing, now if percent else 0.0, now - failed_at))[0] == "wait":
            now += 0.01
        # The prompt is computed from now on, and would have arrived at LOCAL_SECONDS.
        worst = max(worst, now + LOCAL_SECONDS - LOCAL_SECONDS)
    assert worst <= (1 + (1 + MARGIN_RATIO) / PAUSE_FACTOR) * LOCAL_SECONDS + 0.02


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


def test_a_recompute_waits_for_the_earlier_ones() -> None:
    queue = RecomputeQueue()
    assert queue.local_seconds(2.0, now=100.0) == 2.0
    queue.add(2.0, now=100.0)
    assert queue.local_seconds(3.0, now=100.5) == pytest.approx(4.5)
    queue.add(3.0, now=100.5)
    assert queue.local_seconds(1.0, now=101.0) == pytest.approx(5.0)
    assert queue.local_seconds(1.0, now=200.0) == 1.0


def test_requests_of_a_dead_link_recompute_without_a_break() -> None:
    """Ten requests have waited since the same moment, and nothing comes."""
    queue, now = RecomputeQueue(), 0.0
    starts: list[float] = []
    while len(starts) < 10:
        local = queue.local_seconds(LOCAL_SECONDS, now=now)
        if _decide(InboundProgress(now, 1000, 500, 1.0, now), local)[0] == "recompute":
            starts.append(now)
            queue.add(LOCAL_SECONDS, now=now)
        now += 0.01
    idle = [start - (starts[0] + number * LOCAL_SECONDS) for number, start in enumerate(starts)]
    assert max(idle) <= 0.0, "each is queued before the previous ones have ended"
