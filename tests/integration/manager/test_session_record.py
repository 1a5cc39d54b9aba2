"""Sessions on their way to a Redis that does not answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prfaas.index.store.redis_store import RedisStore
from prfaas.manager.state.sessions import MAX_WAITING, PER_WRITE, Session, SessionRecord
from prfaas.rpc.tasks import cancel_tasks
from prfaas.types import AgentName
from tests.support.waiting import PATIENCE_SECONDS


async def test_sessions_waiting_for_redis_are_bounded(tmp_path: Path) -> None:
    asked: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    path = str(tmp_path / "redis.sock")
    server = await asyncio.start_unix_server(lambda _, writer: asked.put_nowait(writer), path)
    store = RedisStore(f"unix://{path}", timeout_seconds=60.0)
    record = SessionRecord(store, expiry_seconds=60.0)
    for number in range(MAX_WAITING):
        record.save("", f"before-{number}", Session(AgentName("n1"), 16))
    writing = asyncio.create_task(record.run())
    first = await asyncio.wait_for(asked.get(), PATIENCE_SECONDS)
    for number in range(MAX_WAITING):
        record.save("", f"after-{number}", Session(AgentName("n1"), 16))
    first.close()
    second = await asyncio.wait_for(asked.get(), PATIENCE_SECONDS)
    assert len(record._waiting) == MAX_WAITING - PER_WRITE
    assert all(name.startswith("after-") for _, name in record._waiting)
    second.close()
    await cancel_tasks((writing,))
    await store.close()
    server.close()
