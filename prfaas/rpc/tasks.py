"""Ends background tasks for certain: libraries now and then swallow a cancellation that meets the end of a call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_RETRY_SECONDS = 0.25


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, again and again where need be; returns when all have ended, whatever they raised."""
    running = {task for task in tasks if not task.done()}
    while running:
        for task in running:
            task.cancel()
        ended, running = await asyncio.wait(running, timeout=_RETRY_SECONDS)
        for task in ended:
            if not task.cancelled():
                task.exception()  # looked at, so that it is not reported as forgotten
