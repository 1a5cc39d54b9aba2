"""Background tasks: none ends unseen or for good, and all end for certain when they are to.

Libraries now and then swallow a cancellation that meets the end of a call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from prometheus_client import Counter

from prfaas import logs

_RETRY_SECONDS = 0.25
_PAUSE_SECONDS = 1.0  # so that work which fails at once takes no whole core
_log = logs.get("tasks")


def restarting_task(work: Callable[[], Coroutine[Any, Any, None]], *, name: str, ended: Counter) -> asyncio.Task[None]:
    """A task that does its work until it is cancelled; each end of it is logged and counted under `name`, and after a pause
    it begins anew."""
    return asyncio.create_task(_again(work, name, ended), name=name)


async def _again(work: Callable[[], Coroutine[Any, Any, None]], name: str, ended: Counter) -> None:
    while True:
        try:
            await work()
            _log.error("task.ended", task=name)
        except Exception:  # ours, whatever it is
            _log.exception("task.ended", task=name)
        ended.labels(task=name).inc()
        await asyncio.sleep(_PAUSE_SECONDS)


async def cancel_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, again and again where need be; returns when all have ended, whatever they raised."""
    running = {task for task in tasks if not task.done()}
    while running:
        for task in running:
            task.cancel()
        ended, running = await asyncio.wait(running, timeout=_RETRY_SECONDS)
        for task in ended:
            if not task.cancelled():
                task.exception()  # looked at, so that it is not reported as forgotten


SLICE_SECONDS = 0.002  # what a question that comes meanwhile waits at most for each piece of work under way


class TimeSlice:
    """Belongs to one piece of work, which asks after each step whether its slice is over."""

    def __init__(self) -> None:
        self._ends = time.perf_counter() + SLICE_SECONDS

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self._ends

    async def give(self) -> None:
        """Let others go on, and begin the next slice."""
        await asyncio.sleep(0)
        self._ends = time.perf_counter() + SLICE_SECONDS

    async def give_when_over(self) -> None:
        """Let others go on if this slice is over."""
        if self.is_over:
            await self.give()
