"""Paused processes. SIGSTOP takes effect only when each thread next runs, so `stop` waits for all threads."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.waiting import wait_until


def stop(pid: int) -> None:
    """Stop a process and wait until all of its threads are stopped."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _states(pid) == {"T"}, what=f"the stop of process {pid}")


def resume(pid: int) -> None:
    """Let a process run again, if it still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Keep a process stopped within the block."""
    try:
        stop(pid)
        yield
    finally:
        resume(pid)


def _states(pid: int) -> set[str]:
    """Return the thread states in the letters of proc(5), or nothing if a thread has just ended."""
    try:
        stats = [(thread / "stat").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return set()
    return {stat.rpartition(")")[2].split()[0] for stat in stats}
