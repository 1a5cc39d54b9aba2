"""Looks that follow one another, and the pause after one that fails."""

from __future__ import annotations

import sys
import threading

from prfaas.transport.events import FAILED_SECONDS, watch


class _Pauses(threading.Event):
    """Takes no time, and is set in the last of so many."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.seconds: list[float | None] = []
        self._count = count

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        if len(self.seconds) == self._count:
            self.set()
        return self.is_set()


def test_a_look_that_fails_is_logged_and_followed_by_another_after_a_longer_pause() -> None:
    pauses, looks, logged = _Pauses(5), list[float](), list[object]()
    own = iter([0.1, 0.2, 0.3, 0.4])

    def look(now: float) -> None:
        looks.append(now)
        if len(looks) == 2:
            raise RuntimeError("a bug of ours")

    watch(
        look,
        is_closed=pauses,
        pause_seconds=lambda: next(own),
        log_failure=lambda: logged.append(sys.exc_info()[0]),
    )
    assert pauses.seconds == [0.1, 0.2, FAILED_SECONDS, 0.3, 0.4]
    assert len(looks) == 3 and looks == sorted(looks)
    assert logged == [RuntimeError]


def test_nothing_is_looked_at_once_it_is_closed() -> None:
    closed, looks = threading.Event(), list[float]()
    closed.set()
    watch(looks.append, is_closed=closed, pause_seconds=lambda: 60.0, log_failure=lambda: None)
    assert not looks
