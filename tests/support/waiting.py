"""Waits for a condition with a deadline, instead of sleeps. The deadline suits the slowest machine."""

import asyncio
import time
from collections.abc import Callable

POLL_SECONDS = 0.01
PATIENCE_SECONDS = 60.0


def wait_until(
    fact: Callable[[], object], *, seconds: float = PATIENCE_SECONDS, what: str = "the awaited fact"
) -> None:
    """Return as soon as `fact()` is true. Raise AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(POLL_SECONDS)


async def until(
    fact: Callable[[], object], *, seconds: float = PATIENCE_SECONDS, what: str = "the awaited fact"
) -> None:
    """Wait like `wait_until` without blocking the event loop."""
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        await asyncio.sleep(POLL_SECONDS)
