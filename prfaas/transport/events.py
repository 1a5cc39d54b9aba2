"""Events of several threads, told one at a time in the order in which they were put, under none of their locks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class EventQueue(Generic[T]):
    """A queue whose `tell` hands every event to `on_event` exactly once."""

    def __init__(self, on_event: Callable[[T], None]) -> None:
        self._on_event = on_event
        self._events: deque[T] = deque()
        self._telling = threading.Lock()

    def put(self, event: T) -> None:
        """Queue an event; call with the lock held that orders it, and `tell` after that lock is released."""
        self._events.append(event)

    def tell(self) -> None:
        """Tell what is queued, unless another thread is at it, which then tells this too."""
        while self._events and self._telling.acquire(blocking=False):
            try:
                while self._events:
                    self._on_event(self._events.popleft())
            finally:
                self._telling.release()


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
