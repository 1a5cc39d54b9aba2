"""Memory of each component of the wire, measured with slow peers: the bounds in docs/transport-reference.md."""

import contextlib
import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack

from prfaas.console.authority import Authority
from prfaas.transport.net.connection import Connection
from prfaas.transport.net.sockets import SEND_BUFFER_BYTES
from prfaas.transport.net.tls import CertificateFiles, Certificates
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.messages import MAX_OBJECTS, MAX_SLABS, Have, ObjectSizes, Open
from prfaas.transport.protocol.wire import MAX_CHUNK_BYTES, ConnectionState, FrameType, Header, chunk_header
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.receiver.api import Acceptance, OpenRequest
from prfaas.transport.receiver.dispatcher import InboundDispatcher
from prfaas.transport.receiver.reader import LARGE_FRAME_BYTES, SCRATCH_BYTES
from prfaas.transport.sender.api import SendAccepted, SendFailed, SendRequest
from prfaas.transport.sender.outbound_transfer import PeerState
from tests.support.raw_peers import RawReceiver, RawSender
from tests.support.transport_ends import Far, Near, fill_up, resident_bytes
from tests.support.waiting import PATIENCE_SECONDS, wait_until

MIB = 1 << 20
# Memory of a HAVE with every second of two million objects, afterwards and while it is decoded.
KEPT_BYTES, PEAK_BYTES = 85_000_000, 150_000_000
TLS_BYTES = 600_000  # Per connection under TLS.
CONNECTION_BYTES = 64 << 10  # Python objects of a connection, its threads and a header.
MAX_RECEIVE_BUFFER_BYTES = int(Path("/proc/sys/net/ipv4/tcp_rmem").read_text().split()[2])


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Provide a function that returns the peak of Python's memory since the start of the block."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield lambda: tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def _read_nothing_until(gate: threading.Event) -> Callable[[Connection], None]:
    """Accept a transfer, and then read nothing until the gate is open."""

    def serve(connection: Connection) -> None:
        header = connection.read_header()
        if header.type is FrameType.OPEN:
            connection.read_payload(header)
            connection.write(messages.encode_have(header.transfer_id, Have(Ranges(), ())))
        gate.wait(PATIENCE_SECONDS)

    return serve


def test_a_slow_reader_costs_its_sender_two_kernel_buffers_per_connection_and_no_copy(
    near_to: Callable[..., Near],
) -> None:
    piece, gate, count = memoryview(bytes(MIB)), threading.Event(), 2
    with RawReceiver(_read_nothing_until(gate)) as receiver:
        near = near_to(receiver.address, num_connections=count)
        near.link.open(SendRequest(bytes(16), b"", [MIB] * 2048, lambda index: piece, 0, 60.0))
        wait_until(lambda: bool(near.of(SendAccepted)))
        with traced() as grown:
            _fill(near)
            assert grown() < MAX_CHUNK_BYTES, "pending chunks are named, not copied"
        in_flight = near.link.snapshot().unacknowledged_bytes
        assert in_flight <= count * (2 * SEND_BUFFER_BYTES + MAX_RECEIVE_BUFFER_BYTES + MAX_CHUNK_BYTES)
        near.link.cancel(bytes(16), "cancelled", "seen enough")
        assert isinstance(near.end(bytes(16)), SendFailed), "its memory is free although nobody reads"
        gate.set()


def _fill(near: Near) -> None:
    """Let 2 GiB leave, and return when the kernels take no more."""
    near.link.ready(bytes(16), first_object=0, num_objects=2048, offset_bytes=0, length_bytes=MIB)
    amounts: list[int] = []

    def is_stuck() -> bool:
        amounts.append(near.link.snapshot().unacknowledged_bytes)
        return amounts[-1] > MAX_CHUNK_BYTES and amounts[-40:] == amounts[-1:] * 40

    wait_until(is_stuck, what="full kernel buffers")


def test_a_sender_that_stops_within_a_chunk_costs_its_receiver_a_header(far: Far) -> None:
    count = 40
    with traced() as grown:
        peers = [RawSender(far.address, name=f"stops{number}") for number in range(count)]
        ids = [peer.open(MAX_CHUNK_BYTES) for peer in peers]
        for peer, transfer_id in zip(peers, ids, strict=True):
            peer.connection.write(chunk_header(transfer_id, Slab(0, 1, 0, MAX_CHUNK_BYTES), 0) + b"\x01" * 1000)
        wait_until(lambda: all(far.memory[transfer_id][0][999] for transfer_id in ids))
        slots = count * MAX_CHUNK_BYTES  # The test holds this memory in place of a pool.
        assert grown() - slots < 2 * count * CONNECTION_BYTES, "both ends are in this process"
        for peer in peers:
            peer.connection.close()


def test_unwanted_chunks_cost_their_receiver_a_small_buffer_each(far: Far) -> None:
    count, payload = 40, memoryview(bytes(MAX_CHUNK_BYTES))
    with traced() as grown:
        peers = [RawSender(far.address, name=f"probes{number}") for number in range(count)]
        for peer in peers:
            peer.connection.write(chunk_header(os.urandom(16), Slab(0, 1, 0, len(payload)), 0), payload[:1000])
        for peer in peers:
            peer.connection.write(payload[1000:])
            assert FrameType.REOPEN in peer.ping()
        assert grown() < count * (SCRATCH_BYTES + 2 * CONNECTION_BYTES)
        for peer in peers:
            peer.connection.close()


def test_slow_control_frames_cost_their_receiver_their_length(far: Far) -> None:
    count, body = 40, bytes(LARGE_FRAME_BYTES - 100)
    with traced() as grown:
        peers = [RawSender(far.address, name=f"stops{number}") for number in range(count)]
        ids = [os.urandom(16) for _ in peers]
        for peer, transfer_id in zip(peers, ids, strict=True):
            opened = messages.encode_open(transfer_id, Open(ObjectSizes.of([10]), 0, PATIENCE_SECONDS, body))
            peer.connection.write(opened[:-1])
        for peer in peers:
            peer.connection.write(body[:1])
        wait_until(lambda: ids[0] in far.memory and len(far.memory) == count)
        assert grown() < count * (3 * LARGE_FRAME_BYTES + 2 * CONNECTION_BYTES)
        for peer in peers:
            peer.connection.close()


def test_a_decoded_have_takes_bounded_memory() -> None:
    """The bounds hold for every second of two million objects; the test uses a 32nd of them, as tracing is slow."""
    count = MAX_OBJECTS // 32
    held, sizes = b"\x55" * (count // 8), ObjectSizes([(1, count)])
    structure: bytes = msgpack.packb([[]])
    header = Header(FrameType.HAVE, len(structure) + len(held), bytes(16), offset=len(structure))
    PeerState.of(messages.decode_have(header, bytearray(structure + held), num_objects=count), sizes)  # Fills caches.
    tracemalloc.start()
    standing = PeerState.of(messages.decode_have(header, bytearray(structure + held), num_objects=count), sizes)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < KEPT_BYTES // 32 and peak < PEAK_BYTES // 32
    assert standing.missing_bytes == count // 2


def test_a_connection_under_tls_costs_two_batches(tmp_path: Path) -> None:
    authority, count = Authority(tmp_path), 32
    files = [authority.issue(name) for name in ("near", "far")]
    ends = [Certificates(CertificateFiles(file.authority, file.certificate, file.key)) for file in files]
    with contextlib.ExitStack() as stack:
        _exchange(stack, *ends)  # Loads what is loaded once.
        before = resident_bytes()
        for _ in range(count):
            _exchange(stack, *ends)
        assert resident_bytes() - before < count * 2 * (TLS_BYTES + CONNECTION_BYTES)


def _exchange(stack: contextlib.ExitStack, near: Certificates, far: Certificates) -> None:
    """Open another connection and send several chunks over it."""
    local, remote = (Connection(end, state=ConnectionState.SENDING) for end in socket.socketpair())
    stack.callback(local.close)
    stack.callback(remote.close)

    def listen() -> None:
        remote.secure(far, is_listener=True)
        received = memoryview(bytearray(MAX_CHUNK_BYTES))
        for _ in range(4):
            remote.read_into([received])

    listening = threading.Thread(target=listen)
    listening.start()
    local.secure(near, is_listener=False)
    for _ in range(4):
        local.write(bytes(MAX_CHUNK_BYTES))
    listening.join()


def test_a_long_have_is_not_made_while_no_connection_takes_it() -> None:
    dispatcher = InboundDispatcher(
        accept=lambda request, reply: reply(
            Acceptance(held=(), destination=lambda index: memoryview(bytearray(2 * MAX_SLABS)))
        ),
        on_event=lambda event: None,
        silence_seconds=PATIENCE_SECONDS,
    )
    local, remote = socket.socketpair()
    connection, peer = (
        Connection(local, state=ConnectionState.RECEIVING),
        Connection(remote, state=ConnectionState.SENDING),
    )
    peer.set_read_timeout(PATIENCE_SECONDS)
    sizes, transfer_id = ObjectSizes.of([2 * MAX_SLABS]), os.urandom(16)
    request = OpenRequest(transfer_id, "peer", b"", sizes, PATIENCE_SECONDS)
    with contextlib.closing(connection), contextlib.closing(peer):
        dispatcher.open(connection, request)
        peer.read_payload(peer.read_header())
        for at in range(MAX_SLABS):
            header = Header(FrameType.CHUNK, 1, transfer_id, offset=2 * at, count=1)
            assert dispatcher.begin_write(connection, "peer", header, wire_bytes=1) is not None
            dispatcher.end_write(connection, header, "complete")
        with traced() as grown:
            num_bytes = fill_up(local)
            dispatcher.open(connection, request)
            for _ in range(3):
                dispatcher.tick(time.monotonic())
            assert grown() < 8 * MAX_SLABS, "not even a pointer per fragment"
        peer.read_into([memoryview(bytearray(num_bytes))])
        dispatcher.tick(time.monotonic())
        header = peer.read_header()
        assert len(messages.decode_have(header, peer.read_payload(header), num_objects=1).arrived) == MAX_SLABS
