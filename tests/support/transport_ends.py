"""Both ends of a link for tests: a receiver with the memory that it fills, and a link with its events."""

import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prfaas.transport.receiver.api import Acceptance, OpenRequest, ReceiveEvent, Rejection
from prfaas.transport.receiver.server import Receiver, ReceiverConfig
from prfaas.transport.sender.api import SendCompleted, SendEvent, SendFailed, SendMemoryFree, SendProgress, SendRequest
from prfaas.transport.sender.link import Link, LinkConfig
from prfaas.types import FailureReason
from tests.support.waiting import PATIENCE_SECONDS, wait_until

KEY = b"k" * 32
# `silence_seconds` of tests in which a peer is unreachable. In other tests no peer is given up for being slow.
GIVES_UP_SECONDS = 0.6


@dataclass
class Far:
    """Receiver and the memory that it fills."""

    receiver: Receiver
    address: str = ""
    memory: dict[bytes, list[bytearray]] = field(default_factory=dict)
    events: list[ReceiveEvent] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    reject: Rejection | None = None

    def of(self, kind: type[ReceiveEvent]) -> list[ReceiveEvent]:
        return [event for event in self.events if isinstance(event, kind)]

    def contents(self, transfer_id: bytes) -> list[bytes]:
        """Return the objects of a transfer."""
        return [bytes(item) for item in self.memory[transfer_id]]


def make_far(**config: object) -> Far:
    far: Far

    def accept(request: OpenRequest, reply: Callable[[Acceptance | Rejection], None]) -> None:
        if far.reject is not None:
            reply(far.reject)
            return
        memory = far.memory.setdefault(request.transfer_id, [bytearray(size) for size in request.object_bytes])
        reply(Acceptance(held=far.held, destination=lambda index: memoryview(memory[index])))

    settings = ReceiverConfig(**({"listen": "127.0.0.1:0", "silence_seconds": PATIENCE_SECONDS} | config))  # type: ignore[arg-type]
    receiver = Receiver(
        settings, local_name="far", key=KEY, accept=accept, on_event=lambda event: far.events.append(event)
    )
    far = Far(receiver)
    far.address = receiver.start()
    return far


@dataclass
class Near:
    """Link and its events."""

    link: Link
    events: list[SendEvent] = field(default_factory=list)

    def of(self, kind: type[SendEvent]) -> list[SendEvent]:
        return [event for event in self.events if isinstance(event, kind)]

    def end(self, transfer_id: bytes, *, seconds: float = 2 * PATIENCE_SECONDS) -> SendEvent:
        """Return the last event of a transfer before its memory was freed."""
        wait_until(lambda: SendMemoryFree(transfer_id) in self.events, seconds=seconds)
        events = [event for event in self.events if event.transfer_id == transfer_id]
        ends = [event for event in events if isinstance(event, SendCompleted | SendFailed)]
        assert len(ends) == 1 and events[-1] == SendMemoryFree(transfer_id)
        return ends[0]

    def assert_completed(self, transfer_id: bytes, *, seconds: float = 2 * PATIENCE_SECONDS) -> SendCompleted:
        event = self.end(transfer_id, seconds=seconds)
        assert isinstance(event, SendCompleted), event
        return event

    def assert_failed(self, transfer_id: bytes, reason: FailureReason) -> SendFailed:
        event = self.end(transfer_id)
        assert isinstance(event, SendFailed) and event.reason == reason, event
        return event

    def acknowledged(self) -> list[int]:
        return [event.acked_bytes for event in self.events if isinstance(event, SendProgress)]


def make_near(address: str, *, key: bytes = KEY, peer: str = "far", name: str = "near", **config: object) -> Near:
    near: Near
    settings = LinkConfig(**({"num_connections": 4, "silence_seconds": PATIENCE_SECONDS} | config))  # type: ignore[arg-type]
    link = Link(
        address,
        config=settings,
        local_name=name,
        peer_name=peer,
        key=key,
        on_event=lambda event: near.events.append(event),
    )
    near = Near(link)
    return near


def send(
    near: Near, objects: list[bytes], *, deadline: float = PATIENCE_SECONDS, ready: bool = True, priority: int = 0
) -> bytes:
    """Open a transfer of these objects. All of them are ready, unless `ready` is false."""
    transfer_id = os.urandom(16)
    sizes = [len(item) for item in objects]
    near.link.open(
        SendRequest(transfer_id, b"body", sizes, lambda index: memoryview(objects[index]), priority, deadline)
    )
    if ready:
        make_ready(near, transfer_id, objects, range(len(objects)))
    return transfer_id


def make_ready(near: Near, transfer_id: bytes, objects: list[bytes], numbers: range) -> None:
    """Mark these objects of a transfer as ready."""
    for number in numbers:
        size = len(objects[number])
        near.link.ready(transfer_id, first_object=number, num_objects=1, offset_bytes=0, length_bytes=size)


def objects_of(*sizes: int, seed: int = 1) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(size) for size in sizes]


@contextlib.contextmanager
def no_thread_starts() -> Iterator[None]:
    """Have every start of a thread fail, by a stack too large for any address space."""
    before = threading.stack_size(1 << 60)
    try:
        yield
    finally:
        threading.stack_size(before)


def fill_up(sock: socket.socket) -> int:
    """Send zeros until the kernel takes no more. Returns their number."""
    piece, num_bytes = bytes(4096), 0
    with contextlib.suppress(BlockingIOError):
        while True:
            num_bytes += sock.send(piece, socket.MSG_DONTWAIT)
    return num_bytes


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
