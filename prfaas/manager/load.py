"""Requests that were routed but that no report of an engine's load can include yet, so that a burst spreads."""

from __future__ import annotations

from collections import deque

from prfaas.types import InstanceId

REPORT_SECONDS = 2.0  # agents report loads each second; after two they have seen what we assigned


class AssignedLoad:
    """Assignments of the last `REPORT_SECONDS`, per instance. Times are seconds on a clock that only goes forward."""

    def __init__(self) -> None:
        self._times: dict[InstanceId, deque[float]] = {}

    def add(self, instance: InstanceId, *, now: float) -> None:
        self._times.setdefault(instance, deque()).append(now)

    def of(self, instance: InstanceId, *, now: float) -> int:
        """How many requests were assigned that the reported load may not include."""
        times = self._times.get(instance)
        if not times:
            return 0
        while times and times[0] <= now - REPORT_SECONDS:
            times.popleft()
        return len(times)
