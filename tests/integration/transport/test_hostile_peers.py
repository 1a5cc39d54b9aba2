"""Strangers, floods and peers that break the protocol: each is refused and counted, and harms nobody else."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import REGISTRY

from prfaas.errors import RemoteProtocolError
from prfaas.transport.codec.packing import Packer, pack_formats
from prfaas.transport.net import connection as connection_module
from prfaas.transport.net import handshake
from prfaas.transport.net.connection import Connection
from prfaas.transport.net.handshake import Identity
from prfaas.transport.protocol.messages import (
    MAX_OBJECTS,
    Hello,
    ObjectSizes,
    Open,
    decode_ending,
    encode_hello,
    encode_open,
    encode_refusal,
)
from prfaas.transport.protocol.wire import (
    HEADER_BYTES,
    MAX_CHUNK_BYTES,
    MAX_PAYLOAD_BYTES,
    FrameType,
    Header,
    chunk_checksum,
    chunk_header,
    control,
    packed_header,
)
from prfaas.transport.ranges import Slab
from prfaas.transport.receiver.api import Acceptance, Decision, ReceiveCompleted
from prfaas.transport.receiver.reader import LARGE_FRAME_BYTES, MAX_LARGE_FRAMES, MAX_PACKED_FRAMES
from prfaas.transport.receiver.server import MAX_STRANGERS, Receiver, ReceiverConfig, source_of
from prfaas.transport.receiver.transfers import HAVE_SECONDS
from prfaas.transport.sender.api import SendCompleted, SendFailed
from tests.support.raw_peers import RawReceiver, RawSender
from tests.support.transport_ends import KEY, Far, Near, make_far, objects_of, send
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.link import Relay

HELLO = encode_hello(Hello("near", bytes(32), (1,), ()))


def _connect(far: Far) -> socket.socket:
    host, _, port = far.address.rpartition(":")
    stranger = socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)
    stranger.settimeout(PATIENCE_SECONDS)
    return stranger


def _await_close(stranger: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):  # The receiver may close with unread bytes.
        while stranger.recv(4096):
            pass


def _assert_good_peers_are_served(far: Far, near_to: Callable[..., Near]) -> None:
    near = near_to(far.address)
    assert isinstance(near.end(send(near, objects_of(100_000))), SendCompleted)


def _num_refusals(reason: str) -> float:
    return REGISTRY.get_sample_value("prfaas_agent_wire_refusals_total", {"reason": reason}) or 0.0


@contextlib.contextmanager
def _senders(far: Far, *names: str) -> Iterator[list[RawSender]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(RawSender(far.address, name=name)) for name in names]


# Strangers


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
        (HELLO + control(FrameType.PROOF, [bytes(32)]), "secret"),
        (HELLO + HELLO, "order"),
        (HELLO + encode_refusal(RemoteProtocolError("name", "you are somebody else")), "refused"),
        (HELLO[:8] + b"\xff\xff\xff\xff" + HELLO[12:], "length"),
        (b"PRFS\x02" + HELLO[5:], "version"),
    ],
)
def test_a_stranger_is_refused_by_reason_and_other_connections_go_on(
    far: Far, near_to: Callable[..., Near], garbage: bytes, reason: str
) -> None:
    num_before = _num_refusals(reason)
    with _connect(far) as stranger:
        stranger.sendall(garbage)
        _await_close(stranger)
    wait_until(lambda: far.receiver.refused == {reason: 1})
    assert _num_refusals(reason) == num_before + 1
    _assert_good_peers_are_served(far, near_to)


def test_an_agent_with_another_secret_is_counted_at_both_ends(far: Far, near_to: Callable[..., Near]) -> None:
    num_before = _num_refusals("secret")
    near = near_to(far.address, key=b"x" * 32, num_connections=1)
    send(near, objects_of(10))
    wait_until(lambda: far.receiver.refused.keys() == {"secret"})
    wait_until(lambda: _num_refusals("secret") - num_before > far.receiver.refused["secret"], what="the sender's count")


def test_a_recorded_handshake_proves_nothing(far: Far) -> None:
    """The bytes of a real peer are replayed, but the receiver's nonce is another one."""
    recorded = bytearray()

    def record(data: bytes) -> bytes:
        recorded.extend(data)
        return data

    with Relay(far.address) as relay:
        relay.filter(lambda: record)
        with RawSender(relay.address):
            pass
    with _connect(far) as stranger:
        stranger.sendall(recorded)
        _await_close(stranger)
    wait_until(lambda: far.receiver.refused == {"secret": 1})


def test_a_flood_from_one_source_displaces_only_its_own_strangers(far: Far) -> None:
    wait_until(lambda: _can_shake_hands_after_a_flood(far), what="a handshake that a flood began within")


def _can_shake_hands_after_a_flood(far: Far) -> bool:
    """Return whether a stranger from another source is served; a slow machine may time it out."""
    (host, _, port), num_before = far.address.rpartition(":"), sum(far.receiver.refused.values())
    with _connect(far) as honest, contextlib.ExitStack() as flood:
        for _ in range(2 * MAX_STRANGERS):
            source = ("127.0.0.2", 0)
            flood.enter_context(socket.create_connection((host, int(port)), PATIENCE_SECONDS, source_address=source))
        wait_until(lambda: sum(far.receiver.refused.values()) >= num_before + MAX_STRANGERS)
        with contextlib.suppress(OSError):
            handshake.dial(Connection(honest), Identity("late", KEY), peer_name="far")
            return True
    return False


@pytest.mark.parametrize(
    ("address", "source"), [("10.0.0.7", "10.0.0.7"), ("fd00:0:0:1:2:3:4:5", "fd00:0:0:1::/64"), ("fe80::7", "fe80::7")]
)
def test_the_source_of_an_ipv6_address_is_its_network(address: str, source: str) -> None:
    assert source_of(address) == source


def test_a_handshake_that_trickles_ends(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "HANDSHAKE_SECONDS", 0.5)
    with _connect(far) as stranger:
        stranger.sendall(HELLO[:20])
        _await_close(stranger)
    wait_until(lambda: far.receiver.num_connections == 0)
    assert far.receiver.refused == {"slow": 1}


def test_one_peer_leaves_room_for_the_connections_of_others() -> None:
    far = make_far(max_connections=8)
    with _senders(far, *["greedy"] * 7):
        wait_until(lambda: far.receiver.refused == {"connections": 1})
        wait_until(lambda: far.receiver.num_connections <= 6)
        with _senders(far, "honest", "honest") as others:
            for peer in others:
                peer.open(10)
    assert far.receiver.refused == {"connections": 1}
    far.receiver.close()


# Peers that break the protocol


def test_a_sender_that_gives_a_reason_for_leaving_is_counted(far: Far) -> None:
    with RawSender(far.address) as raw:
        raw.connection.write(encode_refusal(RemoteProtocolError("body", "HAVE of another form")))
        assert raw.refusal().message == "refused: body: HAVE of another form"
    assert far.receiver.refused == {"refused": 1}


def test_a_receiver_that_breaks_the_protocol_is_told_why_and_counted(near_to: Callable[..., Near]) -> None:
    heard: list[str] = []

    def break_the_protocol(connection: Connection) -> None:
        connection.write(bytes(HEADER_BYTES))
        while (header := connection.read_header()).type is not FrameType.ERROR:
            connection.read_payload(header)
        heard.append(decode_ending(connection.read_payload(header)).message)

    num_before = _num_refusals("magic")
    with RawReceiver(break_the_protocol) as receiver:
        send(near_to(receiver.address, num_connections=1), objects_of(10))
        wait_until(lambda: bool(heard))
    assert heard[0].startswith("magic:")
    assert _num_refusals("magic") > num_before


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
    is_left = threading.Event()

    def serve(connection: Connection) -> None:
        connection.write(frame)
        try:
            while True:
                connection.read_payload(connection.read_header())
        finally:
            is_left.set()

    with RawReceiver(serve) as receiver:
        near = near_to(receiver.address)
        end = near.end(send(near, objects_of(1000), deadline=0.2))
        assert isinstance(end, SendFailed) and end.reason == "deadline"
        wait_until(is_left.is_set, what="the end of the connection")


def test_a_receiver_that_refuses_every_connection_is_dialled_ever_more_slowly_and_its_reason_is_kept(
    near_to: Callable[..., Near],
) -> None:
    served: list[Connection] = []

    def refuse(connection: Connection) -> None:
        served.append(connection)
        connection.write(control(FrameType.ERROR, ["protocol", "fragments: too many"]))

    with RawReceiver(refuse) as receiver:
        near = near_to(receiver.address, num_connections=1, silence_seconds=0.4)

        def has_reason() -> bool:
            """Return whether the failure names the refusal; while the next connection is made, it does not."""
            end = near.end(send(near, objects_of(1000)))
            assert isinstance(end, SendFailed) and end.reason == "unreachable"
            return "fragments: too many" in end.message

        wait_until(has_reason, what="the receiver's reason")
    assert len(served) < 20


def test_a_sender_that_goes_on_after_its_refusal_still_reads_the_reason(far: Far) -> None:
    with RawSender(far.address) as raw:
        transfer_id = raw.open(100)
        raw.chunk(transfer_id, Slab(0, 1, 90, 20), bytes(20))
        wait_until(lambda: far.receiver.refused == {"range": 1})
        for _ in range(20):  # On a connection that was reset, the second write would fail.
            raw.chunk(transfer_id, Slab(0, 1, 0, 10), bytes(10))
        assert raw.refusal().message.startswith("range")


@pytest.mark.parametrize("slab", [Slab(0, 1, 50, 100), Slab(1, 1, 0, 10), Slab(0, 1, (1 << 64) - 1, 10)])
def test_a_chunk_outside_the_missing_objects_ends_its_connection(far: Far, slab: Slab) -> None:
    far.held = {1}
    with RawSender(far.address) as raw:
        transfer_id = raw.open(100, 100)
        raw.chunk(transfer_id, slab, bytes(slab.num_bytes))
        assert raw.refusal().message.startswith("range")
    assert far.receiver.refused == {"range": 1}
    assert not any(any(content) for content in far.memory[transfer_id])


def test_no_peer_writes_into_the_transfer_of_another(far: Far) -> None:
    with _senders(far, "owner", "thief") as (owner, thief):
        transfer_id = owner.open(100)
        thief.chunk(transfer_id, Slab(0, 1, 0, 100), b"x" * 100)
        assert thief.refusal().message.startswith("owner")
        assert not any(far.memory[transfer_id][0])
        owner.chunk(transfer_id, Slab(0, 1, 0, 100), b"y" * 100)
        wait_until(lambda: bool(far.of(ReceiveCompleted)))


def test_no_peer_opens_cancels_or_ends_the_transfer_of_another(far: Far) -> None:
    with _senders(far, "owner", "thief") as (owner, thief):
        transfer_id = owner.open(100)
        with pytest.raises(AssertionError):
            thief.open(100, transfer_id=transfer_id)
        thief.connection.write(control(FrameType.CANCEL, ["cancelled", "mine"], transfer_id=transfer_id))
        thief.connection.write(Header(FrameType.END, 0, transfer_id, offset=5).encode())
        assert thief.ping() == [FrameType.PONG]
        owner.chunk(transfer_id, Slab(0, 1, 0, 100), b"y" * 100)
        wait_until(lambda: bool(far.of(ReceiveCompleted)))


def test_chunks_of_an_unknown_transfer_are_answered_with_one_reopen(far: Far) -> None:
    with RawSender(far.address) as raw:
        for _ in range(3):
            raw.chunk(bytes(16), Slab(0, 1, 0, 100), bytes(100))
        assert raw.ping().count(FrameType.REOPEN) == 1


# Slow peers


@pytest.mark.parametrize(("num_objects", "count"), [(16384, 400), (MAX_OBJECTS, 16)])
def test_every_open_of_a_peer_that_reads_late_is_answered_and_no_thread_waits_for_it(
    num_objects: int, count: int
) -> None:
    replies: list[Callable[[Decision], None]] = []
    receiver = Receiver(
        ReceiverConfig("127.0.0.1:0"),
        local_name="far",
        key=KEY,
        accept=lambda request, reply: replies.append(reply),
        on_event=lambda event: None,
    )
    opened = Open(ObjectSizes([(1, num_objects)]), 0, PATIENCE_SECONDS, b"body")
    transfers = [number.to_bytes(16, "big") for number in range(count)]
    with RawSender(receiver.start()) as raw:
        for transfer_id in transfers:
            raw.connection.write(encode_open(transfer_id, opened))
        wait_until(lambda: len(replies) == len(transfers))
        for reply in replies:  # Each HAVE has a bit per object: together more than the kernel takes.
            reply(Acceptance(held={num_objects - 1}, destination=lambda _: memoryview(b"")))
        heard = [raw.heard()[0] for _ in transfers]
    assert sorted((header.transfer_id, header.type) for header in heard) == [
        (transfer_id, FrameType.HAVE) for transfer_id in transfers
    ]
    receiver.close()


def test_an_open_that_is_repeated_without_end_is_answered_at_a_bounded_rate(far: Far) -> None:
    with RawSender(far.address) as raw:
        began_at = time.monotonic()
        transfer_id = raw.open(100)
        repeated = encode_open(transfer_id, Open(ObjectSizes.of([100]), 0, PATIENCE_SECONDS, b"body"))
        for _ in range(1000):
            raw.connection.write(repeated)
        num_haves = raw.ping().count(FrameType.HAVE)
        max_haves = 2 + 2 * (time.monotonic() - began_at) / HAVE_SECONDS  # One at once and one at each tick.
        assert num_haves <= max_haves
        raw.connection.write(repeated)
        assert raw.heard()[0].type is FrameType.HAVE, "the last OPEN is answered, if later"


def test_a_sender_that_stops_within_a_chunk_delays_nobody_else(far: Far, near_to: Callable[..., Near]) -> None:
    with _senders(far, *(f"slow{number}" for number in range(20))) as slow:
        for raw in slow:
            transfer_id = raw.open(MAX_CHUNK_BYTES)
            raw.connection.write(chunk_header(transfer_id, Slab(0, 1, 0, MAX_CHUNK_BYTES), 0) + bytes(100))
        _assert_good_peers_are_served(far, near_to)
        assert far.receiver.num_connections >= len(slow)


def test_large_control_frames_of_one_peer_leave_room_for_others(far: Far, near_to: Callable[..., Near]) -> None:
    promise = Header(FrameType.OPEN, MAX_PAYLOAD_BYTES[FrameType.OPEN], bytes(16), offset=5).encode()
    with _senders(far, *["greedy"] * (MAX_LARGE_FRAMES + 1), "honest") as (*greedy, honest):
        for raw in greedy:
            raw.connection.write(promise)  # None of the 16 MiB follow.
        honest.open(10, body=bytes(2 * LARGE_FRAME_BYTES))
        assert "memory" not in far.receiver.refused, "the other frames wait"
        _assert_good_peers_are_served(far, near_to)


def test_packed_chunks_of_one_peer_leave_room_for_others(far: Far) -> None:
    payload = bytes(10_000)
    packed = Packer().pack(payload, pack_formats(["lz4"])[0])
    assert packed is not None
    with _senders(far, *["greedy"] * MAX_PACKED_FRAMES, "honest") as (*greedy, honest):
        for raw in greedy:
            raw.connection.write(packed_header(bytes(16), Slab(0, 1, 0, 1), 0, packed_bytes=MAX_CHUNK_BYTES))
        transfer_id, slab = honest.open(len(payload)), Slab(0, 1, 0, len(payload))
        checksum = chunk_checksum(transfer_id, slab, [memoryview(payload)])
        honest.connection.write(packed_header(transfer_id, slab, checksum, packed_bytes=len(packed)), packed)
        wait_until(lambda: bool(far.of(ReceiveCompleted)))
        assert "memory" not in far.receiver.refused


# Noise
