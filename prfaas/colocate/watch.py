"""Watch over a worker process, which may end or be stopped by a signal."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

from prfaas import logs

log = logs.get("colocate.watch")

STOPPED_SECONDS = 2.0  # A worker that is stopped for so long is killed: its requests would wait for ever.
_POLL_SECONDS = 0.25
_STOPPED = ("T", "t")  # States of a process, by a signal and by a debugger.


def await_death(process: int, descriptor: int) -> None:
    """Wait for the end of a process, and kill it if it stays stopped. Closes the descriptor, a pidfd of the process.

    The kernel's state is read instead of a heartbeat, since a worker that compiles or computes a long step is silent too.
    """
    ran_at = time.monotonic()
    while not select.select([descriptor], [], [], _POLL_SECONDS)[0]:
        now = time.monotonic()
        if not _is_stopped(process):
            ran_at = now
        elif now - ran_at > STOPPED_SECONDS:
            log.warning("decode_worker.stopped", process=process)
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            break
    os.close(descriptor)


def _is_stopped(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:  # It has ended.
        return False
    return status.rpartition(")")[2].split()[0] in _STOPPED
