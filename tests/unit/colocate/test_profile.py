"""Measured profiles are what solver and partition manager read."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.colocate import profile_writer as profile
from prfaas.model.cost.colocation import Colocation, InterferenceRatio, SharedPrefill, ShareTable
from prfaas.solve.files.profile_file import read_colocation, read_profile

COLOCATION = Colocation(
    "affinity",
    100,
    decode=ShareTable((0.25, 0.5), (1, 8), ((0.02, 0.01), (0.04, 0.00003)), (0.03, 0.05)),
    prefill=(SharedPrefill(1024, 0.75, 0.5),),
    interference=(InterferenceRatio(8, 1024, 0, 1.57), InterferenceRatio(8, 128, 2048, 1.09)),
)
MEASURED = profile.Measured(
    hardware="a device",
    model="tiny",
    source="by hand",
    prefill=tuple(profile.PrefillTime(number, seconds) for number, seconds in ((256, 0.1), (512, 0.22), (1024, 0.5))),
    decode=(profile.StepTime(1, 100, 0.01), profile.StepTime(8, 100, 0.017)),
    colocation=COLOCATION,
)


def test_a_written_profile_reads_back_equal(tmp_path: Path) -> None:
    profile.write(MEASURED, tmp_path / "p.yaml")
    assert read_colocation(tmp_path / "p.yaml") == COLOCATION


def test_the_solver_reads_the_same_file(tmp_path: Path) -> None:
    profile.write(MEASURED, tmp_path / "p.yaml")
    item = read_profile(tmp_path / "p.yaml")
    assert (item.name, item.hardware) == ("p", "a device")
    assert item.prefill.seconds(512) == pytest.approx(0.22, rel=0.01)
    assert item.decode is not None and item.decode.step_seconds(8, 100) == pytest.approx(0.017)
