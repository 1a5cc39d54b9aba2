"""Measured profiles of shared devices in the twin and the planner."""

from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.config import show
from prfaas.errors import ConfigError
from prfaas.scheduler.colocation import OVERALLOCATED, Partition
from prfaas.sim.model.sharing import SharingSpeeds, read_sharing
from prfaas.sim.run import prepare, simulate
from prfaas.sim.scenario import Scenario
from prfaas.solve.files.profile_file import (
    ColocationPart,
    DecodeOnShare,
    DecodePart,
    DecodePoint,
    PrefillOnShare,
    PrefillPart,
    PrefillPoint,
    ProfileFile,
)

# Alone: 10 ms a step, 1 s a prompt of 1,000 tokens.
STEPS = {0.25: 0.02, 0.5: 0.0125, 0.75: 0.01, 1.0: 0.016}
PROMPTS = {0.75: 1.25, 0.5: 2.0, 0.25: 4.0, 1.0: 1.25}
SHARED = ColocationPart(
    decode=tuple(
        DecodeOnShare(batch=batch, share=share, step=seconds) for batch in (1, 8) for share, seconds in STEPS.items()
    ),
    prefill=tuple(PrefillOnShare(tokens=1000, share=share, seconds=seconds) for share, seconds in PROMPTS.items()),
)
MEASURED = ProfileFile(
    name="tiny",
    hardware="a device",
    source="by hand",
    prefill=PrefillPart(
        points=tuple(PrefillPoint(tokens=number, seconds=number / 1000) for number in (500, 1000, 2000))
    ),
    decode=DecodePart(points=tuple(DecodePoint(batch=batch, context=100, step=0.01) for batch in (1, 8))),
    colocation=SHARED,
)


def read(measured: ProfileFile, folder: Path) -> SharingSpeeds:
    (folder / "p.yaml").write_text(show(measured))
    return read_sharing(folder / "p.yaml")


def test_speeds_are_linear_between_measurements(tmp_path: Path) -> None:
    speeds = read(MEASURED, tmp_path)
    assert speeds.decode_speed(Partition(0.25, 0.75)) == pytest.approx(0.5)
    assert speeds.decode_speed(Partition(0.375, 0.625)) == pytest.approx(0.65)
    assert speeds.decode_speed(Partition(0.125, 0.875)) == pytest.approx(0.25)
    assert speeds.decode_speed(Partition(0.9, 0.1)) == pytest.approx(1.0)
    assert speeds.prefill_speed(Partition(0.25, 0.75)) == pytest.approx(0.8)
    assert speeds.decode_speed(OVERALLOCATED) == pytest.approx(0.625)
    assert speeds.prefill_speed(OVERALLOCATED) == pytest.approx(0.8)


def test_median_over_prompt_lengths_is_used(tmp_path: Path) -> None:
    others = tuple(
        PrefillOnShare(tokens=tokens, share=share, seconds=tokens / 1000 / speed)
        for tokens, speed in ((500, 0.1), (2000, 0.9))
        for share in (0.75, 1.0)
    )
    for prefill in ((*SHARED.prefill, *others), (*others, *SHARED.prefill)):
        speeds = read(replace(MEASURED, colocation=replace(SHARED, prefill=prefill)), tmp_path)
        assert speeds.prefill_speed(Partition(0.25, 0.75)) == pytest.approx(0.8)
        assert speeds.prefill_speed(OVERALLOCATED) == pytest.approx(0.8)


def test_the_overlap_is_that_of_the_best_partition(tmp_path: Path) -> None:
    speeds = read(MEASURED, tmp_path)
    assert speeds.overlap == pytest.approx(0.625 + 0.8 - 1.0)
    worse = replace(
        SHARED, decode=tuple(replace(point, step=0.1) if point.share == 1 else point for point in SHARED.decode)
    )
    assert read(replace(MEASURED, colocation=worse), tmp_path).overlap == pytest.approx(0.8 + 0.5 - 1.0)


def test_solver_and_twin_take_a_measured_profile(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(show(MEASURED))
    scenario = Scenario(fidelity="instances", shared=True, requests=60, load="1.5req/s")
    measured = replace(scenario, sharing_profile=tmp_path / "p.yaml")
    assert prepare(measured).deployment.pd[0].overlap == pytest.approx(0.425)
    apart, shared = simulate(scenario).summary, simulate(measured).summary
    assert shared.success_ratio == 1.0
    assert shared.ttft.mean != apart.ttft.mean


def test_a_profile_without_over_allocated_prefill_is_refused_by_name(tmp_path: Path) -> None:
    lacking = replace(MEASURED, colocation=replace(SHARED, prefill=SHARED.prefill[:3]))
    with pytest.raises(ConfigError, match="no point with a share of 1"):
        read(lacking, tmp_path)
