"""Inbound transfers over sockets: rival writers, and replies that no connection takes at once."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from queue import Queue

import pytest

from prfaas.transport.net.connection import Connection
from prfaas.transport.protocol.messages import EndReason, Have, ObjectSizes, encode_ending, encode_have
from prfaas.transport.protocol.wire import ConnectionState, FrameType, Header
from prfaas.transport.ranges import Ranges
from prfaas.transport.receiver import dispatcher as dispatcher_module
from prfaas.transport.receiver.api import Acceptance, OpenRequest
from prfaas.transport.receiver.dispatcher import MAX_PENDING_REPLIES, InboundDispatcher, ReplyQueue
from prfaas.transport.receiver.transfers import Reply
from tests.support.transport_ends import fill_up
from tests.support.waiting import PATIENCE_SECONDS

ID = bytes(range(16))
ERROR = encode_ending(FrameType.ERROR, ID, EndReason("cancelled", "no longer wanted"))
HAVE = encode_have(ID, Have(Ranges(), ()))
Pair = tuple[Connection, Connection]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    """Three receiving connections, each with its sending peer."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(3):
            near, far = socket.socketpair()
            pair = Connection(near, state=ConnectionState.RECEIVING), Connection(far, state=ConnectionState.SENDING)
            for connection in pair:
                stack.enter_context(contextlib.closing(connection))
                connection.set_read_timeout(PATIENCE_SECONDS)
            made.append(pair)
        yield made


def _await_end(peer: Connection) -> None:
    with contextlib.suppress(ConnectionResetError):
        while True:
            peer.read_payload(peer.read_header())


def test_each_of_two_waiting_connections_ends_the_one_that_writes_the_same_bytes(
    pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "RIVAL_SECONDS", 2 * PATIENCE_SECONDS)
    memory, header = bytearray(100), Header(FrameType.CHUNK, 100, ID, count=1)
    dispatcher = InboundDispatcher(
        accept=lambda request, reply: reply(Acceptance((), lambda index: memoryview(memory))),
        on_event=lambda event: None,
        silence_seconds=PATIENCE_SECONDS,
    )
    (first, first_peer), *others = pairs
    dispatcher.open(first, OpenRequest(ID, "peer", b"", ObjectSizes.of([100]), PATIENCE_SECONDS))
    assert dispatcher.begin_write(first, "peer", header, wire_bytes=100)
    writing: Queue[Pair] = Queue()

    def write(connection: Connection, peer: Connection) -> None:
        assert dispatcher.begin_write(connection, "peer", header, wire_bytes=100)
        writing.put((connection, peer))

    threads = [threading.Thread(target=write, args=pair, daemon=True) for pair in others]
    for thread in threads:
        thread.start()
    _await_end(first_peer)
    dispatcher.end_write(first, header, "lost")
    second, second_peer = writing.get(timeout=PATIENCE_SECONDS)
    _await_end(second_peer)
    dispatcher.end_write(second, header, "lost")
    third, _ = writing.get(timeout=PATIENCE_SECONDS)
    dispatcher.end_write(third, header, "complete")
    for thread in threads:
        thread.join(PATIENCE_SECONDS)


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_reply_that_was_not_taken_is_sent_later_and_a_final_reply_wins(pairs: list[Pair], has_ended: bool) -> None:
    connection, peer = pairs[0]
    replies = ReplyQueue(lambda transfer_id: Reply(transfer_id, HAVE, (connection,)))
    num_bytes = fill_up(connection._socket)
    if has_ended:
        replies.put(Reply(ID, ERROR, (connection,)))
        replies.send(ID)
    replies.put(Reply(ID))
    replies.send(ID)
    replies.send_all()
    peer.read_into([memoryview(bytearray(num_bytes))])
    replies.send_all()
    assert peer.read_header().type is (FrameType.ERROR if has_ended else FrameType.HAVE)


def test_beyond_the_limit_the_oldest_pending_replies_are_dropped() -> None:
    asked: list[bytes] = []
    replies = ReplyQueue(asked.append)
    transfers = [os.urandom(16) for _ in range(3 * MAX_PENDING_REPLIES)]
    for transfer_id in transfers:
        replies.put(Reply(transfer_id))
    replies.send_all()
    assert asked == transfers[-MAX_PENDING_REPLIES:]
