"""Workers of a link: the work that they take, the reports that they make, and how their connections end."""

import contextlib
import dataclasses
import socket
from collections.abc import Iterator

import pytest

from prfaas.errors import RemoteProtocolError
from prfaas.transport.codec.packing import LinkLoad
from prfaas.transport.congestion.stall_detector import MOVING_SECONDS
from prfaas.transport.net.connection import Connection
from prfaas.transport.net.sockets import TcpInfo
from prfaas.transport.protocol.messages import decode_ending, encode_refusal
from prfaas.transport.protocol.wire import HEADER_BYTES, ConnectionState, FrameType, Header
from prfaas.transport.sender.api import SendAccepted, SendProgress
from prfaas.transport.sender.connection_worker import ConnectionWorker
from tests.support.links import FIRST_PROCESS, TRANSFER_ID, IdleLink, two_workers
from tests.support.waiting import PATIENCE_SECONDS

SECOND_PROCESS = b"s" * 16
IDLE = TcpInfo(0.0, 0.03, 0.03, 0, 0, 1448, 0, 0, 0, 0, 0)
UNSENT_ACK = Header(FrameType.ACK, 0, offset=5).encode()
Workers = tuple[ConnectionWorker, ConnectionWorker]


@pytest.fixture
def link() -> IdleLink:
    return IdleLink()


@pytest.fixture
def two(link: IdleLink) -> Iterator[Workers]:
    with two_workers(link, link.workers) as workers:
        yield workers


def _frame_type(frame: object) -> FrameType:
    assert isinstance(frame, bytes)
    return Header.decode(frame[:HEADER_BYTES]).type


# Work of a link


def test_worker_sends_open_and_then_the_bytes_that_the_peer_lacks(link: IdleLink, two: Workers) -> None:
    worker, _ = two
    assert _frame_type(link.take(worker)) is FrameType.OPEN
    assert (worker.last_control, worker.reading) == (TRANSFER_ID, None)
    assert link.take(worker) is None, "nothing leaves before the peer has said what it holds"
    link.hear_have(worker)
    assert [type(event) for event in link.events] == [SendAccepted]
    chunk = link.take_chunk(worker).chunk
    assert (worker.last_control, worker.reading) == (None, TRANSFER_ID)
    link.sent(worker, chunk, [])
    assert worker.reading is None
    link.on_acknowledged(worker, [chunk], [])
    assert isinstance(link.events[-1], SendProgress) and link.events[-1].acked_bytes == chunk.slab.num_bytes


def test_damaged_chunk_leaves_again(link: IdleLink, two: Workers) -> None:
    worker, second_worker = two
    link.take(worker)
    link.hear_have(worker)
    chunk = link.take_chunk(worker).chunk
    link.sent(worker, chunk, [])
    assert _frame_type(link.take(worker)) is FrameType.END
    assert link.take(worker) is None
    link.on_acknowledged(worker, [], [chunk])
    assert link.take_chunk(second_worker).chunk == chunk


def test_reports_of_connections_to_an_earlier_process_are_ignored(link: IdleLink, two: Workers) -> None:
    worker, _ = two
    link.take(worker)
    link.hear_have(worker)
    chunk, num_events = link.take_chunk(worker).chunk, len(link.events)
    link.workers.set_process(SECOND_PROCESS)
    link.outbox.connection_lost(is_last=True)
    link.hear_have(worker)
    link.on_acknowledged(worker, [chunk], [])
    assert len(link.events) == num_events
    assert link.outbox.sizes_awaiting_have(TRANSFER_ID) is not None


def test_have_that_nobody_awaits_is_not_decoded(link: IdleLink, two: Workers) -> None:
    worker, _ = two
    link.hear_have(worker, transfer_id=SECOND_PROCESS, suffix=b"malformed")
    with pytest.raises(RemoteProtocolError):
        link.hear_have(worker, suffix=b"malformed")


def test_dead_or_unwanted_worker_gets_no_work(link: IdleLink, two: Workers) -> None:
    worker, second_worker = two
    assert link.has_work(worker)
    worker.abort()
    assert link.take(worker) is None
    with pytest.raises(ConnectionAbortedError):
        link.has_work(worker)
    assert link.take(second_worker) is not None
    assert not link.has_work(second_worker)
    link.expire()
    with pytest.raises(ConnectionAbortedError):
        link.has_work(second_worker)


def test_a_chunk_for_a_full_link_is_a_packing_trial(link: IdleLink, two: Workers) -> None:
    worker, _ = two
    link.take(worker)
    link.hear_have(worker)
    for at in (0.0, 2.0):
        link.monitor.packing.observe(LinkLoad(at, 1e6, 1, is_full=True, acknowledged_bytes=int(at * 1e6)))
    task = link.take_chunk(worker)
    assert task.pack_format is None and task.is_trial


# Set of workers


def test_new_process_ends_the_connections_to_the_earlier_one(link: IdleLink, two: Workers) -> None:
    assert not link.workers.set_process(FIRST_PROCESS)
    assert all(worker.is_alive and worker.generation == link.workers.generation for worker in two)
    assert link.workers.set_process(SECOND_PROCESS)
    assert not any(worker.is_alive or worker.generation == link.workers.generation for worker in two)
    assert link.workers.process == SECOND_PROCESS


def test_control_frame_is_leaving_while_the_peer_takes_unsent_bytes(link: IdleLink, two: Workers) -> None:
    for worker, transfer_id in zip(two, (b"first", b"second"), strict=True):
        worker.last_control, worker.liveness.moved_at = transfer_id, 100.0
    two[0].seen = dataclasses.replace(IDLE, unsent_bytes=1)
    assert link.workers.transfers_leaving(100.0 + MOVING_SECONDS) == {b"first"}
    assert link.workers.transfers_leaving(100.1 + MOVING_SECONDS) == set()


# Ends of a connection


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    """Both ends of a connection: the worker's and the peer's."""
    near, far = socket.socketpair()
    connection, peer = Connection(near, state=ConnectionState.SENDING), Connection(far, state=ConnectionState.RECEIVING)
    peer.set_read_timeout(PATIENCE_SECONDS)
    with contextlib.closing(connection), contextlib.closing(peer):
        yield connection, peer


@pytest.mark.parametrize(
    ("frame", "reason"),
    [(UNSENT_ACK, "ack"), (encode_refusal(RemoteProtocolError("memory", "come again")), "refused")],
    ids=["acknowledges unsent chunks", "refuses"],
)
def test_peer_that_violates_the_protocol_or_refuses_is_told_the_reason(
    link: IdleLink, ends: tuple[Connection, Connection], frame: bytes, reason: str
) -> None:
    connection, peer = ends
    worker = ConnectionWorker(link, connection, generation=link.workers.generation)
    peer.write(frame)
    with pytest.raises(RemoteProtocolError) as refused:
        worker.run()
    assert refused.value.reason == reason and not worker.is_alive
    assert connection.try_write(encode_refusal(refused.value))
    while (header := peer.read_header()).type is not FrameType.ERROR:
        peer.read_payload(header)
    assert decode_ending(peer.read_payload(header)).message.startswith(f"{reason}: ")


def test_worker_whose_peer_is_gone_raises_and_sends_nothing_more(
    link: IdleLink, ends: tuple[Connection, Connection]
) -> None:
    connection, peer = ends
    worker = ConnectionWorker(link, connection, generation=link.workers.generation)
    peer.close()
    with pytest.raises(ConnectionError):
        worker.run()
    assert not worker.is_alive and not connection.try_write(UNSENT_ACK)
