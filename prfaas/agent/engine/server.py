"""Calls that are made on the agent's loop one at each of its turns: what its sockets bring is heard between two of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, ParamSpec

from prfaas import logs
from prfaas.agent.engine.protocol import (
    LENGTH_BYTES,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Message,
    Refused,
    decode,
    encode,
)
from prfaas.agent.engine.ring import RingReader, create_ring
from prfaas.cachepool.arena import Arena
from prfaas.errors import ConfigError, LayoutError, RemoteProtocolError
from prfaas.kv.layout import Layout, difference

P = ParamSpec("P")


class OneATurn(Generic[P]):
    """Calls a function as often as it is asked to, in that order."""

    def __init__(self, call: Callable[P, None]) -> None:
        self._call = call
        self._waiting: deque[Callable[[], None]] = deque()

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> None:
        """On the loop."""
        self._waiting.append(lambda: self._call(*arguments, **named))
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        try:
            self._waiting[0]()
        finally:
            del self._waiting[0]
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._next)


ATTACH_DEADLINE_SECONDS = 10.0
ACCEPT_PAUSE_SECONDS = 0.05
MAX_QUEUED_MESSAGES = 4096  # a live engine reads within a step; one that lets so many wait is stuck
_log = logs.get("agent.engines")
_ids = itertools.count(1)


@dataclass(eq=False)
class EngineConnection:
    """One attached scheduler or worker. `owner` names it in the pool's leases."""

    attach: Attach
    layout: Layout | None
    arena: Arena | None
    ring: RingReader | None
    client: socket.socket
    session: int = 0  # as in `Attached`
    outbox: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(MAX_QUEUED_MESSAGES))
    owner: str = field(default_factory=lambda: f"engine-{next(_ids)}")
    lost: bool = False

    def post(self, message: Message) -> None:
        """Queue a message; an engine that no longer reads is lost, not waited for: its connection ends."""
        if self.lost:
            return
        try:
            self.outbox.put_nowait(encode(message))
        except asyncio.QueueFull:
            self.lost = True
            _log.warning("engine.stuck", instance=self.attach.instance, queued=self.outbox.qsize())
            with contextlib.suppress(OSError):
                self.client.shutdown(socket.SHUT_RDWR)

    def __repr__(self) -> str:
        return f"<EngineConnection {self.attach.instance} {self.attach.role} rank={self.attach.rank} lost={self.lost}>"


@dataclass(frozen=True)
class EngineCallbacks:
    """What the agent does when an engine wants to attach (or is refused, by LayoutError), is attached, speaks, finishes
    layers, or goes."""

    attach: Callable[[Attach, Layout | None], Awaitable[tuple[Attached, Arena | None]]]
    attached: Callable[[EngineConnection], None]
    message: Callable[[EngineConnection, Message], None]
    layers: Callable[[EngineConnection], None]
    lost: Callable[[EngineConnection], None]


class EngineListener:
    """Accepts engines on a Unix socket that only this user may open."""

    def __init__(self, path: Path, callbacks: EngineCallbacks) -> None:
        self._path = path
        self._callbacks = callbacks
        self._connections: dict[EngineConnection, None] = {}  # in order of arrival
        self._num_schedulers: Counter[str] = Counter()  # that have attached, of each instance that is here
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: socket.socket | None = None  # once the path is this listener's

    @property
    def connections(self) -> list[EngineConnection]:
        return list(self._connections)

    def workers(self, instance: str) -> list[EngineConnection]:
        """The attached ranks of an instance in order; empty unless every rank is there."""
        workers = [c for c in self._connections if (c.attach.instance, c.attach.role) == (instance, "worker")]
        workers.sort(key=lambda worker: worker.attach.rank)
        size = workers[0].layout.shard.size if workers and workers[0].layout else 0
        return workers if [worker.attach.rank for worker in workers] == list(range(size)) else []

    def workers_of(self, name: str, model: str) -> list[EngineConnection]:
        """The attached ranks of an engine that is known from outside: the one called `name`, as vLLM's `engine_id` may say,
        or else the only one here of its model. As `workers` otherwise.
        """
        alike = {c.attach.instance for c in self._connections if c.layout is not None and c.layout.model == model}
        only = alike.pop() if len(alike) == 1 else ""
        return self.workers(name) or self.workers(only)

    def check_beside(self, attach: Attach, layout: Layout) -> None:
        """Raise LayoutError when a living engine has the same model and rank with another layout, or the same name and rank."""
        for other in self._connections:
            if other.layout is None or other.attach.rank != attach.rank:
                continue
            is_alike = (other.layout.model, other.layout.shard) == (layout.model, layout.shard)
            if is_alike and other.layout != layout:
                raise LayoutError(f"{other.attach.instance} runs this model too: {difference(other.layout, layout)}")
            if other.attach.instance == attach.instance:
                raise LayoutError(f"instance {attach.instance} rank {attach.rank} is attached already")

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the path cannot be bound, or another agent answers there.
        """
        try:
            _remove_stale_socket(self._path)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._socket = _listen(self._path)
        except OSError as error:
            raise ConfigError(f"socket: {self._path} cannot be bound ({error.strerror})") from error
        self._spawn(self._accept_forever(self._socket))

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept_forever(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError:  # of descriptors there may be more in a moment
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            client.setblocking(False)
            self._spawn(self._serve(client))

    async def _serve(self, client: socket.socket) -> None:
        connection: EngineConnection | None = None
        try:
            async with asyncio.timeout(ATTACH_DEADLINE_SECONDS):
                connection = await self._attach(client)
            if connection is not None:
                await self._talk(connection)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        except RemoteProtocolError as error:
            _log.warning("engine.protocol", reason=error.reason, message=str(error))
        finally:
            if connection is not None:
                self._lose(connection)
            client.close()

    async def _attach(self, client: socket.socket) -> EngineConnection | None:
        loop = asyncio.get_running_loop()
        attach = await _read_message(client)
        descriptors: list[int] = []
        try:
            layout = _check_attach(attach)
            assert isinstance(attach, Attach)
            attached, arena = await self._callbacks.attach(attach, layout)
            if attach.role == "scheduler":
                self._end_earlier(attach.instance)
                attached = replace(attached, session=self._num_schedulers[attach.instance])
        except LayoutError as error:
            _log.warning("engine.refused", message=str(error))
            await loop.sock_sendall(client, encode(Refused(str(error))))
            return None
        ring = None
        if arena is not None:
            ring_fd, event_fd = create_ring()
            descriptors = [arena.fd, ring_fd, event_fd]
            ring = RingReader(ring_fd, event_fd)
        try:
            socket.send_fds(client, [encode(attached)], descriptors)
        except OSError:  # it has gone meanwhile
            if ring is not None:
                ring.close()
            raise
        connection = EngineConnection(attach, layout, arena, ring, client, attached.session)
        self._connections[connection] = None
        self._num_schedulers[attach.instance] += attach.role == "scheduler"
        if ring is not None:
            loop.add_reader(ring.event_fd, self._callbacks.layers, connection)
        _log.info("engine.attached", instance=attach.instance, role=attach.role, rank=attach.rank)
        self._callbacks.attached(connection)
        return connection

    async def _talk(self, connection: EngineConnection) -> None:
        writer = asyncio.create_task(_write_forever(connection))
        try:
            while True:
                message = await _read_message(connection.client)
                if connection.lost:
                    return
                self._callbacks.message(connection, message)
        finally:
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await writer

    def _end_earlier(self, instance: str) -> None:
        """A scheduler attaches anew: what it said before, and nobody has read yet, is not heard any more."""
        for other in self.connections:
            if (other.attach.instance, other.attach.role) == (instance, "scheduler"):
                self._lose(other)
                with contextlib.suppress(OSError):
                    other.client.shutdown(socket.SHUT_RDWR)

    def _lose(self, connection: EngineConnection) -> None:
        if connection not in self._connections:
            return
        del self._connections[connection]
        connection.lost = True
        if connection.ring is not None:
            self._callbacks.layers(connection)  # what it said before it went still counts
            asyncio.get_running_loop().remove_reader(connection.ring.event_fd)
        self._callbacks.lost(connection)
        if connection.ring is not None:
            connection.ring.close()
        instance = connection.attach.instance
        if not any(other.attach.instance == instance for other in self._connections):
            del self._num_schedulers[instance]
        _log.info("engine.lost", instance=instance, role=connection.attach.role)

    async def close(self) -> None:
        """Stop listening, close every connection, remove the socket file."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:  # else the file may be another agent's
            self._socket.close()
            self._path.unlink(missing_ok=True)


def _check_attach(message: Message) -> Layout | None:
    if not isinstance(message, Attach):
        raise LayoutError(f"the first message is Attach, not {type(message).__name__}")
    if message.version != PROTOCOL_VERSION:
        raise LayoutError(f"protocol version {message.version}: this agent speaks version {PROTOCOL_VERSION}")
    if message.role == "scheduler":
        return None
    layout = Layout.from_dict(message.layout)
    if layout.shard.rank != message.rank:
        raise LayoutError(f"rank: {message.rank} attaches with the layout of rank {layout.shard.rank}")
    return layout


def _remove_stale_socket(path: Path) -> None:
    """Remove the socket of an agent that died; refuse to take a living agent's."""
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise ConfigError(f"socket: another agent listens at {path}")


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


async def _read_exactly(client: socket.socket, length: int) -> bytes:
    loop = asyncio.get_running_loop()
    buffer = bytearray(length)
    view, got = memoryview(buffer), 0
    while got < length:
        count = await loop.sock_recv_into(client, view[got:])
        if not count:
            raise asyncio.IncompleteReadError(bytes(buffer[:got]), length)
        got += count
    return bytes(buffer)


async def _read_message(client: socket.socket) -> Message:
    length = int.from_bytes(await _read_exactly(client, LENGTH_BYTES), "little")
    if length > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError("too_long", f"a message of {length} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return decode(await _read_exactly(client, length))


async def _write_forever(connection: EngineConnection) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await loop.sock_sendall(connection.client, await connection.outbox.get())
