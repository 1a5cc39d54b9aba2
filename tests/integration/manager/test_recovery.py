"""Time limits of a restart of the record with default settings. Long, so for the soak only."""

import json
import sys

import pytest

from benchmarks.index import recovery


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_recovery_stays_within_its_limits(capsys: pytest.CaptureFixture[str]) -> None:
    found = recovery.measure()
    with capsys.disabled():
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    assert not found["misses"]
