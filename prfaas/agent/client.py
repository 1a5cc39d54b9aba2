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
from prfaas.agent.protocol import (
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
from prfaas.agent.ring import RingWriter
from prfaas.cachepool.layout import Layout
from prfaas.errors import AgentUnreachable, LayoutError, PrfaasError, RemoteProtocolError

ATTACH_TIMEOUT_SECONDS = 10.0
REATTACH_TIMEOUT_SECONDS = 1.0  # a living agent answers within a millisecond; the engine waits for no other
REATTACH_SECONDS = 1.0  # between two looks for an agent that is gone
REATTACH_PAUSES = 5  # at least so many times as long as the last look took: one that hangs takes the whole time-out
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
        self._is_worker = role == "worker"
        self._attach = Attach(PROTOCOL_VERSION, instance, role, rank, layout.to_dict() if layout else None, pins_arena)
        self._reattach_at = 0.0  # monotonic seconds
        self._last_report = ""  # why there was no agent when it was last tried
        self._take(self._open(ATTACH_TIMEOUT_SECONDS))

    def _open(self, timeout_seconds: float) -> _Connection:
        connection = _connect(self.path, timeout_seconds)
        try:
            connection.sendall(encode(self._attach))
            opened = self._receive_answer(connection)
        except OSError as error:
            connection.close()
            raise AgentUnreachable(f"the agent at {self.path} does not answer: {error}") from error
        except PrfaasError:
            connection.close()
            raise
        connection.setblocking(False)
        return opened

    def _take(self, opened: _Connection) -> None:
        self._opened = opened
        self._inbox: deque[Message] = deque(opened.messages)
        self._outbox = bytearray()
        self.connected = True

    def reattach(self, leave: Callable[[], None] = lambda: None) -> bool:
        """Attach to the agent that listens at the same path after the connection was lost; whether that worked.

        It is not tried at every call, so that an agent that hangs costs the engine little. A new agent has another
        epoch, another arena and another ring: once it has answered, `leave` is called, which lets go of views of the old.
        """
        start = time.monotonic()
        if start < self._reattach_at:
            return False
        self._opened.socket.close()
        try:
            opened = self._open(REATTACH_TIMEOUT_SECONDS)
        except PrfaasError as error:
            self._report(str(error))
            now = time.monotonic()
            self._reattach_at = now + max(REATTACH_SECONDS, REATTACH_PAUSES * (now - start))
            return False
        leave()
        self._close_ring()
        self._take(opened)
        self._last_report = ""
        _log.info("agent.back", agent=self.attached.agent, role=self._attach.role)
        return True

    def _report(self, message: str) -> None:
        """Say once why there is no agent."""
        if message != self._last_report:
            self._last_report = message
            _log.warning("agent.not_back", role=self._attach.role, message=message)

    def _receive_answer(self, connection: socket.socket) -> _Connection:
        buffer = MessageBuffer()
        descriptors: list[int] = []
        messages: list[Message] = []
        while not messages:
            data, received, _, _ = socket.recv_fds(connection, _RECEIVE_BYTES, _NUM_WORKER_FDS)
            descriptors += received
            if not data:
                raise AgentUnreachable(f"the agent at {self.path} closed the connection")
            messages = buffer.feed(data)
        answer = messages.pop(0)
        if isinstance(answer, Refused):
            raise LayoutError(f"the agent at {self.path} refuses this engine: {answer.message}")
        if not isinstance(answer, Attached) or len(descriptors) != (_NUM_WORKER_FDS if self._is_worker else 0):
            raise AgentUnreachable(f"{self.path} does not speak protocol version {PROTOCOL_VERSION}")
        opened = _Connection(connection, answer, buffer, messages)
        if not self._is_worker:
            return opened
        arena_fd, ring_fd, event_fd = descriptors
        arena = mmap.mmap(arena_fd, os.fstat(arena_fd).st_size)
        os.close(arena_fd)
        return replace(opened, ring=RingWriter(ring_fd, event_fd), arena=arena)

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
        self._opened.socket.close()
        self._close_ring()

    def _close_ring(self) -> None:
        if self._opened.ring is not None:
            self._opened.ring.close()
            self._opened = replace(self._opened, ring=None)

    def __repr__(self) -> str:
        state = "connected" if self.connected else "lost"
        return f"<AgentClient {self.path} {state} inbox={len(self._inbox)} outbox_bytes={len(self._outbox)}>"


def _connect(path: str, timeout_seconds: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_seconds)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise AgentUnreachable(f"no agent listens at {path} ({error.strerror}); start prfaas-agent first") from error
    return connection
