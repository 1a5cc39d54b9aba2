"""Settings of the partition manager, from a measured profile."""

import math
from pathlib import Path

import pytest

from prfaas.colocate import settings
from prfaas.colocate.partition import PartitionSettings
from prfaas.config import show
from prfaas.solve.files.profile_file import (
    ColocationPart,
    DecodeOnShare,
    DecodePart,
    DecodePoint,
    PrefillOnShare,
    ProfileFile,
)


def _profile(directory: Path, *, together: float = 2.0, alone: float | None = None) -> Path:
    """Write a profile in which prefill takes a second on half of the cores, and decode steps 10 ms."""
    steps = {0.5: 0.01, 1.0: 0.012}
    colocation = ColocationPart(
        decode=tuple(DecodeOnShare(batch=4, share=share, step=step) for share, step in steps.items()),
        prefill=(
            PrefillOnShare(tokens=1024, share=0.5, seconds=1.0),
            PrefillOnShare(tokens=1024, share=1.0, seconds=together),
        ),
    )
    decode = DecodePart(points=(DecodePoint(batch=4, context=512, step=alone),) if alone else ())
    profile = ProfileFile(name="p", hardware="a CPU", source="by hand", decode=decode, colocation=colocation)
    (directory / "p.yaml").write_text(show(profile))
    return directory / "p.yaml"


def _read(profile: Path) -> PartitionSettings:
    return settings.read(settings.write(itl_slo_seconds=0.05, decode_share=0.0, profile=profile, agent={}))[0]


@pytest.mark.parametrize(("together", "expected"), [(0.9, 0.012), (2.0, math.inf)])
def test_over_allocation_is_used_only_where_prefill_gains(tmp_path: Path, together: float, expected: float) -> None:
    table = _read(_profile(tmp_path, together=together)).table
    assert table is not None and table.at(4) == ((0.01,), expected)


@pytest.mark.parametrize(("alone", "spreads"), [(0.006, True), (0.0098, False), (0.02, False), (None, True)])
def test_decode_alone_takes_all_cores_only_where_they_are_faster(
    tmp_path: Path, alone: float | None, spreads: bool
) -> None:
    assert _read(_profile(tmp_path, alone=alone)).decode_spreads == spreads
