"""Watch over a worker process, which may end or be stopped by a signal."""

import os
import select
import signal
import time

from prfaas import logs
from prfaas.connector.vllm.health import is_stopped

log = logs.get("colocate.watch")

STOPPED_SECONDS = 2.0  # A worker that is stopped for so long is killed: its requests would wait for ever.
_POLL_SECONDS = 0.25


def await_death(process: int, descriptor: int) -> None:
    """Wait for the end of a process, and kill it if it stays stopped. Closes the descriptor, a pidfd of the process.

    The kernel's state is read instead of a heartbeat, since a worker that compiles or computes a long step is silent too.
    """
    ran_at = time.monotonic()
    while not select.select([descriptor], [], [], _POLL_SECONDS)[0]:
        now = time.monotonic()
        if not is_stopped(process):
            ran_at = now
        elif now - ran_at > STOPPED_SECONDS:
            log.warning("decode_worker.stopped", process=process)
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            break
    os.close(descriptor)
