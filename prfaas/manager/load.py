"""Requests that were routed but that no report of an engine's load can include yet, so that a burst spreads."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping

from prfaas.types import InstanceId

REPORT_SECONDS = 2.0  # agents report loads each second; after two they have seen what we assigned


class AssignedLoad:
    """Assignments of the last `REPORT_SECONDS`, by request. Times are seconds on a clock that only goes forward."""

    def __init__(self) -> None:
        self._assigned: OrderedDict[bytes, tuple[float, tuple[InstanceId, ...]]] = OrderedDict()  # oldest first
        self._counts: Counter[InstanceId] = Counter()

    def assign(self, request: bytes, instances: Iterable[InstanceId], *, now: float) -> None:
        """A request runs on these instances; asked again, it runs there instead of where it was assigned before."""
        self._withdraw(request)
        self._assigned[request] = (now, tuple(instances))
        self._counts.update(self._assigned[request][1])

    def counts(self, *, now: float) -> Mapping[InstanceId, int]:
        """How many requests were assigned that the reported load may not include; valid until the next assignment."""
        while self._assigned and next(iter(self._assigned.values()))[0] <= now - REPORT_SECONDS:
            self._withdraw(next(iter(self._assigned)))
        return self._counts

    def _withdraw(self, request: bytes) -> None:
        _, instances = self._assigned.pop(request, (0.0, ()))
        for instance in instances:
            self._counts[instance] -= 1
            if not self._counts[instance]:
                del self._counts[instance]
