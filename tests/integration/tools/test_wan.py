"""Shutdown of `python -m tools.wan` with its far command and its link."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import wait_until
from tools.reference_tables import ROOT
from tools.wan import obstacle

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(obstacle() is not None, reason=f"an emulated link {obstacle()}"),
]
WAN = (sys.executable, "-m", "tools.wan", "--far")


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def namespaces(process: subprocess.Popen[str]) -> bool:
    return f"prfaas-{process.pid}-" in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout


@pytest.mark.parametrize("is_signalled", [False, True])
def test_far_command_and_link_end_with_the_near_command_or_a_signal(tmp_path: Path, is_signalled: bool) -> None:
    pid = tmp_path / "pid"
    far = f"sleep 1000 & echo $! > {pid}.new; mv {pid}.new {pid}; wait"
    near = f"until test -e {pid}; do sleep 0.1; done; {'exec sleep 1000' if is_signalled else 'true'}"
    process = subprocess.Popen([*WAN, far, "metro", "sh", "-c", near], cwd=ROOT, text=True)
    try:
        wait_until(pid.exists)
        if is_signalled:
            process.terminate()
        process.wait(90)
    finally:
        process.kill()
    assert process.returncode == (143 if is_signalled else 0)
    wait_until(lambda: not runs(int(pid.read_text())))
    assert not namespaces(process)
