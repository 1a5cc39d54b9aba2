"""Stalled connections, suspended peers, and frames that take long."""

import os
import threading
from collections.abc import Callable

import pytest
from prometheus_client import REGISTRY

from prfaas.transport.congestion import stall_detector
from prfaas.transport.congestion.rate_budget import RateBudget
from prfaas.transport.net.connection import SILENCE_SECONDS, Connection
from prfaas.transport.protocol.messages import (
    Have,
    ObjectSizes,
    Open,
    TransferStats,
    encode_done,
    encode_have,
    encode_open,
)
from prfaas.transport.protocol.wire import HEADER_BYTES, FrameType, Header, chunk_checksum, chunk_header
from prfaas.transport.ranges import Area, Ranges, Slab
from prfaas.transport.receiver.reader import LARGE_FRAME_BYTES
from prfaas.transport.sender.api import SendRequest
from prfaas.transport.sender.connection_worker import MAX_UNACKNOWLEDGED
from prfaas.transport.sender.outbound_transfer import SLOW_BYTES_PER_SECOND
from tests.support.raw_peers import RawReceiver, RawSender
from tests.support.transport_ends import Far, Near, make_ready, objects_of, send
from tests.support.waiting import PATIENCE_SECONDS, wait_until

MIB = 1 << 20
PONG = Header(FrameType.PONG, 0).encode()


def _num_stalls() -> float | None:
    """Return the number of stalls from the metrics."""
    return REGISTRY.get_sample_value("prfaas_agent_link_stalls_total", {"peer": "far"})


def test_chunks_of_a_stalled_connection_arrive_over_the_others(
    near_to: Callable[..., Near], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_detector, "STALL_SECONDS", 0.5)
    # The stalled connection answers PINGs, so that nothing else ends it.
    objects, arrived, lock = objects_of(*[MIB] * 8), Area(), threading.Lock()
    stuck: list[Connection] = []

    def serve(connection: Connection) -> None:
        num_chunks = 0
        while True:
            header = connection.read_header()
            connection.read_payload(header)
            if header.type is FrameType.PING:
                connection.write(PONG)
            elif header.type is FrameType.OPEN:
                with lock:
                    connection.write(encode_have(header.transfer_id, Have(Ranges(), tuple(arrived.slabs()))))
            elif header.type is FrameType.CHUNK:
                with lock:
                    stuck.extend(() if stuck else (connection,))
                    if connection is stuck[0]:
                        continue
                    num_chunks += 1
                    arrived.add(header.slab)
                    connection.write(Header(FrameType.ACK, 0, offset=num_chunks).encode())
                    if arrived.num_bytes == 8 * MIB:
                        connection.write(encode_done(header.transfer_id, TransferStats(8 * MIB, 0)))

    with RawReceiver(serve) as receiver:
        near = near_to(receiver.address)
        transfer_id = send(near, objects, ready=False)
        wait_until(lambda: near.link.snapshot().num_connections == 4)
        before = _num_stalls()
        assert before is not None, "the counter exists before the first stall"
        make_ready(near, transfer_id, objects, range(8))
        near.assert_completed(transfer_id)
        assert stuck and (_num_stalls() or 0) > before


@pytest.mark.soak
def test_open_that_takes_longer_than_the_silence_limit_arrives(far: Far, near_to: Callable[..., Near]) -> None:
    bytes_per_second, transfer_id = 200_000, os.urandom(16)
    near = near_to(far.address, num_connections=1, budgets=(RateBudget(bytes_per_second),), silence_seconds=3.0)
    body = bytes(int((SILENCE_SECONDS + 8) * bytes_per_second))
    near.link.open(SendRequest(transfer_id, body, [], lambda index: memoryview(b""), 0, PATIENCE_SECONDS))
    near.assert_completed(transfer_id)


@pytest.mark.soak
def test_long_open_on_a_slow_link_is_not_sent_twice_at_once(near_to: Callable[..., Near]) -> None:
    # With every copy a smaller share of the link would be left, until none arrives in time.
    transfer_id, lock, num_coming, most_coming = os.urandom(16), threading.Lock(), 0, 0

    def serve(connection: Connection) -> None:
        nonlocal num_coming, most_coming
        while True:
            header = connection.read_header()
            with lock:
                num_coming += header.type is FrameType.OPEN
                most_coming = max(most_coming, num_coming)
            connection.read_payload(header)
            if header.type is FrameType.PING:
                connection.write(PONG)
            elif header.type is FrameType.OPEN:
                with lock:
                    num_coming -= 1
                connection.write(encode_have(transfer_id, Have(Ranges(), ())))
                connection.write(encode_done(transfer_id, TransferStats(0, 0)))

    with RawReceiver(serve) as receiver:
        near = near_to(receiver.address, num_connections=2, budgets=(RateBudget(600_000),))
        # On one of the connections the body takes longer than the time until it is repeated.
        body = bytes(int(4 * SLOW_BYTES_PER_SECOND))
        near.link.open(SendRequest(transfer_id, body, [], lambda index: memoryview(b""), 0, PATIENCE_SECONDS))
        near.assert_completed(transfer_id)
        assert most_coming == 1


def test_chunks_are_acknowledged_before_a_long_frame_is_read(far: Far) -> None:
    # The frame may take a minute. Without acknowledgements the connection would look stalled.
    long = encode_open(os.urandom(16), Open(ObjectSizes(()), 0, PATIENCE_SECONDS, bytes(LARGE_FRAME_BYTES)))
    with RawSender(far.address) as raw:
        transfer_id, frames = raw.open(10, 10, 10), b""
        # The first chunk is acknowledged at once in any case.
        for slab in (Slab(0, 1, 0, 10), Slab(1, 1, 0, 10)):
            frames += chunk_header(transfer_id, slab, chunk_checksum(transfer_id, slab, [memoryview(bytes(10))]))
            frames += bytes(10)
        raw.connection.write(frames + long[:HEADER_BYTES])
        while (header := raw.heard()[0]).offset < 2:
            assert header.type is FrameType.ACK


def test_unacknowledged_chunks_of_a_connection_are_bounded(near_to: Callable[..., Near]) -> None:
    goes_on, num_heard, count = threading.Event(), 0, 2 * MAX_UNACKNOWLEDGED

    def serve(connection: Connection) -> None:
        nonlocal num_heard
        while True:
            header = connection.read_header()
            connection.read_payload(header)
            if header.type is FrameType.PING:
                connection.write(PONG)
            elif header.type is FrameType.OPEN:
                connection.write(encode_have(header.transfer_id, Have(Ranges(), ())))
            elif header.type is FrameType.CHUNK:
                num_heard += 1
                if num_heard in (MAX_UNACKNOWLEDGED, count):
                    goes_on.wait(PATIENCE_SECONDS)
                    connection.write(Header(FrameType.ACK, 0, offset=num_heard).encode())
                if num_heard == count:
                    connection.write(encode_done(header.transfer_id, TransferStats(count, 0)))

    with RawReceiver(serve) as receiver:
        near = near_to(receiver.address, num_connections=1)
        transfer_id = os.urandom(16)
        near.link.open(
            SendRequest(transfer_id, b"", [1] * 2 * count, lambda index: memoryview(b"x"), 0, 2 * PATIENCE_SECONDS)
        )
        # Gaps between the ready objects keep each in a chunk of its own.
        for number in range(count):
            near.link.ready(transfer_id, first_object=2 * number, num_objects=1, offset_bytes=0, length_bytes=1)
        wait_until(lambda: num_heard == MAX_UNACKNOWLEDGED == near.link.snapshot().unacknowledged_bytes)
        goes_on.set()
        near.assert_completed(transfer_id)
