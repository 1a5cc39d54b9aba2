"""The limits of a restart of the record, with the times as they were: long, so for the soak alone."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.index import recovery


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_killed_redis_and_a_failover_cost_no_more_than_is_promised(capsys: pytest.CaptureFixture[str]) -> None:
    found = recovery.measure()
    with capsys.disabled():
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    assert not found["misses"]
