"""The link between two clusters drops every packet without a reset: long prompts are computed where they decode."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.soak.deployment_run import Plan
from tests.soak.link import run_across_link
from tools.paced_engine.server import Pace

pytestmark = pytest.mark.root
NUM_TOKENS = 3000
PACE = Pace(0.02, 1e-3, 0.005)
FLAGS = [f"--prefill-seconds-per-token={PACE.prefill_seconds_per_token}"]
LOCAL_SECONDS = PACE.prefill(NUM_TOKENS)
MAX_ADDED_RATIO = 1.3
INTERVAL_SECONDS = 2.5  # Two decode engines never have a queue, so that only the link delays a request.


def _added(results: dict[str, Any], seconds: float) -> list[float]:
    """Return the added seconds of the requests under way during silences of this duration, in order."""
    windows = [(begin, end) for name, begin, end in results["faults"] if name == f"silence {seconds:g} s"]
    return sorted(
        answer["ttft_seconds"] - LOCAL_SECONDS
        for answer in results["answers"]
        for begin, end in windows
        if answer["asked_at"] < end and answer["asked_at"] + answer["ttft_seconds"] > begin
    )


def _check(results: dict[str, Any], silences: list[float]) -> None:
    assert [answer for answer in results["answers"] if not answer["is_whole"]] == []
    for seconds in dict.fromkeys(silences):
        added = _added(results, seconds)
        p99 = added[-1 - len(added) // 100]
        sys.stdout.write(
            f"\nsilence of {seconds:g} s: {len(added)} requests, added {added[len(added) // 2]:.2f} s at the median, "
            f"{p99:.2f} s at P99, {p99 / LOCAL_SECONDS:.2f} local prefills\n"
        )
        assert p99 <= MAX_ADDED_RATIO * LOCAL_SECONDS


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_silences_cost_little_more_than_a_local_prefill(tmp_path: Path) -> None:
    silences = [*[5.0] * 12, *[30.0] * 4, 120.0]
    _check(run_across_link(tmp_path, Plan(INTERVAL_SECONDS, [NUM_TOKENS], FLAGS, silences)), silences)
