"""`make demo-wan` as a process: live dashboard, requested link, and complete shutdown."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.marked_processes import marked_processes
from tests.support.waiting import wait_until
from tools.demo.client import get_text
from tools.free_ports import free_address
from tools.reference_tables import ROOT
from tools.wan import obstacle

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(obstacle() is not None, reason=f"an emulated link {obstacle()}"),
    pytest.mark.timeout(240),
]
START_SECONDS = 90.0
MAKE = ("make", "demo-wan", "-o", ".venv/demo-installed", f"BIN={Path(sys.executable).parent}")


@contextmanager
def running(page: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the demo in a process group of its own, and kill what remains."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [*MAKE, f"PAGE={page}", "RTT=40ms", "RATE=400Mbps"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def namespaces() -> dict[str, int]:
    """Return the namespaces of all emulated links, with the process that created each."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    names = [line.split()[0] for line in listed.splitlines() if line.startswith("prfaas-")]
    return {name: int(name.split("-")[1]) for name in names}


def maker_of(demo: subprocess.Popen[str]) -> int | None:
    """Return the demo's process that created a namespace; None before."""
    return next((pid for pid in namespaces().values() if session_of(pid) == demo.pid), None)


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:  # The process has ended.
        return None


def is_gone(page: str, maker: int) -> bool:
    return not marked_processes(f"PAGE={page}") and maker not in namespaces().values()


def shown(page: str) -> dict[str, Any]:
    """Return the dashboard's current data; empty if the dashboard is not served."""
    try:
        with urllib.request.urlopen(f"http://{page}/dashboard/events", timeout=10) as events:
            while events.readline() != b"event: now\n":
                pass
            document: dict[str, Any] = json.loads(events.readline().removeprefix(b"data: "))
            return document
    except (OSError, ValueError):
        return {}


def round_trips(page: str) -> list[float]:
    return [link["rtt_seconds"] for link in shown(page).get("links", [])]


def has_request_over_the_link(page: str) -> bool:
    ended = [request for request in shown(page).get("requests", []) if request["ended"]]
    return any(request["route"] == "remote" and request["ended"]["outcome"] == "completed" for request in ended)


def test_demo_runs_over_the_requested_link_and_a_signal_removes_everything(tmp_path: Path) -> None:
    page = free_address()
    with running(page, tmp_path / "log") as demo:
        wait_until(lambda: "dashboard: live" in (tmp_path / "log").read_text(), seconds=START_SECONDS, what="the page")
        maker = maker_of(demo)
        assert maker is not None and [*namespaces().values()].count(maker) == 2
        assert "<title>" in get_text(f"http://{page}/")
        wait_until(lambda: has_request_over_the_link(page), seconds=START_SECONDS, what="a request over the link")
        wait_until(
            lambda: max(round_trips(page), default=0) >= 0.04, seconds=START_SECONDS, what="the link's round trip"
        )
        wait_until(lambda: shown(page)["plan"], seconds=START_SECONDS, what="a plan")
        assert demo.stdin is not None
        demo.stdin.write("rtt 130ms\n")
        demo.stdin.flush()
        wait_until(lambda: "130 ms" in (tmp_path / "log").read_text(), what="the changed link")
        wait_until(
            lambda: max(round_trips(page), default=0) >= 0.13, seconds=START_SECONDS, what="the longer round trip"
        )
        os.killpg(demo.pid, signal.SIGINT)  # As Ctrl-C does.
        demo.wait(60)
        wait_until(lambda: is_gone(page, maker), what="the shutdown")
        assert "Traceback" not in (tmp_path / "log").read_text()
