"""Simulated time: what is to happen, in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[[Any], None]


class Timeline:
    """A heap of actions. `now` is in seconds; what is due at the same moment happens in the order in which it was asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._due: list[tuple[float, int, Action, Any]] = []
        self._asked = 0

    def at(self, seconds: float, action: Action, argument: Any) -> None:
        """Have `action(argument)` happen at this moment, which is not in the past."""
        self._asked += 1
        heapq.heappush(self._due, (seconds, self._asked, action, argument))

    def run(self) -> None:
        """Let everything happen until nothing is left to."""
        due, pop = self._due, heapq.heappop
        while due:
            self.now, _, action, argument = pop(due)
            self.num_events += 1
            action(argument)
