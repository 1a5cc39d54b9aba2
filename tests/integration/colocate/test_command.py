"""What the command says of a wrong command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--shape", "huge"], "shape: 'huge': none of these words; write one of"),
        (["profile"], "profile: the file to write"),
        ([], "usage: prfaas-colocate"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_said(arguments: list[str], said: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "prfaas.cli.colocate", *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ran.returncode == 2 and said in ran.stderr


ON_ONE_CORE = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from prfaas.cli.colocate import main
sys.exit(main(["profile", "--shape", "tiny", "--partition", "affinity", "--profile", sys.argv[1]]))
"""


@pytest.mark.timeout(360)
def test_a_profile_that_ends_early_leaves_what_was_there(tmp_path: Path) -> None:
    (old := tmp_path / "old.yaml").write_text("name: old")
    for name in ("old.yaml", "new.yaml"):
        command = [sys.executable, "-c", ON_ONE_CORE, str(tmp_path / name)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
        assert ran.returncode == 2 and "one core cannot be shared" in ran.stderr
    assert list(tmp_path.iterdir()) == [old]
    assert old.read_text() == "name: old"
