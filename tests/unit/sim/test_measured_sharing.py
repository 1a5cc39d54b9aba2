"""Measured profiles of shared devices in the twin and the planner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.colocate import profile_writer as measure
from prfaas.colocate.profile_writer import Measured, PrefillTime, StepTime
from prfaas.errors import ConfigError
from prfaas.model.cost.colocation import Colocation, SharedPrefill, ShareTable
from prfaas.scheduler.colocation import OVERALLOCATED, Partition
from prfaas.sim.model.sharing import SharingSpeeds, read_sharing
from prfaas.sim.run import prepare, simulate
from prfaas.sim.scenario import Scenario

# Alone: 10 ms a step, 1 s a prompt of 1,000 tokens.
SHARED = Colocation(
    "affinity",
    100,
    decode=ShareTable((0.25, 0.5, 0.75), (1, 8), ((0.02, 0.0125, 0.01), (0.02, 0.0125, 0.01)), (0.016, 0.016)),
    prefill=tuple(
        SharedPrefill(1000, share, seconds) for share, seconds in ((0.75, 1.25), (0.5, 2.0), (0.25, 4.0), (1.0, 1.25))
    ),
    interference=(),
)
MEASURED = Measured(
    hardware="a device",
    model="tiny",
    source="by hand",
    prefill=(PrefillTime(500, 0.5), PrefillTime(1000, 1.0), PrefillTime(2000, 2.0)),
    decode=(StepTime(1, 100, 0.01), StepTime(8, 100, 0.01)),
    colocation=SHARED,
)


def read(measured: Measured, folder: Path) -> SharingSpeeds:
    measure.write(measured, folder / "p.yaml")
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
        SharedPrefill(tokens, share, tokens / 1000 / speed)
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
    worse = replace(SHARED, decode=replace(SHARED.decode, overallocated_seconds=(0.1, 0.1)))
    assert read(replace(MEASURED, colocation=worse), tmp_path).overlap == pytest.approx(0.8 + 0.5 - 1.0)


def test_solver_and_twin_take_a_measured_profile(tmp_path: Path) -> None:
    measure.write(MEASURED, tmp_path / "p.yaml")
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
