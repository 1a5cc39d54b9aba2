"""Runs a server until SIGTERM or SIGINT, on uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop


def serve(server: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Run `server()`; a signal cancels it, and its own clean-up decides how it ends."""
    uvloop.run(_until_signalled(server))


async def _until_signalled(server: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    gc.freeze()  # to look through all that was loaded at each full collection would hold up everything for tens of ms
    serving = asyncio.ensure_future(server())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving
