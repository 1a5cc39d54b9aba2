"""Agent's end of its Unix socket: accepts engines, and passes their messages and finished layers on."""

import asyncio
import contextlib
import itertools
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path

from prfaas import logs
from prfaas.agent.engine.protocol import PROTOCOL_VERSION, Attach, Attached, Message, MessageBuffer, Refused, encode
from prfaas.agent.engine.ring import RingReader, create_ring
from prfaas.cachepool.arena import Arena
from prfaas.errors import ConfigError, LayoutError, RemoteProtocolError
from prfaas.kv.layout import Layout, difference

ATTACH_DEADLINE_SECONDS = 10.0
ACCEPT_PAUSE_SECONDS = 0.05
RECEIVE_BYTES = 1 << 18
# A live engine reads within a step, so an engine that leaves more messages unread hangs.
MAX_QUEUED_MESSAGES = 4096
_log = logs.get("agent.engines")


@dataclass(eq=False)
class EngineConnection:
    """One attached scheduler or worker."""

    attach: Attach
    layout: Layout | None
    arena: Arena | None
    ring: RingReader | None
    client: socket.socket
    # As in `Attached`.
    session: int = 0
    outbox: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(MAX_QUEUED_MESSAGES))
    is_lost: bool = False

    @property
    def instance(self) -> str:
        """Name of the engine's instance."""
        return self.attach.instance

    @property
    def name(self) -> str:
        """Name of the process on status pages."""
        replica = f".{self.attach.replica}" if self.attach.replica else ""
        return f"{self.instance}/{self.attach.role}/{self.attach.rank}{replica}"

    @property
    def is_writer(self) -> bool:
        """True unless this worker only reads the arena of a rank with equal KV."""
        return self.attach.replica == 0

    def post(self, message: Message) -> None:
        """Queue a message; an engine that does not read its messages loses its connection."""
        if self.is_lost:
            return
        try:
            self.outbox.put_nowait(encode(message))
        except asyncio.QueueFull:
            self.is_lost = True
            _log.warning("engine.read_stalled", instance=self.instance, queued=self.outbox.qsize())
            self.shut_down()

    def shut_down(self) -> None:
        """End the connection; its reader notices."""
        with contextlib.suppress(OSError):
            self.client.shutdown(socket.SHUT_RDWR)


def layouts_of(workers: list[EngineConnection]) -> tuple[Layout, ...]:
    """Return the layout of each worker."""
    return tuple(worker.layout for worker in workers if worker.layout is not None)


def arenas_of(workers: list[EngineConnection]) -> tuple[Arena, ...]:
    """Return the arena of each worker."""
    return tuple(worker.arena for worker in workers if worker.arena is not None)


@dataclass(frozen=True)
class EngineCallbacks:
    """Functions of the agent that the listener calls. `attach` raises LayoutError to refuse an engine."""

    attach: Callable[[Attach, Layout | None], tuple[Attached, tuple[Arena, ...]]]  # The worker's own arena first.
    attached: Callable[[EngineConnection], None]
    message: Callable[[EngineConnection, Message], None]
    ring_written: Callable[[EngineConnection], None]
    lost: Callable[[EngineConnection], None]


class EngineListener:
    """Server for engines on a Unix socket that only this user may open."""

    def __init__(self, path: Path, callbacks: EngineCallbacks) -> None:
        self._path = path
        self._callbacks = callbacks
        # In order of arrival.
        self._connections: dict[EngineConnection, None] = {}
        # Number of schedulers that have attached, by instance.
        self._num_schedulers: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: socket.socket | None = None

    @property
    def connections(self) -> list[EngineConnection]:
        """All attached schedulers and workers in order of arrival."""
        return list(self._connections)

    def has_instance(self, instance: str) -> bool:
        """Return whether any connection of the instance is attached."""
        return any(connection.instance == instance for connection in self._connections)

    def workers(self, instance: str) -> list[EngineConnection]:
        """Return the writers of an instance by rank; empty unless every rank is attached with all its replicas."""
        workers = [c for c in self._connections if (c.instance, c.attach.role) == (instance, "worker")]
        if not workers or workers[0].layout is None:
            return []
        num_ranks, num_replicas = workers[0].layout.shard.size, workers[0].attach.num_replicas
        expected = set(itertools.product(range(num_ranks), range(num_replicas)))
        if {(worker.attach.rank, worker.attach.replica) for worker in workers} != expected:
            return []
        return sorted((worker for worker in workers if worker.is_writer), key=lambda worker: worker.attach.rank)

    def check_conflicts(self, attach: Attach, layout: Layout) -> None:
        """Check a worker against the attached workers.

        Raises:
            LayoutError: A worker has the same model and rank with another layout, or the same place in this instance.
        """
        for worker in self._connections:
            if worker.layout is None or worker.attach.rank != attach.rank:
                continue
            is_same_shard = (worker.layout.model, worker.layout.shard) == (layout.model, layout.shard)
            if is_same_shard and worker.layout != layout:
                raise LayoutError(f"{worker.instance} runs this model too: {difference(worker.layout, layout)}")
            if (worker.instance, worker.attach.replica) == (attach.instance, attach.replica):
                raise LayoutError(f"instance {attach.instance} rank {attach.rank} is attached already")

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: The path cannot be bound, or another agent answers there.
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
            except OSError:
                # The process may be out of descriptors for a moment.
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            client.setblocking(False)
            self._spawn(self._serve(client))

    async def _serve(self, client: socket.socket) -> None:
        connection: EngineConnection | None = None
        messages = _read_messages(client)
        try:
            async with asyncio.timeout(ATTACH_DEADLINE_SECONDS):
                attach = await anext(messages, None)
                connection = await self._attach(client, attach)
            if connection is not None:
                await self._exchange_messages(connection, messages)
        except (OSError, TimeoutError):
            pass
        except RemoteProtocolError as error:
            _log.warning("engine.protocol_violated", reason=error.reason, message=str(error))
        finally:
            if connection is not None:
                self._lose(connection)
            client.close()

    async def _attach(self, client: socket.socket, attach: Message | None) -> EngineConnection | None:
        """Answer the first message; return the connection unless the engine was refused or has disconnected."""
        loop = asyncio.get_running_loop()
        if attach is None:
            return None
        try:
            if not isinstance(attach, Attach):
                raise LayoutError(f"the first message is Attach, not {type(attach).__name__}")
            layout = _layout_of(attach)
            attached, arenas = self._callbacks.attach(attach, layout)
        except LayoutError as error:
            _log.warning("engine.refused", message=str(error))
            await loop.sock_sendall(client, encode(Refused(str(error))))
            return None
        if attach.role == "scheduler":
            self._end_earlier_scheduler(attach.instance)
            attached = replace(attached, session=self._num_schedulers[attach.instance])
        descriptors: list[int] = []
        ring = None
        if arenas:
            ring_fd, event_fd = create_ring()
            descriptors = [*(arena.fd for arena in arenas), ring_fd, event_fd]
            ring = RingReader(ring_fd, event_fd)
        try:
            socket.send_fds(client, [encode(attached)], descriptors)
        except OSError:
            if ring is not None:
                ring.close()
            raise
        own = arenas[0] if arenas else None
        connection = EngineConnection(attach, layout, own, ring, client, attached.session)
        self._connections[connection] = None
        self._num_schedulers[attach.instance] += attach.role == "scheduler"
        if ring is not None:
            loop.add_reader(ring.event_fd, self._callbacks.ring_written, connection)
        _log.info("engine.attached", instance=attach.instance, role=attach.role, rank=attach.rank)
        self._callbacks.attached(connection)
        return connection

    async def _exchange_messages(self, connection: EngineConnection, messages: AsyncIterator[Message]) -> None:
        writer = asyncio.create_task(_write_forever(connection))
        try:
            async for message in messages:
                if connection.is_lost:
                    return
                self._callbacks.message(connection, message)
        finally:
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await writer

    def _end_earlier_scheduler(self, instance: str) -> None:
        """End the earlier connection of a scheduler that attaches again, with its unread messages."""
        for connection in self.connections:
            if (connection.instance, connection.attach.role) == (instance, "scheduler"):
                self._lose(connection)
                connection.shut_down()

    def _lose(self, connection: EngineConnection) -> None:
        if connection not in self._connections:
            return
        del self._connections[connection]
        connection.is_lost = True
        if connection.ring is not None:
            # Entries that the worker wrote before it ended still count.
            self._callbacks.ring_written(connection)
            asyncio.get_running_loop().remove_reader(connection.ring.event_fd)
        self._callbacks.lost(connection)
        if connection.ring is not None:
            connection.ring.close()
        if not self.has_instance(connection.instance):
            del self._num_schedulers[connection.instance]
        _log.info("engine.lost", instance=connection.instance, role=connection.attach.role)

    async def close(self) -> None:
        """Stop listening, close every connection, remove the socket file."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Without a socket of its own, the file may belong to another agent.
        if self._socket is not None:
            self._socket.close()
            self._path.unlink(missing_ok=True)


def _layout_of(attach: Attach) -> Layout | None:
    """Return a worker's layout, None for a scheduler.

    Raises:
        LayoutError: The protocol version or the layout is wrong.
    """
    if attach.version != PROTOCOL_VERSION:
        raise LayoutError(f"protocol version {attach.version}: this agent speaks version {PROTOCOL_VERSION}")
    if attach.role == "scheduler":
        return None
    if not 0 <= attach.replica < attach.num_replicas:
        raise LayoutError(f"replica: {attach.replica} of {attach.num_replicas}")
    layout = Layout.from_dict(attach.layout)
    if layout.shard.rank != attach.rank:
        raise LayoutError(f"rank: {attach.rank} attaches with the layout of rank {layout.shard.rank}")
    return layout


def _remove_stale_socket(path: Path) -> None:
    """Remove the socket of a dead agent.

    Raises:
        ConfigError: A living agent answers there.
    """
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


async def _read_messages(client: socket.socket) -> AsyncIterator[Message]:
    """Yield the messages that arrive until the engine closes the connection."""
    loop, buffer = asyncio.get_running_loop(), MessageBuffer()
    while data := await loop.sock_recv(client, RECEIVE_BYTES):
        for message in buffer.feed(data):
            yield message


async def _write_forever(connection: EngineConnection) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await loop.sock_sendall(connection.client, await connection.outbox.get())
