"""Profiles survive the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.colocate import profile
from prfaas.colocate.profile import ColocationProfile, Interference, PrefillTime
from prfaas.errors import ConfigError
from prfaas.scheduler.colocation import DecodeProfile

PROFILE = ColocationProfile(
    device="a device",
    model="tiny",
    dtype="float32",
    date="2026-01-02",
    method="by hand",
    context_tokens=100,
    decode=DecodeProfile((0.25, 0.5), (1, 8), ((0.02, 0.01), (0.04, 0.03)), (0.03, 0.05)),
    prefill=(PrefillTime(1024, 1.0, 0.5),),
    interference=(Interference(8, 128, 2048, 1.09),),
)


def test_a_written_profile_reads_back_equal(tmp_path: Path) -> None:
    profile.write(PROFILE, tmp_path / "p.yaml")
    assert profile.read(tmp_path / "p.yaml") == PROFILE


@pytest.mark.parametrize("text", ["", "decode: 3", "{", "device: x\nunknown: 1"])
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.yaml: not a colocation profile"):
        profile.read(path)
