"""Processes that run nothing for a while, which a signal alone does not promise: it takes effect when each thread next runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.waiting import wait_until


def stop(pid: int) -> None:
    """Return once all threads of the process stand still."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _states(pid) == {"T"}, what=f"the standstill of process {pid}")


def resume(pid: int) -> None:
    """Let it run again, if it still is."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """The process runs nothing meanwhile."""
    try:
        stop(pid)
        yield
    finally:
        resume(pid)


def _states(pid: int) -> set[str]:
    """Of its threads, in the letters of proc(5); none where one has just ended."""
    try:
        stats = [(its / "stat").read_text() for its in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return set()
    return {stat.rpartition(")")[2].split()[0] for stat in stats}
