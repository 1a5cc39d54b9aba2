"""Periodic checks, and the pause after a failed check."""

import sys
import threading

from prfaas.transport.events import FAILED_SECONDS, check_repeatedly


class _Pauses(threading.Event):
    """Event whose waits take no time. The last of `count` waits sets it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.seconds: list[float | None] = []
        self._count = count

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        if len(self.seconds) == self._count:
            self.set()
        return self.is_set()


def test_failed_check_is_logged_and_followed_by_a_longer_pause() -> None:
    pauses, checks, logged = _Pauses(5), list[float](), list[object]()
    seconds = iter([0.1, 0.2, 0.3, 0.4])

    def check(now: float) -> None:
        checks.append(now)
        if len(checks) == 2:
            raise RuntimeError("a bug")

    check_repeatedly(
        check,
        is_closed=pauses,
        pause_seconds=lambda: next(seconds),
        log_failure=lambda: logged.append(sys.exc_info()[0]),
    )
    assert pauses.seconds == [0.1, 0.2, FAILED_SECONDS, 0.3, 0.4]
    assert len(checks) == 3 and checks == sorted(checks)
    assert logged == [RuntimeError]
