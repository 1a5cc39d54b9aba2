"""The command as people start and stop it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.free_ports import free_address
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def served() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    address = free_address()
    command = [sys.executable, "-m", "prfaas.cli.colocate", "serve", "--shape", "tiny", "--num-threads", "1"]
    process = subprocess.Popen([*command, "--listen", address], stderr=subprocess.DEVNULL)
    try:
        yield process, address
    finally:
        process.kill()
        process.wait()


def status(address: str) -> dict[str, dict[str, int]] | None:
    try:
        with urllib.request.urlopen(f"http://{address}/status", timeout=5) as response:
            return json.load(response)  # type: ignore[no-any-return]
    except OSError:
        return None


def sides(address: str) -> list[int]:
    wait_until(lambda: status(address), seconds=60, what="the server's status")
    found = status(address)
    assert found is not None
    return list(found["pids"].values())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_both_sides_go_with_the_server_however_it_ends(
    served: tuple[subprocess.Popen[bytes], str], number: signal.Signals
) -> None:
    process, address = served
    pids = sides(address)
    assert len(pids) == 2 and all(map(is_running, pids))
    os.kill(process.pid, number)
    code = process.wait(timeout=30)
    assert code == (0 if number == signal.SIGTERM else -number)
    # A side that still imports torch, which takes a busy machine tens of seconds, sees the hang-up after that.
    wait_until(lambda: not any(map(is_running, pids)), seconds=90, what="the end of both sides")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--shape", "huge"], "shape: 'huge' is none of tiny, small, hybrid-8b"),
        (["profile"], "profile: the file to write"),
        ([], "usage: prfaas-colocate"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_said(arguments: list[str], said: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "prfaas.cli.colocate", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 2 and said in ran.stderr
