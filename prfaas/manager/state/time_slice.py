"""Turns for the others of this process: long work on the event loop in slices of bounded time."""

from __future__ import annotations

import asyncio
import time

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
