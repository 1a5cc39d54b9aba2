"""Delivery of events from several threads, and periodic checks on a thread of their own."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
FAILED_SECONDS = 1.0  # Pause after a failed check, so that a permanent failure does not fill the log.


class EventQueue(Generic[T]):
    """Queue that hands every event to `on_event` exactly once, in order, and to one thread at a time."""

    def __init__(self, on_event: Callable[[T], None]) -> None:
        self._on_event = on_event
        self._events: deque[T] = deque()
        self._delivering = threading.Lock()

    def put(self, event: T) -> None:
        """Queue an event. Call it under the lock that orders the events, and `deliver` after its release."""
        self._events.append(event)

    def deliver(self) -> None:
        """Deliver the queued events, unless another thread is delivering, which then delivers these too."""
        while self._events and self._delivering.acquire(blocking=False):
            try:
                while self._events:
                    self._on_event(self._events.popleft())
            finally:
                self._delivering.release()


def check_repeatedly(
    check: Callable[[float], None],
    *,
    is_closed: threading.Event,
    pause_seconds: Callable[[], float],
    log_failure: Callable[[], None],
) -> None:
    """Call `check(now)` with monotonic seconds until `is_closed` is set.

    An exception is logged and does not end the loop: without checks no deadline would hold.
    """
    while not is_closed.wait(pause_seconds()):
        try:
            check(time.monotonic())
        except Exception:
            log_failure()
            is_closed.wait(FAILED_SECONDS)
