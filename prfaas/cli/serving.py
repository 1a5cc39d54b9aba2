"""Server runner: uvloop until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop


def serve(server: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Run `server()` until a signal cancels it. The server cleans up by itself."""
    uvloop.run(_until_signalled(server))


async def _until_signalled(server: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    # Without this, each full collection scans all loaded modules and stops the loop for tens of milliseconds.
    gc.freeze()
    serving = asyncio.ensure_future(server())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving
