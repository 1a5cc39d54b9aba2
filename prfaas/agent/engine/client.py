"""Engine's end of the agent's Unix socket. It has no thread, and only waits where the caller passes a timeout."""

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
from prfaas.kv.layout import Layout, siblings

# The agent makes the arena before it answers.
ATTACH_TIMEOUT_SECONDS = 10.0
REATTACH_INTERVAL_SECONDS = 1.0
# An agent that leaves so much unread hangs.
MAX_OUTBOX_BYTES = 4 * MAX_MESSAGE_BYTES
_RECEIVE_BYTES = 1 << 18
_MAX_FDS = 253  # The kernel's limit for one message.
_log = logs.get("agent.client")


@dataclass(frozen=True)
class _AttachedConnection:
    """An attached connection; `messages` arrived with the answer. Only workers have ring and arena."""

    socket: socket.socket
    attached: Attached
    buffer: MessageBuffer
    messages: list[Message]
    ring: RingWriter | None = None
    arenas: tuple[mmap.mmap, ...] = ()


class _AttachAttempt:
    """A connection whose agent has not answered `Attach` yet."""

    def __init__(self, path: str, attach: Attach, *, num_arenas: int, wait_seconds: float = 0.0) -> None:
        """Connect, and wait at most `wait_seconds` while the agent's listen queue is full.

        The agent's answer carries the descriptors of `num_arenas` arenas.

        Raises:
            AgentUnreachable: No agent listens at `path`.
        """
        self.started_at = time.monotonic()
        self._path = path
        self._num_descriptors = num_arenas + 2 if num_arenas else 0
        self._buffer = MessageBuffer()
        self._descriptors: list[int] = []
        self._socket = _connect(path, wait_seconds)
        try:
            # The buffer of a new socket takes a complete message at once.
            self._socket.sendall(encode(attach))
        except OSError as error:
            self.close()
            raise AgentUnreachable(f"the agent at {path} does not answer: {error}") from error

    def answer(self, wait_seconds: float) -> _AttachedConnection | None:
        """Return the session once the agent has answered, else None.

        Raises:
            AgentUnreachable: The agent hung up, speaks another protocol, or its memory cannot be mapped.
            LayoutError: The agent refuses this engine; the message names the difference.
        """
        deadline = time.monotonic() + wait_seconds
        try:
            while not (messages := self._receive(max(0.0, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    return None
            return self._session(messages)
        except BaseException:
            self.close()
            raise

    def _receive(self, wait_seconds: float) -> list[Message]:
        if not _poll(self._socket, select.POLLIN, wait_seconds):
            return []
        try:
            data, received, _, _ = socket.recv_fds(self._socket, _RECEIVE_BYTES, _MAX_FDS)
        except OSError as error:
            raise AgentUnreachable(f"the agent at {self._path} does not answer: {error}") from error
        self._descriptors += received
        if not data:
            raise AgentUnreachable(f"the agent at {self._path} closed the connection")
        return self._buffer.feed(data)

    def _session(self, messages: list[Message]) -> _AttachedConnection:
        answer = messages.pop(0)
        if isinstance(answer, Refused):
            raise LayoutError(f"the agent at {self._path} refuses this engine: {answer.message}")
        if not isinstance(answer, Attached) or len(self._descriptors) != self._num_descriptors:
            raise AgentUnreachable(f"{self._path} does not speak protocol version {PROTOCOL_VERSION}")
        session = _AttachedConnection(self._socket, answer, self._buffer, messages)
        if not self._descriptors:
            return session
        *arena_fds, ring_fd, event_fd = self._descriptors
        try:
            arenas = tuple(mmap.mmap(arena_fd, os.fstat(arena_fd).st_size) for arena_fd in arena_fds)
            ring = RingWriter(ring_fd, event_fd)
        except (OSError, ValueError) as error:
            raise AgentUnreachable(f"the pool of the agent at {self._path} cannot be mapped: {error}") from error
        self._descriptors = []
        for arena_fd in arena_fds:
            os.close(arena_fd)
        return replace(session, ring=ring, arenas=arenas)

    def close(self) -> None:
        """Close the connection and the descriptors that arrived on it."""
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


class AgentClient:
    """One connection to the agent. After `close` or a lost connection, `connected` is False and `post` does nothing."""

    def __init__(
        self,
        path: str,
        *,
        instance: str,
        role: AttachRole,
        rank: int = 0,
        layout: Layout | None = None,
        pins_arena: bool = False,
        replica: int = 0,
        num_replicas: int = 1,
        node: int | None = None,
    ) -> None:
        """Connect and attach. A worker passes its layout and gets arena and ring. The other parameters are as in `Attach`.

        Raises:
            AgentUnreachable: No agent answers at `path`.
            LayoutError: The agent refuses this engine; the message names the difference.
        """
        self.path = path
        described = layout.to_dict() if layout else None
        self._attach = Attach(
            PROTOCOL_VERSION, instance, role, rank, described, pins_arena, replica, num_replicas, node
        )
        self._num_arenas = len(siblings(layout)) if layout else 0
        self._attempt: _AttachAttempt | None = None
        self._next_attempt_at = 0.0  # monotonic seconds
        self._last_failure = ""
        attempt = _AttachAttempt(path, self._attach, num_arenas=self._num_arenas, wait_seconds=ATTACH_TIMEOUT_SECONDS)
        session = attempt.answer(ATTACH_TIMEOUT_SECONDS)
        if session is None:
            attempt.close()
            raise AgentUnreachable(f"the agent at {path} does not answer within {ATTACH_TIMEOUT_SECONDS:.0f} s")
        self._start(session)

    def _start(self, session: _AttachedConnection) -> None:
        self._session = session
        self._inbox: deque[Message] = deque(session.messages)
        self._outbox = bytearray()
        self.connected = True

    def reattach(self, leave: Callable[[], None] = lambda: None, *, wait_seconds: float = 0.0) -> bool:
        """Attach to the agent that now listens at the same path; return whether this succeeded.

        The call waits at most `wait_seconds`, once per connection; a later call takes a late answer. A new agent has
        another epoch, arena and ring. Before they replace the old ones, `leave` must drop all views of the old arena.
        """
        try:
            if self._attempt is None:
                if time.monotonic() < self._next_attempt_at:
                    return False
                self._session.socket.close()
                self._attempt = _AttachAttempt(self.path, self._attach, num_arenas=self._num_arenas)
                session = self._attempt.answer(wait_seconds)
            else:
                session = self._attempt.answer(0.0)
        except PrfaasError as error:
            self._fail_attempt(str(error))
            return False
        if session is None:
            if time.monotonic() - self._attempt.started_at > ATTACH_TIMEOUT_SECONDS:
                self._attempt.close()
                self._fail_attempt(f"the agent at {self.path} does not answer")
            return False
        self._attempt = None
        leave()
        self._close_ring()
        self._start(session)
        self._last_failure = ""
        _log.info("agent.reconnected", agent=self.attached.agent, role=self._attach.role)
        return True

    def _fail_attempt(self, message: str) -> None:
        """Schedule the next attempt, and log each new reason once."""
        self._attempt = None
        self._next_attempt_at = time.monotonic() + REATTACH_INTERVAL_SECONDS
        if message != self._last_failure:
            self._last_failure = message
            _log.warning("agent.reconnect_failed", role=self._attach.role, message=message)

    @property
    def attached(self) -> Attached:
        """Answer of the agent; that of the last agent while disconnected."""
        return self._session.attached

    @property
    def ring(self) -> RingWriter | None:
        """Ring of a worker, until `close`."""
        return self._session.ring

    @property
    def arena(self) -> memoryview:
        """All memory of the arena, generation table first; valid until `close`."""
        return self.arenas[0]

    @property
    def arenas(self) -> list[memoryview]:
        """Memory of this rank's arena, then of its `siblings`, which hold the other pieces of its blocks."""
        assert self._session.arenas, "only a worker maps the arena"
        return [memoryview(arena) for arena in self._session.arenas]

    def slot_generations(self, arena: int = 0) -> memoryview:
        """Return one u64 per slot. A changed number means that the slot was given to another block."""
        return self.arenas[arena][: self.attached.num_slots * 8].cast("Q")

    def post(self, message: Message) -> None:
        """Queue a message and write as much as the socket takes, without waiting."""
        if self.connected:
            self._outbox += encode(message)
            self._flush()
            if len(self._outbox) > MAX_OUTBOX_BYTES:
                self._lose("the agent takes no messages")

    def _flush(self) -> None:
        while self._outbox:
            try:
                sent = self._session.socket.send(self._outbox)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(str(error))
                return
            del self._outbox[:sent]

    def poll(self, timeout_seconds: float = 0.0) -> list[Message]:
        """Return the messages that have arrived, waiting up to `timeout_seconds` for the first."""
        if self.connected:
            self._flush()
            self._read(timeout_seconds)
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def _read(self, timeout_seconds: float) -> None:
        connection = self._session.socket
        if timeout_seconds > 0 and not self._inbox:
            _poll(connection, select.POLLIN | (select.POLLOUT if self._outbox else 0), timeout_seconds)
        while self.connected:
            try:
                data = connection.recv(_RECEIVE_BYTES)
                self._inbox.extend(self._session.buffer.feed(data))
            except BlockingIOError:
                return
            except (OSError, RemoteProtocolError) as error:
                self._lose(str(error))
                return
            if not data:
                self._lose("the agent closed the connection")

    def _lose(self, message: str) -> None:
        self.connected = False
        self._outbox.clear()
        _log.warning("agent.lost", role=self._attach.role, message=message)

    def close(self) -> None:
        """Close the connection; the agent then ends every lease. The caller has dropped all views of the arena."""
        self.connected = False
        if self._attempt is not None:
            self._attempt.close()
        self._session.socket.close()
        self._close_ring()

    def _close_ring(self) -> None:
        if self._session.ring is not None:
            self._session.ring.close()
            self._session = replace(self._session, ring=None)


def _connect(path: str, wait_seconds: float) -> socket.socket:
    """Return a connected, non-blocking socket."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(wait_seconds)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise AgentUnreachable(f"no agent listens at {path} ({error.strerror}); start prfaas-agent first") from error
    connection.setblocking(False)
    return connection


def _poll(connection: socket.socket, events: int, wait_seconds: float) -> bool:
    """Wait for one of the events; return whether it came. Unlike `select`, this takes descriptors above 1,023."""
    poller = select.poll()
    poller.register(connection, events)
    return bool(poller.poll(wait_seconds * 1000))
