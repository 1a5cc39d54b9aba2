"""What the command says of a wrong command line."""

from __future__ import annotations

import subprocess
import sys

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
