"""The record in Redis: leases, streams, snapshots and values that expire. Every Redis key is made here.

docs/redis-keys.md describes the values.
"""

import importlib.resources
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import redis.asyncio as redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from prfaas.errors import ConfigError, FencedError, RecordUnreachable
from prfaas.types import ClusterName
from prfaas.units import split_address


@dataclass(frozen=True)
class Keys:
    """Keys of one deployment; `namespace` separates it from others on the same Redis."""

    namespace: str = "prfaas"

    def clusters(self) -> str:
        """Set of the names of all clusters that ever registered a node."""
        return f"{self.namespace}:clusters"

    def lease(self, cluster: ClusterName) -> str:
        """Hash with the owner and epoch of the cluster's writer; expires."""
        return self._of(cluster, "lease")

    def epoch(self, cluster: ClusterName) -> str:
        """Number of the last lease's epoch, which only grows."""
        return self._of(cluster, "epoch")

    def events(self, cluster: ClusterName) -> str:
        """Stream of the changes in order; entry ids are <epoch>-<number>."""
        return self._of(cluster, "events")

    def snapshot(self, cluster: ClusterName) -> str:
        """Hash with the last complete snapshot and the stream id that it covers."""
        return self._of(cluster, "snapshot")

    def snapshot_chunks(self, cluster: ClusterName, generation: str) -> str:
        """List of the records of one snapshot; expires until the snapshot is complete."""
        return self._of(cluster, f"snapshot:{generation}")

    def figures(self, cluster: ClusterName) -> str:
        """String with signs of life, links and loads of the last second; expires."""
        return self._of(cluster, "figures")

    def plan(self, cluster: ClusterName) -> str:
        """String with the threshold and roles that the planner has chosen; expires."""
        return self._of(cluster, "plan")

    def _of(self, cluster: ClusterName, what: str) -> str:
        return f"{self.namespace}:{{{cluster}}}:{what}"


MIN_VERSION = (6, 2)  # The first with XTRIM MINID.
START_ID = "0-0"
MAX_WAIT_SECONDS = 5.0  # Longest wait of `read`.
_RECORDS_PER_REPLY = 16  # Of up to 150 KB, so that 20 Mbit/s carry a reply within the timeout.
_TAIL_BYTES = 1 << 20
_TAIL_ENTRIES = 512
_FORMS = "redis://host:port, unix://path or redis+sentinel://host:port,…/name; rediss for TLS"
_CHUNK_EXPIRY_SECONDS = 60  # After the last chunk, so that the snapshot of a dead writer goes away.


@dataclass(frozen=True)
class WriterLease:
    """Right to write one cluster's record. `epoch_before` tells whether another manager has written meanwhile."""

    cluster: ClusterName
    owner: str
    epoch: int
    epoch_before: int


@dataclass(frozen=True)
class StreamEntry:
    """Entry of a cluster's stream. `before` is the previous entry's id, which reveals a gap."""

    id: str
    before: str
    data: bytes


class RedisStore:
    """One Redis server, or the master that Sentinels name.

    redis://host:6379/0 or redis+sentinel://host:26379,…/name; over TLS rediss:// or rediss+sentinel:// (Sentinels and
    master). The URL's query names certificates.
    """

    def __init__(self, url: str, *, keys: Keys | None = None, timeout_seconds: float = 1.0) -> None:
        """Create the clients. Raises ConfigError when the URL is malformed."""
        self.keys = keys or Keys()
        try:
            self._client = _connect(url, timeout_seconds)
            self._tail = _connect(url, timeout_seconds + MAX_WAIT_SECONDS)
        except ValueError as error:
            raise ConfigError(f"redis_url: {error}; write {_FORMS}") from error
        lua = importlib.resources.files("prfaas.index") / "lua"
        self._scripts = {name: self._client.register_script((lua / f"{name}.lua").read_text()) for name in _SCRIPTS}

    async def check(self) -> None:
        """Check that this Redis can hold the record.

        Raises:
            RecordUnreachable: Redis does not answer.
            ConfigError: Redis is too old, or may evict keys when its memory is full.
        """
        _check(await self.info())

    async def info(self) -> dict[str, Any]:
        """Return the INFO of Redis."""
        async with _translated():
            info: dict[str, Any] = await self._client.info()
        return info

    async def close(self) -> None:
        for client in (self._client, self._tail):
            await _close(client)

    # Leases

    async def acquire(self, cluster: ClusterName, *, owner: str, seconds: float) -> WriterLease:
        """Take or renew the right to write.

        Raises:
            FencedError: another manager has it; the error names that manager's address.
        """
        keys = [self.keys.lease(cluster), self.keys.epoch(cluster)]
        mine, epoch, third = await self._run("acquire", keys, [owner, round(seconds * 1000)])
        if not int(mine):
            raise FencedError(f"{_text(third)} writes {cluster}", writer=writer_address(_text(third)))
        async with _translated():
            await self._client.sadd(self.keys.clusters(), cluster)
        return WriterLease(cluster, owner, int(epoch), int(third))

    async def release(self, lease: WriterLease) -> None:
        await self._run("release", [self.keys.lease(lease.cluster)], [lease.owner])

    async def writer(self, cluster: ClusterName) -> str | None:
        """Return the address of the manager that writes this cluster, or None."""
        owner = await self.owner(cluster)
        return writer_address(owner) if owner else None

    async def owner(self, cluster: ClusterName) -> str | None:
        """Return the owner string of the manager that writes this cluster, or None."""
        async with _translated():
            owner = await self._client.hget(self.keys.lease(cluster), "owner")
        return _text(owner) if owner else None

    async def clusters(self) -> list[ClusterName]:
        async with _translated():
            names = await self._client.smembers(self.keys.clusters())
        return sorted(ClusterName(_text(name)) for name in names)

    # Stream and snapshot

    async def append(self, lease: WriterLease, entries: Sequence[StreamEntry]) -> None:
        """Append all entries or none.

        Raises:
            FencedError: another manager has the lease by now.
        """
        flat: list[str | bytes] = [part for entry in entries for part in (entry.id, entry.data)]
        keys = [self.keys.lease(lease.cluster), self.keys.events(lease.cluster)]
        await self._run("append", keys, [lease.owner, lease.epoch, entries[0].before, *flat])

    async def read(
        self, after: Mapping[ClusterName, str], *, wait_seconds: float
    ) -> dict[ClusterName, list[StreamEntry]]:
        """Return the entries after the given ids, waiting for the first entry of any cluster; {} when none came."""
        streams: dict[Any, Any] = {self.keys.events(cluster): position for cluster, position in after.items()}
        by_key = {self.keys.events(cluster): cluster for cluster in after}
        wait_seconds = min(wait_seconds, MAX_WAIT_SECONDS)
        async with _translated():
            block = max(1, round(wait_seconds * 1000))
            found = await self._tail.xread(streams, count=_RECORDS_PER_REPLY, block=block)
        entries = {by_key[_text(key)]: [_entry(*item) for item in items] for key, items in found or ()}
        for cluster, found_entries in entries.items():
            if len(found_entries) == _RECORDS_PER_REPLY:
                found_entries += await self.tail(cluster, found_entries[-1].id)
        return entries

    async def tail(self, cluster: ClusterName, after: str) -> list[StreamEntry]:
        """Return some entries after an id without waiting."""
        found = await self._run("tail", [self.keys.events(cluster)], [after, _TAIL_BYTES, _TAIL_ENTRIES])
        return [StreamEntry(_text(entry_id), _text(before), data) for entry_id, (_, before, _, data) in found]

    async def last_id(self, cluster: ClusterName) -> str:
        """Return the highest id that the stream has ever had, as far as this Redis remembers."""
        key = self.keys.events(cluster)
        async with _translated():
            if not await self._client.exists(key):
                return START_ID
            info = await self._client.xinfo_stream(key)
        return _text(info["last-generated-id"])

    async def write_snapshot(
        self,
        lease: WriterLease,
        *,
        covers: str,
        chunks: AsyncIterator[bytes],
        renewed: Callable[[], WriterLease | None] = lambda: None,
    ) -> None:
        """Write all chunks, then make them the current snapshot, which covers the stream up to `covers`.

        `renewed` returns the lease if it was renewed meanwhile, else None.

        Raises:
            FencedError: another manager has the lease by now; the current snapshot stays.
        """
        generation = f"{lease.epoch}:{covers}"
        new = self.keys.snapshot_chunks(lease.cluster, generation)
        await self._write_chunks(new, chunks)
        async with _translated():
            before = await self._client.hget(self.keys.snapshot(lease.cluster), "generation")
        old = self.keys.snapshot_chunks(lease.cluster, _text(before)) if before else new
        cluster = lease.cluster
        keys = [self.keys.lease(cluster), self.keys.snapshot(cluster), self.keys.events(cluster), new, old]
        lease = renewed() or lease
        await self._run("commit_snapshot", keys, [lease.owner, lease.epoch, covers, generation])

    async def _write_chunks(self, new: str, chunks: AsyncIterator[bytes]) -> None:
        """Write all chunks, or delete them: the caller tries again under another name."""
        try:
            async with _translated():
                await self._client.delete(new)
                async for chunk in chunks:
                    async with self._client.pipeline(transaction=False) as pipeline:
                        await pipeline.rpush(new, chunk).expire(new, _CHUNK_EXPIRY_SECONDS).execute()
        except (RecordUnreachable, FencedError):
            with suppress(RecordUnreachable):
                async with _translated():
                    await self._client.delete(new)
            raise

    async def read_snapshot(self, cluster: ClusterName) -> tuple[str, list[bytes]]:
        """Return the stream id that the current snapshot covers, and its chunks; ("0-0", []) when there is none."""
        async with _translated():
            while fields := await self._client.hgetall(self.keys.snapshot(cluster)):
                found = await self._chunks(self.keys.snapshot_chunks(cluster, _text(fields[b"generation"])))
                generation = await self._client.hget(self.keys.snapshot(cluster), "generation")
                if generation == fields[b"generation"]:  # No other snapshot took its place meanwhile.
                    return _text(fields[b"covers"]), found
        return START_ID, []

    async def _chunks(self, name: str) -> list[bytes]:
        found: list[bytes] = []
        while some := await self._client.lrange(name, len(found), len(found) + _RECORDS_PER_REPLY - 1):
            found += some
        return found

    # Values that expire

    async def put(self, lease: WriterLease, key: str, data: bytes, *, seconds: float) -> None:
        """Write a value of the lease's cluster that expires.

        Raises:
            FencedError: another manager has the lease by now.
        """
        arguments: list[str | bytes | int] = [lease.owner, lease.epoch, data, round(seconds * 1000)]
        await self._run("put", [self.keys.lease(lease.cluster), key], arguments)

    async def get(self, clusters: Iterable[ClusterName], key: Callable[[ClusterName], str]) -> dict[ClusterName, bytes]:
        """Return the values that clusters have at `key`, such as `keys.plan`."""
        wanted = list(clusters)
        async with _translated(), self._client.pipeline(transaction=False) as pipeline:
            for cluster in wanted:
                pipeline.get(key(cluster))
            values = await pipeline.execute()
        return {cluster: value for cluster, value in zip(wanted, values, strict=True) if value is not None}

    async def _run(self, script: str, keys: list[str], arguments: Sequence[str | bytes | int]) -> Any:
        async with _translated():
            return await self._scripts[script](keys=keys, args=list(arguments))


_SCRIPTS = ("acquire", "release", "append", "tail", "commit_snapshot", "put")


def writer_address(owner: str) -> str:
    """Return the address in an owner string, which is "<address> <name and random> <URL of its page>"."""
    return owner.split(" ")[0]


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _entry(entry_id: bytes | str, fields: Mapping[bytes, bytes]) -> StreamEntry:
    return StreamEntry(_text(entry_id), _text(fields[b"before"]), fields[b"data"])


def _connect(url: str, timeout_seconds: float) -> Any:
    """Return a client, untyped: redis-py types its answers for sync and async at once."""
    options: dict[str, Any] = {
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "retry": Retry(NoBackoff(), 0),
    }
    parts = urlsplit(url)
    if parts.scheme in ("redis", "rediss", "unix"):
        return redis.Redis.from_url(url, **options)
    scheme, _, kind = parts.scheme.partition("+")
    if scheme not in ("redis", "rediss") or kind != "sentinel":
        # The whole URL may hold a password.
        raise ValueError(f"{url.partition('://')[0]!r} is not a supported scheme")
    user, at, listed = parts.netloc.rpartition("@")
    places = [split_address(place) for place in listed.split(",")]
    first = f"{scheme}://{user}{at}{listed.split(',')[0]}?{parts.query}"
    if not parts.path.strip("/"):
        raise ValueError("the name of the Sentinels' master is missing")
    stated = {
        name: value for name, value in parse_url(first).items() if name not in ("host", "port", "connection_class")
    }
    options |= {name: value for name, value in stated.items() if name.startswith("ssl_")} | {"ssl": scheme == "rediss"}
    sentinel: Any = cast(Any, Sentinel)(places, sentinel_kwargs=options)
    return sentinel.master_for(parts.path.strip("/"), **stated | options)


async def _close(client: Any) -> None:
    await client.aclose(close_connection_pool=True)
    watch = getattr(client.connection_pool, "sentinel_manager", None)
    for sentinel in watch.sentinels if watch else ():
        await sentinel.aclose(close_connection_pool=True)


def _check(info: Mapping[str, Any]) -> None:
    """Raise ConfigError if this server is too old, or may evict keys when its memory is full."""
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < MIN_VERSION:
        raise ConfigError(f"Redis {info['redis_version']}: at least {MIN_VERSION[0]}.{MIN_VERSION[1]} is needed")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ConfigError(f"Redis maxmemory-policy {policy}: noeviction is needed, an evicted key is a lost record")


@asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    """Translate Redis's errors."""
    try:
        yield
    except ResponseError as error:
        if "FENCED" in str(error):
            raise FencedError(str(error)) from error
        raise RecordUnreachable(f"Redis refuses: {error}") from error
    except (RedisError, OSError, TimeoutError) as error:
        raise RecordUnreachable(f"Redis does not answer: {error}") from error
