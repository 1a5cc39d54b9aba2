"""The engine's end of the agent's Unix socket: no asyncio, no thread, no call that waits unless asked to."""

from __future__ import annotations

import mmap
import os
import select
import socket
from collections import deque
from typing import Any

from prfaas.agent.protocol import (
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
from prfaas.errors import AgentUnreachable, LayoutError, PrfaasError

ATTACH_TIMEOUT_SECONDS = 10.0
REATTACH_TIMEOUT_SECONDS = 1.0  # a living agent answers within a millisecond; the engine waits for no other
_RECEIVE_BYTES = 1 << 18
_NUM_WORKER_FDS = 3


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
        self.ring: RingWriter | None = None
        self._is_worker = role == "worker"
        self._attach = Attach(PROTOCOL_VERSION, instance, role, rank, layout.to_dict() if layout else None, pins_arena)
        self._arena_map: mmap.mmap | None = None
        self.connected = False
        self._open(ATTACH_TIMEOUT_SECONDS)

    def _open(self, timeout_seconds: float) -> None:
        self._buffer = MessageBuffer()
        self._inbox: deque[Message] = deque()
        self._outbox = bytearray()
        self._socket = _connect(self.path, timeout_seconds)
        try:
            self._socket.sendall(encode(self._attach))
            self.attached = self._receive_answer(expects_fds=self._is_worker)
        except OSError as error:
            self._socket.close()
            raise AgentUnreachable(f"the agent at {self.path} does not answer: {error}") from error
        except PrfaasError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self.connected = True

    def reattach(self) -> bool:
        """Attach to the agent that listens at the same path after the connection was lost; whether that worked.

        A new agent has another epoch, another arena and another ring: views of the old ones must be gone before.
        """
        self._socket.close()
        if self.ring is not None:
            self.ring.close()
            self.ring = None
        try:
            self._open(REATTACH_TIMEOUT_SECONDS)
        except PrfaasError:
            return False
        return True

    def _receive_answer(self, *, expects_fds: bool) -> Attached:
        descriptors: list[int] = []
        messages: list[Message] = []
        while not messages:
            data, received, _, _ = socket.recv_fds(self._socket, _RECEIVE_BYTES, _NUM_WORKER_FDS)
            descriptors += received
            if not data:
                raise AgentUnreachable(f"the agent at {self.path} closed the connection")
            messages = self._buffer.feed(data)
        answer = messages[0]
        self._inbox.extend(messages[1:])
        if isinstance(answer, Refused):
            raise LayoutError(f"the agent at {self.path} refuses this engine: {answer.message}")
        if not isinstance(answer, Attached) or len(descriptors) != (_NUM_WORKER_FDS if expects_fds else 0):
            raise AgentUnreachable(f"{self.path} does not speak protocol version {PROTOCOL_VERSION}")
        if expects_fds:
            arena_fd, ring_fd, event_fd = descriptors
            self.ring = RingWriter(ring_fd, event_fd)
            self._arena_map = mmap.mmap(arena_fd, os.fstat(arena_fd).st_size)
            os.close(arena_fd)
        return answer

    @property
    def arena(self) -> memoryview:
        """The whole arena, generation table first; valid until `close`."""
        assert self._arena_map is not None, "only a worker maps the arena"
        return memoryview(self._arena_map)

    def slot_generations(self) -> memoryview:
        """One u64 per slot: odd or even says nothing, a change says that the slot was given to another block."""
        return self.arena[: self.attached.num_slots * 8].cast("Q")

    def post(self, message: Message) -> None:
        """Queue a message and write what the socket takes; never waits. Lost when the connection is."""
        if self.connected:
            self._outbox += encode(message)
            self._flush()

    def _flush(self) -> None:
        while self._outbox:
            try:
                sent = self._socket.send(self._outbox)
            except BlockingIOError:
                return
            except OSError:
                self._lose()
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
        if timeout_seconds > 0 and not self._inbox:
            select.select([self._socket], [self._socket] if self._outbox else [], [], timeout_seconds)
        while self.connected:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose()
                return
            self._inbox.extend(self._buffer.feed(data))

    def _lose(self) -> None:
        self.connected = False
        self._outbox.clear()

    def close(self) -> None:
        """Close the connection; the agent takes back every lease. Views of the arena must be gone."""
        self.connected = False
        self._socket.close()
        if self.ring is not None:
            self.ring.close()
            self.ring = None

    def __repr__(self) -> str:
        state = "connected" if self.connected else "lost"
        return f"<AgentClient {self.path} {state} inbox={len(self._inbox)} outbox_bytes={len(self._outbox)}>"


def _connect(path: str, timeout_seconds: float) -> Any:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_seconds)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise AgentUnreachable(f"no agent listens at {path} ({error.strerror}); start prfaas-agent first") from error
    return connection
