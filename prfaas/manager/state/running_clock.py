"""Clock that stands still while its process does."""

from collections.abc import Callable

_LONGEST_STEP_SECONDS = 1.0


class RunningClock:
    """Monotonic seconds during which this process ran.

    A process that was stopped, or whose event loop was blocked, has not read what arrived meanwhile. So that time says
    nothing about who was silent. The clock is read several times a second; a longer step is a pause and does not count.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._read_at = clock()
        self._paused_seconds = 0.0

    def __call__(self) -> float:
        now = self._clock()
        if now - self._read_at > _LONGEST_STEP_SECONDS:
            self._paused_seconds += now - self._read_at
        self._read_at = now
        return now - self._paused_seconds
