"""The demo as a user runs it: right rows, and nothing is left however it ends."""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.marked_processes import marked_processes
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
MARK = "PRFAAS_DEMO_TEST_MARK"


@dataclass(frozen=True)
class Surroundings:
    """Directory of a demo, and a mark that all its processes carry."""

    directory: Path
    mark: str
    shared_memory: frozenset[str]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = os.environ | {"TMPDIR": str(self.directory), MARK: self.mark}
        command = [sys.executable, "-m", "tools.demo", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        )

    def engines(self) -> list[int]:
        """Return the process ids of vLLM's servers."""
        found = marked_processes(f"{MARK}={self.mark}")
        return [pid for pid, command in found.items() if "vllm.entrypoints" in command]

    def assert_nothing_left(self) -> None:
        wait_until(lambda: not marked_processes(f"{MARK}={self.mark}"), what="the end of its processes")
        assert list(self.directory.iterdir()) == []
        wait_until(
            lambda: frozenset(os.listdir("/dev/shm")) - self.shared_memory <= _mapped(), what="its shared memory"
        )


def _mapped() -> set[str]:
    """Return the shared memory that living processes map, such as that of concurrent tests."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # The process may have ended.
            found |= set(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
    return found


@pytest.fixture
def surroundings() -> Iterator[Surroundings]:
    with tempfile.TemporaryDirectory(prefix="d-") as directory:  # Short, since it holds Unix sockets.
        yield Surroundings(Path(directory), secrets.token_hex(8), frozenset(os.listdir("/dev/shm")))


def test_every_row_is_right_even_with_a_flipped_byte(surroundings: Surroundings) -> None:
    demo = surroundings.start("--corrupt")
    table, progress = demo.communicate(timeout=800)
    assert demo.returncode == 0, table + progress
    rows = [line for line in table.splitlines() if line.endswith("equal")]
    assert len(rows) == 10, table
    assert "recomputed: checksum" in rows[-1]
    assert "Paris" in table or "cannot be downloaded" in progress, table
    surroundings.assert_nothing_left()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("number", "status", "message"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGKILL, 1, "ended with status -9")],
    ids=["the demo is interrupted", "an engine dies"],
)
def test_an_early_end_leaves_nothing(
    surroundings: Surroundings, number: signal.Signals, status: int, message: str
) -> None:
    demo = surroundings.start()
    wait_until(surroundings.engines, seconds=150)
    os.kill(demo.pid if number == signal.SIGINT else surroundings.engines()[0], number)
    _, progress = demo.communicate(timeout=150)
    assert demo.returncode == status and message in progress, progress
    surroundings.assert_nothing_left()
