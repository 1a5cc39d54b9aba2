"""Settings of the partition manager, from a measured profile."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from prfaas.colocate import settings
from prfaas.config import show
from prfaas.solve.files.profile_file import ColocationPart, DecodeOnShare, PrefillOnShare, ProfileFile


@pytest.mark.parametrize(("together", "expected"), [(0.9, 0.012), (2.0, math.inf)])
def test_over_allocation_is_used_only_where_prefill_gains(tmp_path: Path, together: float, expected: float) -> None:
    steps = {0.5: 0.01, 1.0: 0.012}
    colocation = ColocationPart(
        decode=tuple(DecodeOnShare(batch=4, share=share, step=step) for share, step in steps.items()),
        prefill=(
            PrefillOnShare(tokens=1024, share=0.5, seconds=1.0),
            PrefillOnShare(tokens=1024, share=1.0, seconds=together),
        ),
    )
    file = tmp_path / "p.yaml"
    file.write_text(show(ProfileFile(name="p", hardware="a CPU", source="by hand", colocation=colocation)))
    keys = settings.write(itl_slo_seconds=0.05, decode_share=0.0, profile=file, agent={})
    table = settings.read(keys)[0].table
    assert table is not None and table.at(4) == ((0.01,), expected)
