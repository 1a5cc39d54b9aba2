"""A profile is measured with a real prefill process beside, and the resource manager can use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.colocate.config import ColocateConfig
from prfaas.colocate.profile import measure as file
from prfaas.colocate.profile.measure import Plan, measure
from prfaas.scheduler.colocation import StepLoad, target_partition
from prfaas.solve.files.profile_file import read_colocation

PLAN = Plan(batches=(1, 4), shares=(0.5,), context_tokens=40, num_prefill_tokens=256, append_tokens=32, steps=4)


@pytest.mark.timeout(240)
def test_a_measured_profile_names_every_share_and_both_kinds_of_prefill(tmp_path: Path) -> None:
    measured = measure(ColocateConfig(shape="tiny", partition="affinity", num_threads=1), PLAN)
    file.write(measured, tmp_path / "tiny.yaml")
    item = read_colocation(tmp_path / "tiny.yaml")
    assert item.decode.shares == (0.5,) and item.decode.batches == (1, 4)
    assert [(time.share, time.num_tokens) for time in item.prefill] == [(0.5, 256), (1.0, 256)]
    assert [time.num_tokens for time in measured.prefill] == [64, 128, 256]
    assert {(item.num_new_tokens, item.num_cached_tokens) for item in item.interference} == {(256, 0), (32, 256)}
    assert target_partition(StepLoad(4, True), item.decode, 1e9)[1] == "overallocated"
