"""Waits for a fact with a deadline, in place of a sleep.

The deadline costs nothing where the fact comes, so it is one that the slowest machine keeps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

POLL_SECONDS = 0.01
PATIENCE_SECONDS = 60.0


def wait_until(
    fact: Callable[[], object], *, seconds: float = PATIENCE_SECONDS, what: str = "the awaited fact"
) -> None:
    """Return as soon as `fact()` is true; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(POLL_SECONDS)


async def until(
    fact: Callable[[], object], *, seconds: float = PATIENCE_SECONDS, what: str = "the awaited fact"
) -> None:
    """The same without blocking the event loop."""
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        await asyncio.sleep(POLL_SECONDS)
