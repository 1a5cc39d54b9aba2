"""Strangers, floods and peers that break the protocol: each is refused, counted, and harms nobody else."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY

from prfaas.errors import RemoteProtocolError
from prfaas.transport.codec.packing import Packer, pack_formats
from prfaas.transport.net import handshake
from prfaas.transport.net.connection import Connection
from prfaas.transport.net.handshake import Identity
from prfaas.transport.protocol.messages import (
    MAX_BODY_BYTES,
    MAX_OBJECTS,
    MAX_RUNS,
    Ending,
    Hello,
    ObjectSizes,
    Open,
    decode_ending,
    encode_ending,
    encode_hello,
    encode_open,
    encode_refusal,
)
from prfaas.transport.protocol.wire import (
    HEADER_BYTES,
    MAX_CHUNK_BYTES,
    MAX_PAYLOAD_BYTES,
    ConnectionState,
    FrameType,
    Header,
    chunk_checksum,
    chunk_header,
    control,
    packed_header,
)
from prfaas.transport.ranges import Slab
from prfaas.transport.receiver.admission import FAIR_FRAGMENTS, MAX_OPENING_BYTES, RUN_BYTES
from prfaas.transport.receiver.api import Accepted, OpenRequest, ReceiveCompleted, ReceiveFailed, Rejected
from prfaas.transport.receiver.dispatcher import InboundDispatcher
from prfaas.transport.receiver.reader import LARGE_FRAME_BYTES, MAX_LARGE_FRAMES, MAX_PACKED_FRAMES
from prfaas.transport.receiver.server import MAX_STRANGERS, Receiver, ReceiverConfig, source_of
from prfaas.transport.receiver.transfers import HAVE_SECONDS
from prfaas.transport.sender.api import SendCompleted, SendFailed
from tests.support.raw_peers import RawReceiver, RawSender
from tests.support.transport_ends import (
    GIVES_UP_SECONDS,
    KEY,
    Far,
    Near,
    make_far,
    objects_of,
    resident_bytes,
    send,
)
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.link import Relay

NOISY_SIZES = (1000, 500, 500)
A_HELLO = encode_hello(Hello("near", bytes(32), (1,), ()))


def _connect(far: Far) -> socket.socket:
    host, _, port = far.address.rpartition(":")
    made = socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)
    made.settimeout(PATIENCE_SECONDS)
    return made


def _read_to_end(stranger: socket.socket) -> bytes:
    said = b""
    try:
        while part := stranger.recv(4096):
            said += part
    except ConnectionResetError:  # it closed with our bytes unread
        pass
    return said


def _assert_good_peers_are_served(far: Far, near_to: Callable[..., Near]) -> None:
    near = near_to(far.address)
    assert isinstance(near.end(send(near, objects_of(100_000))), SendCompleted)


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(48), "magic"),
        (chunk_header(bytes(16), Slab(0, 1, 0, 100), 0), "order"),
        (Header(FrameType.OPEN, 16 << 20, offset=5).encode(), "order"),
        (Header(FrameType.PING, 0).encode(), "order"),
        (control(FrameType.HELLO, {"name": "near", "nonce": "text"}), "body"),
        (control(FrameType.HELLO, ["", bytes(32), [1], []]), "body"),
        (encode_hello(Hello("near", bytes(32), (2, 3), ())), "version"),
        (A_HELLO + control(FrameType.PROOF, [bytes(32)]), "secret"),
        (A_HELLO + A_HELLO, "order"),
        (A_HELLO + encode_refusal(RemoteProtocolError("name", "you are somebody else")), "refused"),
        (A_HELLO[:8] + b"\xff\xff\xff\xff" + A_HELLO[12:], "length"),
        (b"PRFS\x02" + A_HELLO[5:], "version"),
    ],
)
def test_a_stranger_is_refused_by_reason_and_no_other_connection_suffers(
    far: Far, near_to: Callable[..., Near], garbage: bytes, reason: str
) -> None:
    with _connect(far) as stranger:
        stranger.sendall(garbage)
        _read_to_end(stranger)
    wait_until(lambda: far.receiver.refused == {reason: 1})
    _assert_good_peers_are_served(far, near_to)


def test_refused_connections_stand_in_the_metrics_by_reason(far: Far) -> None:
    before = _counted("magic")
    with _connect(far) as stranger:
        stranger.sendall(b"GET / HTTP/1.1" + bytes(48))
        _read_to_end(stranger)
    wait_until(lambda: _counted("magic") == before + 1)


def _counted(reason: str) -> float:
    return REGISTRY.get_sample_value("prfaas_agent_wire_refusals_total", {"reason": reason}) or 0.0


def test_an_agent_of_another_secret_counts_as_that_at_both_ends(far: Far, near_to: Callable[..., Near]) -> None:
    before = _counted("secret")
    near = near_to(far.address, key=b"x" * 32, num_connections=1)
    send(near, objects_of(10))
    wait_until(lambda: far.receiver.refused.keys() == {"secret"})
    wait_until(lambda: _counted("secret") - before > far.receiver.refused["secret"], what="the sender's own count")


def test_a_sender_that_says_why_it_goes_counts_as_one_that_refuses(far: Far) -> None:
    with RawSender(far.address) as near:
        near.connection.write(encode_refusal(RemoteProtocolError("body", "HAVE of another form")))
        assert near.refusal().message == "refused: body: HAVE of another form"
    assert far.receiver.refused == {"refused": 1}


def test_a_receiver_that_breaks_the_protocol_hears_why_and_is_counted(near_to: Callable[..., Near]) -> None:
    heard: list[str] = []

    def break_the_protocol(connection: Connection) -> None:
        connection.write(bytes(HEADER_BYTES))
        while (header := connection.read_header()).type is not FrameType.ERROR:
            connection.read_payload(header)
        heard.append(decode_ending(connection.read_payload(header)).message)

    before = _counted("magic")
    with RawReceiver(break_the_protocol) as receiver:
        send(near_to(receiver.address, num_connections=1), objects_of(10))
        wait_until(lambda: bool(heard))
    assert heard[0].startswith("magic:")
    assert _counted("magic") > before


def test_a_recorded_handshake_proves_nothing(far: Far, near_to: Callable[..., Near]) -> None:
    """What a real peer has sent is sent again, byte for byte: the receiver's nonce is another one."""
    with Relay(far.address) as relay:
        recorded = bytearray()
        relay.filter(lambda: lambda data: recorded.extend(data) or data)  # type: ignore[func-returns-value]
        with RawSender(relay.address):
            pass
    with _connect(far) as stranger:
        stranger.sendall(recorded)
        _read_to_end(stranger)
    wait_until(lambda: far.receiver.refused == {"secret": 1})


def test_half_open_connections_do_not_keep_good_peers_out(far: Far, near_to: Callable[..., Near]) -> None:
    flood = [_connect(far) for _ in range(2 * MAX_STRANGERS)]
    _assert_good_peers_are_served(far, near_to)
    wait_until(lambda: far.receiver.num_connections <= MAX_STRANGERS + 4, what="the end of those that had to go")
    for stranger in flood:
        stranger.close()


def test_a_flood_from_one_address_drives_out_its_own_strangers_alone(far: Far) -> None:
    wait_until(lambda: _is_let_in_after_a_flood(far), what="a handshake that a flood began within")


def _is_let_in_after_a_flood(far: Far) -> bool:
    """Whether who connected before it, from another address, is still there; a slow machine may time it out."""
    (host, _, port), before = far.address.rpartition(":"), sum(far.receiver.refused.values())
    with _connect(far) as honest, contextlib.ExitStack() as flood:
        for _ in range(2 * MAX_STRANGERS):
            source = ("127.0.0.2", 0)
            flood.enter_context(socket.create_connection((host, int(port)), PATIENCE_SECONDS, source_address=source))
        wait_until(lambda: sum(far.receiver.refused.values()) >= before + MAX_STRANGERS)
        with contextlib.suppress(OSError):
            handshake.dial(Connection(honest), Identity("late", KEY), peer_name="far")
            return True
    return False


@pytest.mark.parametrize(
    ("address", "source"),
    [("10.0.0.7", "10.0.0.7"), ("fd00:0:0:1:2:3:4:5", "fd00:0:0:1::/64"), ("fe80::7", "fe80::7")],
)
def test_whoever_has_an_ipv6_address_has_its_whole_network(address: str, source: str) -> None:
    assert source_of(address) == source


def test_a_handshake_that_trickles_ends(far: Far) -> None:
    with _connect(far) as stranger:
        stranger.sendall(A_HELLO[:20])
        _read_to_end(stranger)  # returns when the receiver has closed it
    wait_until(lambda: far.receiver.num_connections == 0)
    assert far.receiver.refused == {"slow": 1}


def test_every_open_of_a_peer_that_reads_late_is_answered() -> None:
    memory = memoryview(bytearray(1))
    taken: list[bytes] = []

    def accept(request: OpenRequest, reply: Callable[[Accepted | Rejected], None]) -> None:
        reply(Accepted(held={16383}, destination=lambda _: memory))  # said as a bit for each: two kilobytes
        taken.append(request.transfer_id)

    receiver = Receiver(
        ReceiverConfig("127.0.0.1:0"), local_name="far", key=KEY, accept=accept, on_event=lambda event: None
    )
    opened = Open(ObjectSizes.of([1] * 16384), 0, PATIENCE_SECONDS, b"body")
    transfers = [number.to_bytes(16, "big") for number in range(400)]
    with RawSender(receiver.start()) as raw:
        for transfer_id in transfers:
            raw.connection.write(encode_open(transfer_id, opened))
        wait_until(lambda: taken == transfers)
        heard = [raw.heard()[0] for _ in transfers]
    assert sorted((its.transfer_id, its.type) for its in heard) == [
        (transfer, FrameType.HAVE) for transfer in transfers
    ]
    receiver.close()


def test_an_open_that_is_repeated_without_end_is_answered_ten_times_a_second(far: Far) -> None:
    with RawSender(far.address) as raw:
        began_at = time.monotonic()
        transfer_id = raw.open(100)
        again = encode_open(transfer_id, Open(ObjectSizes.of([100]), 0, PATIENCE_SECONDS, b"body"))
        for _ in range(1000):
            raw.connection.write(again)
        raw.connection.write(Header(FrameType.PING, 0).encode())
        heard: list[FrameType] = []
        while FrameType.PONG not in heard:
            heard.append(raw.heard()[0].type)
        at_most = 2 + 2 * (time.monotonic() - began_at) / HAVE_SECONDS  # one at once, one at a tick
        assert heard.count(FrameType.HAVE) <= at_most
        raw.connection.write(again)
        assert raw.heard()[0].type is FrameType.HAVE, "who asks is answered, if later"


def test_who_answers_does_not_wait_for_a_peer_that_reads_late() -> None:
    replies: list[Callable[[Accepted | Rejected], None]] = []
    receiver = Receiver(
        ReceiverConfig("127.0.0.1:0"),
        local_name="far",
        key=KEY,
        accept=lambda request, reply: replies.append(reply),
        on_event=lambda event: None,
    )
    opened = Open(ObjectSizes([(1, MAX_OBJECTS)]), 0, PATIENCE_SECONDS, b"body")
    transfers = [number.to_bytes(16, "big") for number in range(16)]
    with RawSender(receiver.start()) as raw:
        for transfer_id in transfers:
            raw.connection.write(encode_open(transfer_id, opened))
        wait_until(lambda: len(replies) == len(transfers))
        for reply in replies:  # each with a bitmap of 256 KiB, of which the kernel takes few
            reply(Accepted(held={MAX_OBJECTS - 1}, destination=lambda _: memoryview(b"")))
        heard = [raw.heard()[0] for _ in transfers]
    assert sorted((its.transfer_id, its.type) for its in heard) == [
        (transfer, FrameType.HAVE) for transfer in transfers
    ]
    receiver.close()


def test_a_sender_that_dawdles_within_a_chunk_holds_up_nobody_else(far: Far, near_to: Callable[..., Near]) -> None:
    dawdlers = [RawSender(far.address, name=f"dawdler{number}") for number in range(20)]
    for peer in dawdlers:
        transfer_id = peer.open(MAX_CHUNK_BYTES)
        peer.connection.write(chunk_header(transfer_id, Slab(0, 1, 0, MAX_CHUNK_BYTES), 0) + bytes(100))
    _assert_good_peers_are_served(far, near_to)
    assert far.receiver.num_connections >= len(dawdlers)
    for peer in dawdlers:
        peer.connection.close()


def test_what_has_arrived_is_kept_in_so_many_pieces_and_who_scatters_most_is_refused() -> None:
    max_fragments, at_most = 16 * FAIR_FRAGMENTS, 12 * FAIR_FRAGMENTS  # of one peer
    far = make_far(max_fragments=max_fragments)
    with RawSender(far.address, name="scatters") as greedy, RawSender(far.address, name="honest") as honest:
        mine, theirs = honest.open(4 * FAIR_FRAGMENTS), greedy.open(2 * max_fragments)
        for piece in range(at_most + 1):  # the last one is one too many
            greedy.chunk(theirs, Slab(0, 1, 2 * piece, 1), b"x")
        assert greedy.refusal().message.startswith("fragments")
        for piece in range(FAIR_FRAGMENTS + 10):
            honest.chunk(mine, Slab(0, 1, 2 * piece, 1), b"y")
        honest.chunk(mine, Slab(0, 1, 0, 4 * FAIR_FRAGMENTS), bytes(4 * FAIR_FRAGMENTS))
        wait_until(lambda: bool(far.of(ReceiveCompleted)))
    assert far.receiver.refused == {"fragments": 1}
    far.receiver.close()


def test_who_goes_on_sending_after_its_refusal_still_hears_why(far: Far) -> None:
    with RawSender(far.address) as peer:
        transfer_id = peer.open(100)
        peer.chunk(transfer_id, Slab(0, 1, 90, 20), bytes(20))
        wait_until(lambda: far.receiver.refused == {"range": 1})
        for _ in range(20):  # a connection that was reset takes one of these, and not the next
            peer.chunk(transfer_id, Slab(0, 1, 0, 10), bytes(10))
        assert peer.refusal().message.startswith("range")


@pytest.mark.parametrize(
    ("slab", "reason"),
    [
        (Slab(0, 1, 50, 100), "range"),
        (Slab(2, 1, 0, 10), "range"),
        (Slab(1, 1, 0, 10), "range"),  # held
        (Slab(0, 2, 0, 10), "range"),
        (Slab((1 << 32) - 1, 1, 0, 10), "range"),
        (Slab(0, 1, (1 << 64) - 1, 10), "range"),
    ],
)
def test_a_chunk_beyond_what_may_come_ends_its_connection(far: Far, slab: Slab, reason: str) -> None:
    far.held = {1}
    with RawSender(far.address) as raw:
        transfer_id = raw.open(100, 100)
        raw.chunk(transfer_id, slab, bytes(slab.num_bytes))
        assert raw.refusal().message.startswith(reason)
    assert far.receiver.refused == {reason: 1}
    assert not any(any(its) for its in far.memory[transfer_id])


def test_nobody_writes_into_another_peers_transfer(far: Far) -> None:
    with RawSender(far.address, name="owner") as owner, RawSender(far.address, name="thief") as thief:
        transfer_id = owner.open(100)
        thief.chunk(transfer_id, Slab(0, 1, 0, 100), b"x" * 100)
        assert thief.refusal().message.startswith("owner")
        assert not any(far.memory[transfer_id][0])
        owner.chunk(transfer_id, Slab(0, 1, 0, 100), b"y" * 100)
        wait_until(lambda: bool(far.of(ReceiveCompleted)))


def test_nobody_opens_cancels_or_ends_another_peers_transfer(far: Far) -> None:
    with RawSender(far.address, name="owner") as owner, RawSender(far.address, name="thief") as thief:
        transfer_id = owner.open(100)
        with pytest.raises(AssertionError):
            thief.open(100, transfer_id=transfer_id)
        thief.connection.write(control(FrameType.CANCEL, ["cancelled", "mine"], transfer_id=transfer_id))
        thief.connection.write(Header(FrameType.END, 0, transfer_id, offset=5).encode())
        thief.connection.write(Header(FrameType.PING, 0).encode())
        assert thief.heard()[0].type is FrameType.PONG
        owner.chunk(transfer_id, Slab(0, 1, 0, 100), b"y" * 100)
        wait_until(lambda: bool(far.of(ReceiveCompleted)))


def test_a_sender_that_counts_other_bytes_fails_its_transfer(far: Far) -> None:
    with RawSender(far.address) as raw:
        transfer_id = raw.open(100)
        raw.connection.write(Header(FrameType.END, 0, transfer_id, offset=99).encode())
        assert raw.refusal().reason == "protocol"


class _Watched(list[bytearray]):
    """Memory that says when somebody is about to write to it."""

    def __init__(self, *objects: bytearray) -> None:
        super().__init__(objects)
        self.is_taken = threading.Event()

    def __getitem__(self, index: Any) -> Any:
        self.is_taken.set()
        return super().__getitem__(index)


def test_a_sender_that_counts_wrongly_twice_fails_its_transfer_once(far: Far) -> None:
    transfer_id, memory = os.urandom(16), _Watched(bytearray(100))
    far.memory[transfer_id] = memory
    with RawSender(far.address) as writer, RawSender(far.address) as raw:
        writer.open(100, transfer_id=transfer_id)
        writer.connection.write(chunk_header(transfer_id, Slab(0, 1, 0, 100), 0) + bytes(10))
        assert memory.is_taken.wait(PATIENCE_SECONDS)
        for _ in range(2):
            raw.connection.write(Header(FrameType.END, 0, transfer_id, offset=99).encode())
        raw.connection.write(Header(FrameType.PING, 0).encode())
        while raw.heard()[0].type is not FrameType.PONG:
            pass
        assert len(far.of(ReceiveFailed)) == 1


def test_a_chunk_of_an_unknown_transfer_is_answered_with_reopen_once(far: Far) -> None:
    with RawSender(far.address) as raw:
        for _ in range(3):
            raw.chunk(bytes(16), Slab(0, 1, 0, 100), bytes(100))
        kinds: list[FrameType] = []
        while not kinds or kinds[-1] is not FrameType.PONG:
            raw.connection.write(Header(FrameType.PING, 0).encode())
            kinds.append(raw.heard()[0].type)
        assert kinds.count(FrameType.REOPEN) == 1


@pytest.mark.parametrize(
    "frame",
    [
        Header(FrameType.ACK, 0, offset=5).encode(),
        Header(FrameType.AGAIN, 0, offset=0).encode(),
        control(FrameType.DONE, ["many"]),
        Header(FrameType.CHUNK, 4, count=1).encode() + bytes(4),
        bytes(HEADER_BYTES),
    ],
)
def test_a_receiver_that_breaks_the_protocol_is_left_and_its_transfer_fails(
    near_to: Callable[..., Near], frame: bytes
) -> None:
    left = threading.Event()

    def serve(connection: Connection) -> None:
        connection.write(frame)
        try:
            while True:
                connection.read_payload(connection.read_header())
        finally:
            left.set()

    with RawReceiver(serve) as receiver:
        near = near_to(receiver.address)
        end = near.end(send(near, objects_of(1000), deadline=0.2))
        assert isinstance(end, SendFailed) and end.reason == "deadline"
        wait_until(left.is_set, what="its sender's going")


def test_a_receiver_that_refuses_every_connection_is_dialled_ever_more_slowly_and_its_words_are_kept(
    near_to: Callable[..., Near],
) -> None:
    served: list[Connection] = []

    def refuse(connection: Connection) -> None:
        served.append(connection)
        connection.write(control(FrameType.ERROR, ["protocol", "fragments: too many"]))

    with RawReceiver(refuse) as receiver:
        near = near_to(receiver.address, num_connections=1, reconnect_seconds=0.4)

        def is_told_why() -> bool:
            """Not while a further connection is being made: then there is no word of the last one."""
            end = near.end(send(near, objects_of(1000)))
            assert isinstance(end, SendFailed) and end.reason == "unreachable"
            return "fragments: too many" in end.message

        wait_until(is_told_why, what="the receiver's words")
    assert len(served) < 20


@pytest.mark.parametrize("seed", range(20))
def test_noise_at_the_live_port_after_the_handshake_harms_nobody(
    far: Far, near_to: Callable[..., Near], seed: int
) -> None:
    _fuzz(far, random.Random(seed), num_frames=50, noise_ratio=0.1)
    _assert_good_peers_are_served(far, near_to)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))  # a million in all; each ends within a few minutes
def test_noise_among_a_quarter_of_a_million_frames_harms_nobody_and_keeps_no_memory(
    near_to: Callable[..., Near], seed: int
) -> None:
    far, source, num_peers = make_far(reconnect_seconds=GIVES_UP_SECONDS), random.Random(seed), 0

    def read(num_frames: int) -> None:
        nonlocal num_peers
        while num_frames > 0:
            num_frames -= _fuzz(far, source, num_frames=200, noise_ratio=0.01)
            num_peers += 1
            far.memory.clear()
            far.events.clear()

    with contextlib.closing(far.receiver):
        read(25_000)  # what is kept at most for ended transfers, and by the allocator
        before = resident_bytes()
        read(250_000)
        assert resident_bytes() - before < 32 << 20
        assert sum(far.receiver.refused.values()) > 0.9 * num_peers, "of each ten frames in the end are noise"
        _assert_good_peers_are_served(far, near_to)


def _fuzz(far: Far, source: random.Random, *, num_frames: int, noise_ratio: float) -> int:
    """A peer that knows the secret sends what it may and then noise; returns how many frames were read before that."""
    num_read = 0
    with contextlib.suppress(OSError), RawSender(far.address) as raw:
        transfer_id = raw.open(*NOISY_SIZES)
        while num_read < num_frames and source.random() >= noise_ratio:
            raw.connection.write(_sound_frame(source, transfer_id))
            num_read += 1
        last = source.randbytes(16)
        raw.connection.write(encode_open(last, Open(ObjectSizes.of([]), 0, PATIENCE_SECONDS, b"body")))
        while raw.heard()[0].transfer_id != last:
            pass
        for _ in range(10):  # until it is thrown out
            raw.connection.write(_noisy_frame(source, transfer_id))
    return num_read


def _sound_frame(source: random.Random, transfer_id: bytes) -> bytes:
    slab = Slab(source.randrange(3), 1, source.randrange(400), source.randrange(1, 100))
    payload = source.randbytes(slab.num_bytes)
    checksum = chunk_checksum(transfer_id, slab, [memoryview(payload)]) if source.random() < 0.99 else 0
    return source.choice(
        [
            chunk_header(transfer_id, slab, checksum) + payload,
            Header(FrameType.PING, 0).encode(),
            Header(FrameType.END, 0, transfer_id, offset=sum(NOISY_SIZES)).encode(),
            encode_open(transfer_id, Open(ObjectSizes.of(NOISY_SIZES), 0, PATIENCE_SECONDS, b"body")),
            control(FrameType.CANCEL, ["cancelled", "never opened"], transfer_id=source.randbytes(16)),
        ]
    )


def _noisy_frame(source: random.Random, transfer_id: bytes) -> bytes:
    kind = source.choice(list(FrameType))
    length = source.choice([0, 1, 10, 100])
    is_chunk = kind in (FrameType.CHUNK, FrameType.PACKED, FrameType.LOSSY)
    count = source.choice([0, 1, 2, 10]) if is_chunk else 0
    head = Header(kind, 0, transfer_id, source.randrange(4), source.choice([0, 5, 490]), 0, count).encode()
    frame = bytearray(head[:8] + length.to_bytes(4, "little") + head[12:] + source.randbytes(length))
    if source.random() < 0.3:
        frame[source.randrange(len(frame))] ^= 1 << source.randrange(8)
    return bytes(frame)


def test_large_control_frames_are_read_a_few_at_a_time_and_those_of_other_peers_meanwhile(
    far: Far, near_to: Callable[..., Near]
) -> None:
    promise = Header(FrameType.OPEN, MAX_PAYLOAD_BYTES[FrameType.OPEN], bytes(16), offset=5).encode()
    greedy = [RawSender(far.address, name="greedy") for _ in range(MAX_LARGE_FRAMES + 1)]
    for peer in greedy:
        peer.connection.write(promise)  # and none of the 16 MiB, which are set aside for it
    with RawSender(far.address, name="honest") as honest:
        honest.open(10, body=bytes(2 * LARGE_FRAME_BYTES))
    assert "memory" not in far.receiver.refused, "the rest of them waits"
    _assert_good_peers_are_served(far, near_to)
    for peer in greedy:
        peer.connection.close()


def test_packed_chunks_of_one_peer_leave_room_for_those_of_others(far: Far) -> None:
    payload = bytes(10_000)
    packed = Packer().pack(payload, pack_formats(["lz4"])[0])
    assert packed is not None
    greedy = [RawSender(far.address, name="greedy") for _ in range(MAX_PACKED_FRAMES)]
    for peer in greedy:
        peer.connection.write(packed_header(bytes(16), Slab(0, 1, 0, 1), 0, packed_bytes=MAX_CHUNK_BYTES))
    with RawSender(far.address, name="honest") as honest:
        transfer_id, slab = honest.open(len(payload)), Slab(0, 1, 0, len(payload))
        checksum = chunk_checksum(transfer_id, slab, [memoryview(payload)])
        honest.connection.write(packed_header(transfer_id, slab, checksum, packed_bytes=len(packed)), packed)
        wait_until(lambda: bool(far.of(ReceiveCompleted)))
    assert "memory" not in far.receiver.refused
    for peer in greedy:
        peer.connection.close()


def test_one_peer_leaves_room_for_the_connections_of_others() -> None:
    far = make_far(max_connections=8)
    greedy = [RawSender(far.address, name="greedy") for _ in range(7)]
    assert greedy[6].refusal().message.startswith("connections")
    greedy[6].connection.close()
    wait_until(lambda: far.receiver.num_connections <= 6)
    others = [RawSender(far.address, name="honest") for _ in range(2)]
    for peer in others:
        peer.open(10)
    assert far.receiver.refused["connections"] == 1
    for peer in (*greedy, *others):
        peer.connection.close()
    far.receiver.close()


def test_what_opens_transfers_may_take_so_much_memory_and_that_of_one_peer_less(far: Far) -> None:
    with RawSender(far.address) as peer, RawSender(far.address, name="honest") as honest:
        answers = [_answer_to_open(peer, bytes(MAX_BODY_BYTES))]
        while answers[-1][0].type is FrameType.HAVE:
            answers.append(_answer_to_open(peer, bytes(MAX_BODY_BYTES)))
        assert len(answers) - 1 == 3 * MAX_OPENING_BYTES // (4 * MAX_BODY_BYTES)
        assert decode_ending(answers[-1][1]).reason == "no_memory"
        assert _answer_to_open(honest, bytes(MAX_BODY_BYTES))[0].type is FrameType.HAVE


def _answer_to_open(peer: RawSender, body: bytes) -> tuple[Header, bytes]:
    peer.connection.write(encode_open(os.urandom(16), Open(ObjectSizes.of([10]), 0, 60.0, body)))
    return peer.heard()


def test_the_sizes_of_objects_count_in_what_opens_transfers() -> None:
    sizes = ObjectSizes([(1 + number % 2, 1) for number in range(MAX_RUNS)])  # one, which all of these transfers share
    asked: list[OpenRequest] = []
    dispatcher = InboundDispatcher(
        accept=lambda request, reply: asked.append(request), on_event=lambda event: None, reconnect_seconds=60.0
    )
    connection, peer = (Connection(its, state=ConnectionState.SENDING) for its in socket.socketpair())
    while not peer.has_input():
        request = OpenRequest(os.urandom(16), "peer", b"", sizes, 60.0)
        dispatcher.open(connection, request)
    assert decode_ending(peer.read_payload(peer.read_header())).reason == "no_memory"
    assert len(asked) == 3 * MAX_OPENING_BYTES // (4 * RUN_BYTES * MAX_RUNS)
    connection.close()
    peer.close()


def test_of_why_a_peer_cancels_so_much_is_kept(far: Far) -> None:
    transfer_id = os.urandom(16)
    with RawSender(far.address) as peer:
        peer.connection.write(encode_ending(FrameType.CANCEL, transfer_id, Ending("cancelled", "\N{SNOWMAN}" * 500)))
        peer.connection.write(encode_open(transfer_id, Open(ObjectSizes.of([10]), 0, 60.0, b"")))
        assert decode_ending(peer.heard()[1]) == Ending("cancelled", "\N{SNOWMAN}" * 33)  # of three bytes each
        (failed,) = far.of(ReceiveFailed)
        assert isinstance(failed, ReceiveFailed) and len(failed.message.encode()) == 99
