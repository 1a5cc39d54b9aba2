"""A station of k equal servers with one queue, first come first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from prfaas.sim.kernel.meter import Meter
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.request import Request

Started = Callable[[Request, float], None]
Ended = Callable[[Request], None]


class Pool:
    """Serves each request for as long as `enter` says, and calls `on_start(request, seconds)` and `on_end(request)`.

    `busy` are the servers' seconds given so far, `area` the time integral of the number of requests here.
    """

    def __init__(self, timeline: Timeline, num_servers: int, *, on_start: Started, on_end: Ended) -> None:
        self.num_servers = num_servers
        self.busy = Meter()  # the servers' seconds
        self.num_served = 0
        self.area = 0.0
        self._timeline = timeline
        self._idle = num_servers
        self._waiting: deque[tuple[Request, float]] = deque()
        self._present = 0
        self._changed_at = 0.0
        self._on_start, self._on_end = on_start, on_end

    @property
    def busy_seconds(self) -> float:
        return self.busy.total

    def enter(self, request: Request, seconds: float) -> None:
        """Serve `request` for `seconds` as soon as a server is free."""
        self._count(1)
        if self._idle:
            self._idle -= 1
            self._serve(request, seconds)
        else:
            self._waiting.append((request, seconds))

    def _serve(self, request: Request, seconds: float) -> None:
        end = self._timeline.now + seconds
        self.busy.add(self._timeline.now, end, seconds)
        self._timeline.at(end, self._leave, request)
        self._on_start(request, seconds)

    def _leave(self, request: Request) -> None:
        self._count(-1)
        self.num_served += 1
        if self._waiting:
            self._serve(*self._waiting.popleft())
        else:
            self._idle += 1
        self._on_end(request)

    def _count(self, change: int) -> None:
        now = self._timeline.now
        self.area += self._present * (now - self._changed_at)
        self._present += change
        self._changed_at = now
