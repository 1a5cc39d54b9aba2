"""Simulated time: events in order."""

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[[Any], None]


class Timeline:
    """Heap of actions; `now` is in seconds. Actions due at the same moment run in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Action, Any]] = []
        self._added = 0
        self._num_periodic = 0

    def at(self, seconds: float, action: Action, argument: Any) -> None:
        """Plan `action(argument)` for a moment that is not in the past."""
        self._added += 1
        heapq.heappush(self._due, (seconds, self._added, action, argument))

    def every(self, seconds: float, action: Callable[[], None]) -> None:
        """Run `action()` after each `seconds`, until nothing but such actions is left."""

        def tick(_: None) -> None:
            self._num_periodic -= 1
            action()
            if len(self._due) > self._num_periodic:
                plan()

        def plan() -> None:
            self._num_periodic += 1
            self.at(self.now + seconds, tick, None)

        plan()

    def run(self) -> None:
        """Run all actions, including those that they add."""
        due, pop = self._due, heapq.heappop
        while due:
            self.now, _, action, argument = pop(due)
            action(argument)
