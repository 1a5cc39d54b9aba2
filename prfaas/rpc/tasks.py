"""Background tasks: none ends unseen, and all end for certain when they are to.

Libraries now and then swallow a cancellation that meets the end of a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any

from prometheus_client import Counter

from prfaas import logs

_RETRY_SECONDS = 0.25
_log = logs.get("tasks")


def lasting(work: Coroutine[Any, Any, None], *, name: str, ended: Counter) -> asyncio.Task[None]:
    """A task that is to run until it is cancelled; that it ends otherwise is logged, and counted under `name`."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(partial(_note_end, ended=ended))
    return task


def _note_end(task: asyncio.Task[None], ended: Counter) -> None:
    if task.cancelled():
        return
    ended.labels(task=task.get_name()).inc()
    try:
        task.result()
    except Exception:
        _log.exception("task.ended", task=task.get_name())
    else:
        _log.error("task.ended", task=task.get_name())


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
