"""Embedded Redis of a manager process."""

import contextlib
import os
import signal
from pathlib import Path


def kill_embedded_redis(manager_pid: int) -> None:
    """Kill the Redis child of a manager, if it still runs."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # Another process may have ended meanwhile.
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[1]) == manager_pid and "redis" in (entry.parent / "comm").read_text():
                os.kill(int(entry.parent.name), signal.SIGKILL)
                return
