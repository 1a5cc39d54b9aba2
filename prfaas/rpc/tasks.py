"""Background tasks and time slices. Tasks restart after an error and end for certain when cancelled.

Libraries now and then swallow a cancellation that arrives at the end of a call.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from prometheus_client import Counter

from prfaas import logs

_RETRY_SECONDS = 0.25
_PAUSE_SECONDS = 1.0  # Work that fails at once must not use a whole core.
_log = logs.get("tasks")


def restarting_task(work: Callable[[], Coroutine[Any, Any, None]], *, name: str, ended: Counter) -> asyncio.Task[None]:
    """Return a task that repeats its work until cancelled.

    Each end is logged, counted under `name`, and followed by a pause.
    """

    async def repeat() -> None:
        while True:
            try:
                await work()
                _log.error("task.ended", task=name)
            except Exception:
                _log.exception("task.ended", task=name)
            ended.labels(task=name).inc()
            await asyncio.sleep(_PAUSE_SECONDS)

    return asyncio.create_task(repeat(), name=name)


async def cancel_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, repeatedly if necessary, and return once all have ended. Their errors are ignored."""
    running = {task for task in tasks if not task.done()}
    while running:
        for task in running:
            task.cancel()
        ended, running = await asyncio.wait(running, timeout=_RETRY_SECONDS)
        for task in ended:
            if not task.cancelled():
                task.exception()  # Retrieved, so that asyncio does not report it.


SLICE_SECONDS = 0.002  # Longest delay of a query by one piece of work in progress.


class TimeSlice:
    """Divides long work on the event loop into slices of bounded time, so that other tasks run in between."""

    def __init__(self) -> None:
        self._ends = time.perf_counter() + SLICE_SECONDS

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self._ends

    async def give_way(self) -> None:
        """Let other tasks run, and begin the next slice."""
        await asyncio.sleep(0)
        self._ends = time.perf_counter() + SLICE_SECONDS

    async def yield_if_over(self) -> None:
        """Let other tasks run if this slice is over."""
        if self.is_over:
            await self.give_way()
