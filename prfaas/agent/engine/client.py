"""The engine's end of the agent's Unix socket: no asyncio, no thread, no call that waits unless asked to."""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from prfaas import logs
from prfaas.agent.engine.protocol import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Attach,
    Attached,
    AttachRole,
    Message,
    MessageBuffer,
    Refused,
    encode,
)
from prfaas.agent.engine.ring import RingWriter
from prfaas.errors import AgentUnreachable, LayoutError, PrfaasError, RemoteProtocolError
from prfaas.kv.layout import Layout

ATTACH_TIMEOUT_SECONDS = 10.0
REATTACH_TIMEOUT_SECONDS = 10.0  # of an agent that has taken the connection; it may ask its peers about the layout
REATTACH_SECONDS = 1.0  # between two looks for an agent that is gone
MAX_OUTBOX_BYTES = 4 * MAX_MESSAGE_BYTES  # an agent that has left so much unread hangs
_RECEIVE_BYTES = 1 << 18
_NUM_WORKER_FDS = 3
_log = logs.get("agent.client")


@dataclass(frozen=True)
class _Connection:
    """What attaching gives; `messages` came with the answer. Ring and arena are a worker's."""

    socket: socket.socket
    attached: Attached
    buffer: MessageBuffer
    messages: list[Message]
    ring: RingWriter | None = None
    arena: mmap.mmap | None = None


class _Attaching:
    """A connection whose agent has not answered yet; nothing here waits but `answer`, as long as it is told to."""

    def __init__(self, path: str, attach: Attach, *, wait_seconds: float = 0.0) -> None:
        """Connect, waiting so long while the agent's queue of connections is full.

        Raises:
            AgentUnreachable: nobody listens at `path`.
        """
        self._path = path
        self._num_descriptors = _NUM_WORKER_FDS if attach.role == "worker" else 0
        self._buffer = MessageBuffer()
        self._descriptors: list[int] = []
        self._socket = _connect(path, wait_seconds)
        try:
            self._socket.sendall(encode(attach))  # a new socket takes it at once
        except OSError as error:
            self.close()
            raise AgentUnreachable(f"the agent at {path} does not answer: {error}") from error

    def answer(self, wait_seconds: float) -> _Connection | None:
        """The connection once the agent has answered; None while it has not.

        Raises:
            AgentUnreachable: it hung up, speaks another protocol, or what it gives cannot be mapped.
            LayoutError: it refuses this engine; the message says what differs.
        """
        until = time.monotonic() + wait_seconds
        try:
            while not (messages := self._receive(max(0.0, until - time.monotonic()))):
                if time.monotonic() >= until:
                    return None
            return self._opened(messages)
        except BaseException:
            self.close()
            raise

    def _receive(self, wait_seconds: float) -> list[Message]:
        poller = select.poll()  # select takes no descriptor above 1,023
        poller.register(self._socket, select.POLLIN)
        if not poller.poll(wait_seconds * 1000):
            return []
        try:
            data, received, _, _ = socket.recv_fds(self._socket, _RECEIVE_BYTES, _NUM_WORKER_FDS)
        except OSError as error:
            raise AgentUnreachable(f"the agent at {self._path} does not answer: {error}") from error
        self._descriptors += received
        if not data:
            raise AgentUnreachable(f"the agent at {self._path} closed the connection")
        return self._buffer.feed(data)

    def _opened(self, messages: list[Message]) -> _Connection:
        answer = messages.pop(0)
        if isinstance(answer, Refused):
            raise LayoutError(f"the agent at {self._path} refuses this engine: {answer.message}")
        if not isinstance(answer, Attached) or len(self._descriptors) != self._num_descriptors:
            raise AgentUnreachable(f"{self._path} does not speak protocol version {PROTOCOL_VERSION}")
        opened = _Connection(self._socket, answer, self._buffer, messages)
        if not self._descriptors:
            return opened
        arena_fd, ring_fd, event_fd = self._descriptors
        try:
            arena = mmap.mmap(arena_fd, os.fstat(arena_fd).st_size)
            ring = RingWriter(ring_fd, event_fd)
        except (OSError, ValueError) as error:  # no address space for so large a pool, for one
            raise AgentUnreachable(f"the pool of the agent at {self._path} cannot be mapped: {error}") from error
        self._descriptors = []
        os.close(arena_fd)
        return replace(opened, ring=ring, arena=arena)

    def close(self) -> None:
        """Give it up."""
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


class AgentClient:
    """One connection to the agent. After `close` or a lost connection `connected` is False and `post` does nothing."""

    def __init__(
        self,
        path: str,
        *,
        instance: str,
        role: AttachRole,
        rank: int = 0,
        layout: Layout | None = None,
        pins_arena: bool = False,
    ) -> None:
        """Connect and attach; a worker brings its layout and gets the arena (which a GPU's pins) and the ring.

        Raises:
            AgentUnreachable: nobody answers at `path`.
            LayoutError: the agent refuses this engine; the message says what differs.
        """
        self.path = path
        self._attach = Attach(PROTOCOL_VERSION, instance, role, rank, layout.to_dict() if layout else None, pins_arena)
        self._reattach_at = 0.0  # monotonic seconds
        self._last_report = ""  # why there was no agent when it was last tried
        self._attaching: _Attaching | None = None  # to the agent that comes after one that is gone
        self._attaching_since = 0.0
        self._take(self._open())

    def _open(self) -> _Connection:
        attaching = _Attaching(self.path, self._attach, wait_seconds=ATTACH_TIMEOUT_SECONDS)
        opened = attaching.answer(ATTACH_TIMEOUT_SECONDS)
        if opened is None:
            attaching.close()
            raise AgentUnreachable(f"the agent at {self.path} does not answer within {ATTACH_TIMEOUT_SECONDS:.0f} s")
        return opened

    def _take(self, opened: _Connection) -> None:
        self._opened = opened
        self._inbox: deque[Message] = deque(opened.messages)
        self._outbox = bytearray()
        self.connected = True

    def reattach(self, leave: Callable[[], None] = lambda: None, *, wait_seconds: float = 0.0) -> bool:
        """Attach to the agent that listens at the same path after the connection was lost; whether that worked.

        It waits `wait_seconds` at most, once per connection; an answer that comes later is taken by a later call. A new
        agent has another epoch, arena and ring: once it has answered, `leave` lets go of views of the old.
        """
        now = time.monotonic()
        try:
            if self._attaching is None:
                if now < self._reattach_at:
                    return False
                self._opened.socket.close()
                self._attaching, self._attaching_since = _Attaching(self.path, self._attach), now
                opened = self._attaching.answer(wait_seconds)
            else:
                opened = self._attaching.answer(0.0)
        except PrfaasError as error:
            self._give_up(str(error))
            return False
        if opened is None:
            if now - self._attaching_since > REATTACH_TIMEOUT_SECONDS:
                self._attaching.close()
                self._give_up(f"the agent at {self.path} does not answer")
            return False
        self._attaching = None
        leave()
        self._close_ring()
        self._take(opened)
        self._last_report = ""
        _log.info("agent.reconnected", agent=self.attached.agent, role=self._attach.role)
        return True

    def _give_up(self, message: str) -> None:
        self._attaching = None
        self._reattach_at = time.monotonic() + REATTACH_SECONDS
        self._report(message)

    def _report(self, message: str) -> None:
        """Say once why there is no agent."""
        if message != self._last_report:
            self._last_report = message
            _log.warning("agent.reconnect_failed", role=self._attach.role, message=message)

    @property
    def attached(self) -> Attached:
        """What the agent answered; of the last agent once it is gone."""
        return self._opened.attached

    @property
    def ring(self) -> RingWriter | None:
        """A worker's, until `close`."""
        return self._opened.ring

    @property
    def arena(self) -> memoryview:
        """The whole arena, generation table first; valid until `close`."""
        assert self._opened.arena is not None, "only a worker maps the arena"
        return memoryview(self._opened.arena)

    def slot_generations(self) -> memoryview:
        """One u64 per slot: odd or even says nothing, a change says that the slot was given to another block."""
        return self.arena[: self.attached.num_slots * 8].cast("Q")

    def post(self, message: Message) -> None:
        """Queue a message and write what the socket takes; never waits. Lost when the connection is."""
        if self.connected:
            self._outbox += encode(message)
            self._flush()
            if len(self._outbox) > MAX_OUTBOX_BYTES:
                self._lose("it takes no messages")

    def _flush(self) -> None:
        while self._outbox:
            try:
                sent = self._opened.socket.send(self._outbox)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(str(error))
                return
            del self._outbox[:sent]

    def poll(self, timeout_seconds: float = 0.0) -> list[Message]:
        """The messages that have come, waiting up to `timeout_seconds` for the first."""
        if self.connected:
            self._flush()
            self._read(timeout_seconds)
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def _read(self, timeout_seconds: float) -> None:
        connection = self._opened.socket
        if timeout_seconds > 0 and not self._inbox:
            poller = select.poll()  # select takes no descriptor above 1,023
            poller.register(connection, select.POLLIN | (select.POLLOUT if self._outbox else 0))
            poller.poll(timeout_seconds * 1000)
        while self.connected:
            try:
                data = connection.recv(_RECEIVE_BYTES)
                self._inbox.extend(self._opened.buffer.feed(data))
            except BlockingIOError:
                return
            except (OSError, RemoteProtocolError) as error:
                self._lose(str(error))
                return
            if not data:
                self._lose("it closed the connection")

    def _lose(self, message: str) -> None:
        self.connected = False
        self._outbox.clear()
        _log.warning("agent.lost", role=self._attach.role, message=message)

    def close(self) -> None:
        """Close the connection; the agent takes back every lease. Views of the arena must be gone."""
        self.connected = False
        if self._attaching is not None:
            self._attaching.close()
        self._opened.socket.close()
        self._close_ring()

    def _close_ring(self) -> None:
        if self._opened.ring is not None:
            self._opened.ring.close()
            self._opened = replace(self._opened, ring=None)

    def __repr__(self) -> str:
        state = "connected" if self.connected else "lost"
        return f"<AgentClient {self.path} {state} inbox={len(self._inbox)} outbox_bytes={len(self._outbox)}>"


def _connect(path: str, wait_seconds: float) -> socket.socket:
    """A socket that waits for nothing once it is connected."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(wait_seconds)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise AgentUnreachable(f"no agent listens at {path} ({error.strerror}); start prfaas-agent first") from error
    connection.setblocking(False)
    return connection
