"""`make demo-wan`: a page of the near end on this machine's loopback, real traffic over the link, knobs, a clean end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prfaas.console.pages import read_json
from prfaas.errors import PageUnreachable
from tests.free_ports import free_address
from tests.waiting import wait_until
from tools.demo_wan.__main__ import turned
from tools.wan import WanShape, obstacle

SHAPE = WanShape(1e9, 0.08)


def test_a_knob_turns_one_thing() -> None:
    assert turned(SHAPE, "rtt 200ms") == WanShape(1e9, 0.2)
    assert turned(SHAPE, "rate 300Mbps") == WanShape(3e8, 0.08)
    assert turned(SHAPE, "loss 0.001") == WanShape(1e9, 0.08, 0.001)


@pytest.mark.parametrize("line", ["", "rtt", "rtt much", "rate 5", "loss 1", "loss -1", "loss x", "speed 3"])
def test_what_is_no_knob_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        turned(SHAPE, line)


def _namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"prfaas-{pid}-")]


def _links(page: str) -> list[dict[str, Any]]:
    """What east reports of its link to west, once requests have crossed it."""
    try:
        nodes = read_json(f"http://{page}/state", timeout_seconds=2.0).get("nodes", [])
    except PageUnreachable:
        return []
    return [link for node in nodes for link in node.get("links", []) if link.get("capacity_bytes_per_second")]


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_traffic_crosses_the_link_and_shows_on_this_machine(tmp_path: Path) -> None:
    if reason := obstacle():
        pytest.skip(f"an emulated link {reason}")
    page = free_address()
    command = [sys.executable, "-m", "tools.demo_wan", "--page", page, "--rtt", "60ms", "--rate", "200Mbps"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        ) as demo,
    ):
        try:
            wait_until(lambda: _links(page), seconds=120.0, what="traffic over the link")
            assert demo.stdin is not None
            assert _links(page)[0]["min_rtt_seconds"] >= 0.06
            demo.stdin.write("rate 100Mbps\nquit\n")
            demo.stdin.flush()
            assert demo.wait(60) == 0
        finally:
            demo.terminate()
    assert "100 Mbit/s, 60 ms" in (tmp_path / "log").read_text()
    assert _namespaces(demo.pid) == []
