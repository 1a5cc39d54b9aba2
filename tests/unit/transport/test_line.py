"""One connection of a link: how it ends, and what can be said over it then."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from prfaas.errors import RemoteProtocolError
from prfaas.transport.net.connection import Connection
from prfaas.transport.protocol.messages import decode_ending, encode_refusal
from prfaas.transport.protocol.wire import ConnectionState, FrameType, Header
from prfaas.transport.sender.connection_worker import ConnectionWorker
from tests.support.waiting import PATIENCE_SECONDS
from tests.unit.transport.lines import Site

NOT_SENT = Header(FrameType.ACK, 0, offset=5).encode()


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    """Of the line, and of its peer."""
    ours, theirs = socket.socketpair()
    connection, peer = (
        Connection(ours, state=ConnectionState.SENDING),
        Connection(theirs, state=ConnectionState.RECEIVING),
    )
    peer.set_read_timeout(PATIENCE_SECONDS)
    with contextlib.closing(connection), contextlib.closing(peer):
        yield connection, peer


@pytest.mark.parametrize(
    ("frame", "reason"),
    [(NOT_SENT, "ack"), (encode_refusal(RemoteProtocolError("memory", "come again")), "refused")],
    ids=["acknowledges what was not sent", "refuses"],
)
def test_a_peer_that_breaks_the_protocol_or_refuses_can_be_told_so(
    ends: tuple[Connection, Connection], frame: bytes, reason: str
) -> None:
    site, (connection, peer) = Site(), ends
    line = ConnectionWorker(site.work, connection, generation=site.lines.generation)
    peer.write(frame)
    with pytest.raises(RemoteProtocolError) as refused:
        line.run()
    assert refused.value.reason == reason and not line.is_alive
    assert connection.try_write(encode_refusal(refused.value))
    while (header := peer.read_header()).type is not FrameType.ERROR:  # what had left before
        peer.read_payload(header)
    assert decode_ending(peer.read_payload(header)).message.startswith(f"{reason}: ")


def test_a_line_whose_peer_is_gone_is_lost_and_says_nothing_more(ends: tuple[Connection, Connection]) -> None:
    site, (connection, peer) = Site(), ends
    line = ConnectionWorker(site.work, connection, generation=site.lines.generation)
    peer.close()
    with pytest.raises(ConnectionError):
        line.run()
    assert not line.is_alive and not connection.try_write(NOT_SENT)
