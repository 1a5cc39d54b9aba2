"""Looks after something every now and then, for as long as it is open."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FAILED_SECONDS = 1.0  # after a look that failed, so that what fails each time does not fill the log


def watch(
    look: Callable[[float], None],
    *,
    is_closed: threading.Event,
    pause_seconds: Callable[[], float],
    log_failure: Callable[[], None],
) -> None:
    """Call `look(now)`, in monotonic seconds, until `is_closed`; `log_failure` is called where it has raised something."""
    while not is_closed.wait(pause_seconds()):
        try:
            look(time.monotonic())
        except Exception:  # the next look may do better than no deadline at all
            log_failure()
            is_closed.wait(FAILED_SECONDS)
