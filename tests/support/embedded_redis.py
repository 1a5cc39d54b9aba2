"""The Redis that a manager has started for itself."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def kill_embedded_redis(manager_pid: int) -> None:
    """kill -9 it; nothing where it is gone already."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # another process that has just ended
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[1]) == manager_pid and "redis" in (entry.parent / "comm").read_text():
                os.kill(int(entry.parent.name), signal.SIGKILL)
                return
