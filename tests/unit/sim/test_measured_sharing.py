"""Measured profiles of shared devices in the twin and the planner."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.studies.sustained import sustained
from prfaas.config import show
from prfaas.errors import ConfigError
from prfaas.model.cost.colocation import OVERALLOCATED, Partition, SharingSpeeds
from prfaas.sim.builder import deploy
from prfaas.sim.run import prepare, simulate
from prfaas.sim.scenario import Scenario
from prfaas.sim.workload.traffic import draw_requests
from prfaas.solve.files.profile_file import (
    ColocationPart,
    DecodeOnShare,
    DecodePart,
    DecodePoint,
    PrefillOnShare,
    PrefillPart,
    PrefillPoint,
    ProfileFile,
    read_profile,
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
    speeds = read_profile(folder / "p.yaml").sharing
    assert speeds is not None
    return speeds


def test_speeds_are_linear_between_measurements(tmp_path: Path) -> None:
    speeds = read(MEASURED, tmp_path)
    assert speeds.decode_speed(Partition(0.25, 0.75), 8) == pytest.approx(0.5)
    assert speeds.decode_speed(Partition(0.375, 0.625), 8) == pytest.approx(0.65)
    assert speeds.decode_speed(Partition(0.125, 0.875), 8) == pytest.approx(0.25)
    assert speeds.decode_speed(Partition(0.9, 0.1), 8) == pytest.approx(1.0)
    assert speeds.prefill_speed(Partition(0.25, 0.75)) == pytest.approx(0.8)
    assert speeds.decode_speed(OVERALLOCATED, 8) == pytest.approx(0.625)
    assert speeds.prefill_speed(OVERALLOCATED) == pytest.approx(0.8)


def test_decode_speed_depends_on_the_batch(tmp_path: Path) -> None:
    slower = tuple(replace(point, step=2 * point.step) if point.batch == 8 else point for point in SHARED.decode)
    speeds = read(replace(MEASURED, colocation=replace(SHARED, decode=slower)), tmp_path)
    found = [speeds.decode_speed(Partition(0.5, 0.5), batch) for batch in (1, 4.5, 8, 100)]
    assert found == pytest.approx([0.8, 0.6, 0.4, 0.4])


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


def test_the_frontier_goes_through_the_partitions_that_no_mix_of_others_reaches(tmp_path: Path) -> None:
    corners = [(0.0, 1.0), (0.25, 1.0), (0.8, 0.625), (1.0, 0.0)]
    assert np.array(read(MEASURED, tmp_path).frontier.at(8)) == pytest.approx(np.array(corners))
    slow = tuple(replace(point, seconds=9.0) if point.share == 1 else point for point in SHARED.prefill)
    apart = read(replace(MEASURED, colocation=replace(SHARED, prefill=slow)), tmp_path)
    assert {speed for _, speed in apart.overallocated_decode} == {0.0}, (
        "a partition prefills faster, so instances do not over-allocate"
    )
    corners[2:3] = [(0.5, 0.8), (0.8, 0.5)]
    assert np.array(apart.frontier.at(8)) == pytest.approx(np.array(corners))


def test_solver_and_twin_take_a_measured_profile(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(show(MEASURED))
    scenario = Scenario(fidelity="instances", shared=True, requests=60, load="1.5req/s")
    measured = replace(scenario, sharing_profile=tmp_path / "p.yaml")
    assert prepare(measured).deployment.pd[0].frontier == read(MEASURED, tmp_path).frontier
    apart, shared = simulate(scenario).summary, simulate(measured).summary
    assert shared.success_ratio == 1.0
    assert shared.ttft.mean != apart.ttft.mean


def test_a_profile_without_over_allocated_prefill_is_refused_by_name(tmp_path: Path) -> None:
    lacking = replace(MEASURED, colocation=replace(SHARED, prefill=SHARED.prefill[:3]))
    with pytest.raises(ConfigError, match="no point with a share of 1"):
        read(lacking, tmp_path)


# Two cores: beside a prefill, decode on one of them is as fast as alone, and prefill takes twice as long.
HALVES = replace(
    MEASURED,
    decode=DecodePart(points=tuple(DecodePoint(batch=batch, step=0.026 + 0.003 * batch) for batch in (1, 24))),
    colocation=ColocationPart(
        decode=tuple(
            DecodeOnShare(batch=batch, share=share, step=slower * (0.026 + 0.003 * batch))
            for batch in (1, 8, 24)
            for share, slower in ((0.5, 1.0), (1.0, 3.0))
        ),
        prefill=tuple(
            PrefillOnShare(tokens=1000, share=share, seconds=slow) for share, slow in ((0.5, 2.0), (1.0, 6.0))
        ),
    ),
)


@pytest.mark.parametrize("output_tokens", [4, 16, 64, 128, 300, 800])
def test_the_plan_of_a_shared_instance_predicts_what_the_saturated_twin_serves(
    tmp_path: Path, output_tokens: int
) -> None:
    (tmp_path / "p.yaml").write_text(show(HALVES))
    (tmp_path / "d.yaml").write_text(
        "model: Qwen3-8B\npd: [{name: pd, profile: p.yaml, instances: 1, shared_instances: 1}]\nslo: {decode: 10tok/s}\n"
    )
    trace = f"lognormal:mu=6.9,sigma=0.2,min=500,max=2000,output={output_tokens}"
    scenario = Scenario(deployment=str(tmp_path / "d.yaml"), trace=trace, fidelity="instances", shared=True)
    setup = prepare(scenario)
    twin = deploy(setup.deployment, setup.workload, setup.plan, scenario)
    twin.run(draw_requests(setup.workload, "poisson", count=300, rate=1.5 * setup.capacity, seed=1))
    assert sustained(twin.requests) == pytest.approx(setup.plan.system_throughput, rel=0.1)
