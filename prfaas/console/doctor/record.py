"""Check of the Redis that a manager uses as its record."""

from __future__ import annotations

import asyncio

from prfaas.console.doctor.finding import Finding, bad, good, warning
from prfaas.errors import ConfigError, PrfaasError
from prfaas.index.store.redis_store import RedisStore
from prfaas.manager.config import ManagerConfig


def record_finding(manager: ManagerConfig, *, timeout_seconds: float) -> Finding:
    """Check that Redis answers and is usable. Write nothing."""
    if not manager.redis_url:
        return _embedded(manager)
    try:
        asyncio.run(_check(manager.redis_url, timeout_seconds))
    except ConfigError as error:
        remedy = "name another Redis in redis_url, or configure this one; docs: Which Redis"
        message = str(error).removeprefix("redis_url: ")
        return bad("record", "manager", f"redis_url: {message}", remedy=remedy)
    except PrfaasError as error:
        remedy = "start it, or correct redis_url; redis-cli -u URL ping"
        return bad("record", "manager", f"redis_url: {error}", remedy=remedy)
    return good("record", "manager", "the Redis at redis_url answers")


def _embedded(manager: ManagerConfig) -> Finding:
    if manager.redis_directory is None:
        remedy = "write redis_directory: /var/lib/prfaas/redis, or a redis_url"
        return warning("record", "manager", "index, plan and roles are lost when this manager ends", remedy=remedy)
    return good("record", "manager", f"an embedded Redis stores the record in {manager.redis_directory}")


async def _check(url: str, timeout_seconds: float) -> None:
    store = RedisStore(url, timeout_seconds=timeout_seconds)
    try:
        await store.check()
    finally:
        await store.close()
