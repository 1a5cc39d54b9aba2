"""Errors of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from prfaas.cli.colocate import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--shape", "huge"], "shape: 'huge': not one of the accepted words; write one of"),
        (["profile"], "profile: the file to write"),
        ([], "usage: prfaas-colocate"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_said(arguments: list[str], message: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "prfaas.cli.colocate", *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ran.returncode == 2 and message in ran.stderr


@pytest.fixture
def _one_core() -> Iterator[None]:
    """All that this thread may run on; torch has counted the cores before."""
    cores = os.sched_getaffinity(0)
    torch.get_num_threads()
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.usefixtures("_one_core")
def test_a_profile_that_ends_early_leaves_what_was_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (old := tmp_path / "old.yaml").write_text("name: old")
    for name in ("old.yaml", "new.yaml"):
        flags = ["--shape", "tiny", "--partition", "affinity", "--profile", str(tmp_path / name)]
        assert main(["profile", *flags]) == 2
        assert "one core cannot be shared" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [old]
    assert old.read_text() == "name: old"
