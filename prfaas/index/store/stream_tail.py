"""The news of several streams that lie on several Redis servers: one blocking read each, kept until it is answered.

XREAD takes many streams at once where all are on one server. In a Redis Cluster each has its own slot, so each is read
by a call of its own; a call that has brought nothing goes on waiting while the caller handles what another brought.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any


class SpreadTail:
    """XREAD over streams of different slots, with the answers of a client that knows where each slot is."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._reads: dict[str, tuple[str, asyncio.Task[Any]]] = {}  # by stream: after which id, and the call

    async def xread(self, streams: Mapping[str, str], *, count: int, block: int) -> list[Any]:
        """As the command: [stream, entries] of those with entries after their id; [] when none came in `block`
        milliseconds. Raises what a call raised."""
        for key in self._reads.keys() - streams.keys():
            self._reads.pop(key)[1].cancel()
        for key, position in streams.items():
            self._ask(key, position, count=count, block=block)
        calls = [call for _, call in self._reads.values()]
        await asyncio.wait(calls, timeout=block / 1000, return_when=asyncio.FIRST_COMPLETED)
        answered = [key for key, (_, call) in self._reads.items() if call.done()]
        return [part for key in answered for part in self._reads.pop(key)[1].result() or ()]

    def _ask(self, key: str, position: str, *, count: int, block: int) -> None:
        after, call = self._reads.get(key, (None, None))
        if after == position:
            return
        if call is not None:
            call.cancel()
        asked = self._client.xread({key: position}, count=count, block=block)
        self._reads[key] = (position, asyncio.create_task(asked, name=f"tail of {key}"))

    async def close(self) -> None:
        """End the calls that wait."""
        calls = [call for _, call in self._reads.values()]
        self._reads.clear()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
