"""A sending link and a receiver over real sockets: every byte arrives, or a reason does, and nothing stays behind."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from prfaas.errors import ConfigError
from prfaas.transport.receiver import (
    Accepted,
    OpenRequest,
    ReceiveCompleted,
    ReceiveEvent,
    ReceiveFailed,
    ReceiveMemoryFree,
    Receiver,
    ReceiverConfig,
    Rejected,
)
from prfaas.transport.sender import (
    Link,
    LinkConfig,
    Outgoing,
    SendAccepted,
    SendCompleted,
    SendEvent,
    SendFailed,
    SendMemoryFree,
    SendProgress,
)
from prfaas.transport.wire import FrameType, Header, control
from tests.waiting import wait_until
from tools.demo.corruption import one_byte_of_one_chunk
from tools.link import LinkShape, Relay

KEY = b"k" * 32


@dataclass
class Far:
    """A receiver and the memory that it fills."""

    receiver: Receiver
    address: str = ""
    memory: dict[bytes, list[bytearray]] = field(default_factory=dict)
    events: list[ReceiveEvent] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    reject: Rejected | None = None

    def of(self, kind: type[ReceiveEvent]) -> list[ReceiveEvent]:
        return [event for event in self.events if isinstance(event, kind)]


def _far(**config: object) -> Far:
    far: Far

    def accept(request: OpenRequest, reply: Callable[[Accepted | Rejected], None]) -> None:
        if far.reject is not None:
            reply(far.reject)
            return
        memory = far.memory.setdefault(request.transfer_id, [bytearray(size) for size in request.object_bytes])
        reply(Accepted(held=far.held, destination=lambda index: memoryview(memory[index])))

    settings = ReceiverConfig(**({"listen": "127.0.0.1:0", "reconnect_seconds": 1.0} | config))  # type: ignore[arg-type]
    receiver = Receiver(
        settings, local_name="far", key=KEY, accept=accept, on_event=lambda event: far.events.append(event)
    )
    far = Far(receiver)
    far.address = receiver.start()
    return far


@pytest.fixture
def far() -> Iterator[Far]:
    made = _far()
    yield made
    made.receiver.close()


@dataclass
class Near:
    """A link and what it says."""

    link: Link
    events: list[SendEvent] = field(default_factory=list)

    def of(self, kind: type[SendEvent]) -> list[SendEvent]:
        return [event for event in self.events if isinstance(event, kind)]

    def end(self, transfer_id: bytes, *, seconds: float = 15.0) -> SendEvent:
        """How a transfer ended, once its memory is free."""
        wait_until(lambda: SendMemoryFree(transfer_id) in self.events, seconds=seconds)
        mine = [event for event in self.events if event.transfer_id == transfer_id]
        ends = [event for event in mine if isinstance(event, SendCompleted | SendFailed)]
        assert len(ends) == 1 and mine[-1] == SendMemoryFree(transfer_id)
        return ends[0]

    def acknowledged(self) -> list[int]:
        return [event.acked_bytes for event in self.events if isinstance(event, SendProgress)]


@pytest.fixture
def near_to() -> Iterator[Callable[..., Near]]:
    links: list[Link] = []

    def make(address: str, *, key: bytes = KEY, peer: str = "far", **config: object) -> Near:
        near: Near
        settings = LinkConfig(**({"num_connections": 4, "reconnect_seconds": 1.0} | config))  # type: ignore[arg-type]
        link = Link(
            address,
            config=settings,
            local_name="near",
            peer_name=peer,
            key=key,
            on_event=lambda event: near.events.append(event),
        )
        near = Near(link)
        links.append(link)
        return near

    before = threading.active_count()
    yield make
    for link in links:
        link.close()
    wait_until(lambda: threading.active_count() <= before + 2, what="the end of all threads")


def _send(near: Near, objects: list[bytes], *, deadline: float = 20.0, ready: bool = True) -> bytes:
    transfer_id = os.urandom(16)
    sizes = [len(its) for its in objects]
    near.link.open(Outgoing(transfer_id, b"body", sizes, lambda index: memoryview(objects[index]), 0, deadline))
    if ready:
        for index, its in enumerate(objects):
            near.link.ready(transfer_id, first_object=index, num_objects=1, offset_bytes=0, length_bytes=len(its))
    return transfer_id


def _objects(*sizes: int, seed: int = 1) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(size) for size in sizes]


def test_objects_arrive_whole_and_every_byte_is_acknowledged(far: Far, near_to: Callable[..., Near]) -> None:
    near, objects = near_to(far.address), _objects(1, 70_000, 3_000_000)
    transfer_id = _send(near, objects)
    end = near.end(transfer_id)
    assert isinstance(end, SendCompleted) and end.stats.checksum_failures == 0
    assert [bytes(its) for its in far.memory[transfer_id]] == objects
    assert end.stats.wire_bytes >= sum(map(len, objects))
    wait_until(lambda: len(far.of(ReceiveMemoryFree)) == 1)
    assert [type(event) for event in far.events] == [ReceiveCompleted, ReceiveMemoryFree]
    accepted = near.of(SendAccepted)[0]
    assert isinstance(accepted, SendAccepted) and accepted.missing_bytes == sum(map(len, objects))
    wait_until(lambda: near.link.snapshot().unacknowledged_bytes == 0)
    assert near.link.snapshot().acknowledged_bytes == sum(map(len, objects))


def test_layers_leave_while_others_are_not_ready_yet(far: Far, near_to: Callable[..., Near]) -> None:
    near, objects = near_to(far.address), _objects(200_000, 200_000)
    transfer_id = _send(near, objects, ready=False)
    near.link.ready(transfer_id, first_object=0, num_objects=2, offset_bytes=0, length_bytes=100_000)
    wait_until(lambda: 200_000 in near.acknowledged())
    assert not near.of(SendCompleted)
    near.link.ready(transfer_id, first_object=0, num_objects=2, offset_bytes=100_000, length_bytes=100_000)
    assert isinstance(near.end(transfer_id), SendCompleted)
    assert [bytes(its) for its in far.memory[transfer_id]] == objects


def test_what_the_receiver_holds_does_not_travel(far: Far, near_to: Callable[..., Near]) -> None:
    far.held = {0, 2}
    near, objects = near_to(far.address), _objects(50_000, 60_000, 70_000)
    transfer_id = _send(near, objects)
    end = near.end(transfer_id)
    assert isinstance(end, SendCompleted) and 60_000 <= end.stats.wire_bytes < 61_000
    assert [any(its) for its in far.memory[transfer_id]] == [False, True, False]


def test_a_transfer_without_objects_is_a_question_that_is_answered(far: Far, near_to: Callable[..., Near]) -> None:
    near = near_to(far.address)
    assert isinstance(near.end(_send(near, [])), SendCompleted)
    far.reject = Rejected("layout_mismatch", "dtype differs")
    end = near.end(_send(near, []))
    assert isinstance(end, SendFailed) and (end.reason, end.message) == ("layout_mismatch", "dtype differs")


def test_many_transfers_at_once_all_arrive(far: Far, near_to: Callable[..., Near]) -> None:
    near = near_to(far.address)
    sent = {_send(near, objects): objects for objects in (_objects(100_000, 5_000, seed=n) for n in range(20))}
    for transfer_id, objects in sent.items():
        assert isinstance(near.end(transfer_id), SendCompleted)
        assert [bytes(its) for its in far.memory[transfer_id]] == objects


@pytest.mark.parametrize("seed", range(4))
def test_connections_that_die_at_any_byte_cost_nothing_but_time(
    far: Far, near_to: Callable[..., Near], seed: int
) -> None:
    source = random.Random(seed)
    objects = _objects(900_000, 700_000, seed=seed)
    with Relay(far.address, LinkShape(bytes_per_second=4e6)) as relay:
        near = near_to(relay.address, reconnect_seconds=15.0)
        transfer_id = _send(near, objects)
        for _ in range(3):
            relay.cut_after(source.randrange(200_000))
            wait_until(lambda: relay.is_cut or bool(near.of(SendCompleted)))
            relay.mend()
        assert isinstance(near.end(transfer_id), SendCompleted)
    assert [bytes(its) for its in far.memory[transfer_id]] == objects


def test_a_link_that_stays_cut_fails_both_sides_and_frees_their_memory(far: Far, near_to: Callable[..., Near]) -> None:
    with Relay(far.address, LinkShape(bytes_per_second=2e6)) as relay:
        near = near_to(relay.address)
        transfer_id = _send(near, _objects(2_000_000))
        relay.cut_after(300_000)
        end = near.end(transfer_id)
        assert isinstance(end, SendFailed) and end.reason == "unreachable"
        wait_until(lambda: bool(far.of(ReceiveMemoryFree)))
        failed = far.of(ReceiveFailed)[0]
        assert isinstance(failed, ReceiveFailed) and failed.reason == "unreachable" and failed.peer_name == "near"


def test_a_chunk_that_always_comes_changed_is_asked_for_three_times_and_then_fails(
    far: Far, near_to: Callable[..., Near]
) -> None:
    with Relay(far.address) as relay:
        relay.filter(one_byte_of_one_chunk)
        near = near_to(relay.address)
        end = near.end(_send(near, _objects(100_000)))
        assert isinstance(end, SendFailed) and end.reason == "checksum"
        failed = far.of(ReceiveFailed)[0]
        assert isinstance(failed, ReceiveFailed) and "3 times" in failed.message


def test_nobody_at_the_address_is_unreachable_within_the_reconnect_time(near_to: Callable[..., Near]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        near = near_to(f"127.0.0.1:{taken.getsockname()[1]}")
        started = time.monotonic()
        end = near.end(_send(near, _objects(10)))
        assert isinstance(end, SendFailed) and end.reason == "unreachable"
        assert time.monotonic() - started < 5


def test_a_transfer_that_is_never_ready_ends_at_its_deadline(far: Far, near_to: Callable[..., Near]) -> None:
    near = near_to(far.address)
    end = near.end(_send(near, _objects(10), deadline=0.5, ready=False))
    assert isinstance(end, SendFailed) and end.reason == "deadline"
    wait_until(lambda: bool(far.of(ReceiveMemoryFree)))


def test_either_side_may_cancel(far: Far, near_to: Callable[..., Near]) -> None:
    near = near_to(far.address)
    first = _send(near, _objects(10), ready=False)
    wait_until(lambda: bool(near.of(SendAccepted)))
    near.link.cancel(first, "cancelled", "no longer wanted")
    wait_until(lambda: bool(far.of(ReceiveMemoryFree)))
    second = _send(near, _objects(10), ready=False)
    wait_until(lambda: len(near.of(SendAccepted)) == 2)
    far.receiver.cancel(second, "cancelled", "no longer wanted")
    end = near.end(second)
    assert isinstance(end, SendFailed) and end.message == "no longer wanted"


def test_a_peer_of_another_secret_or_name_is_not_served(far: Far, near_to: Callable[..., Near]) -> None:
    for near in (near_to(far.address, key=b"x" * 32), near_to(far.address, peer="somebody else")):
        end = near.end(_send(near, _objects(10)))
        assert isinstance(end, SendFailed) and end.reason == "unreachable"
    assert far.events == []


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(48),
        Header(FrameType.CHUNK, 100).encode(),
        control(FrameType.OPEN, [b"body", [[10, 1]], 5.0], transfer_id=bytes(16)),
        control(FrameType.HELLO, {"name": "near", "nonce": "text"}),
        bytes(1000),
    ],
)
def test_garbage_closes_its_own_connection_and_no_other(far: Far, near_to: Callable[..., Near], garbage: bytes) -> None:
    host, _, port = far.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as stranger:
        stranger.sendall(garbage)
        stranger.settimeout(5)
        while stranger.recv(4096):
            pass
    near, objects = near_to(far.address), _objects(100_000)
    assert isinstance(near.end(_send(near, objects)), SendCompleted)


def test_a_public_address_is_refused_without_a_word_for_it() -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 is not a private address"):
        _far(listen="0.0.0.0:0")
    allowed = _far(listen="0.0.0.0:0", insecure_plaintext=True)
    allowed.receiver.close()
