"""Conversations in the durable record, so that a restarted manager, or another one, sends them back where their KV is.

Written behind the answer and read only when memory does not know a session: never waited for longer than a moment.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import msgpack

from prfaas.errors import RecordUnreachable
from prfaas.index.redis_store import RedisStore
from prfaas.manager.sessions import Session
from prfaas.types import AgentName

READ_SECONDS = 0.02
MAX_WAITING = 10_000  # sessions not yet written; the oldest is given up first
PER_WRITE = 1000  # sessions: what Redis takes within the time that a call has
_RETRY_SECONDS = 1.0


class SessionRecord:
    """Sessions on their way to and from Redis."""

    def __init__(self, store: RedisStore, *, expiry_seconds: float) -> None:
        self._store = store
        self._expiry_seconds = expiry_seconds
        self._waiting: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._wake = asyncio.Event()

    def save(self, tenant: str, name: str, session: Session) -> None:
        """Write it soon; the latest of one session wins."""
        self._waiting.pop((tenant, name), None)
        self._waiting[tenant, name] = session
        self._trim()
        self._wake.set()

    def _trim(self) -> None:
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)

    async def read(self, tenant: str, name: str) -> Session | None:
        """What was written, or None: also when Redis does not answer within `READ_SECONDS`."""
        try:
            async with asyncio.timeout(READ_SECONDS):
                data = await self._store.session(tenant, name)
        except (RecordUnreachable, TimeoutError):
            return None
        return _unpack(data) if data else None

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                batch = dict(self._waiting.popitem(last=False) for _ in range(min(PER_WRITE, len(self._waiting))))
                data = {
                    key: msgpack.packb([session.agent, session.num_prompt_tokens]) for key, session in batch.items()
                }
                try:
                    await self._store.put_sessions(data, seconds=self._expiry_seconds)
                except RecordUnreachable:
                    self._waiting = OrderedDict(batch | self._waiting)
                    self._trim()
                    await asyncio.sleep(_RETRY_SECONDS)


def _unpack(data: bytes) -> Session | None:
    fields = msgpack.unpackb(data)
    return Session(AgentName(fields[0]), fields[1]) if isinstance(fields, list) and len(fields) == 2 else None
