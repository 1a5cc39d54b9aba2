"""Transfers that arrive, without what reads their connections: how much of them is kept, and who writes where."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from queue import Queue

import pytest

from prfaas.errors import RemoteProtocolError
from prfaas.transport.net.connection import Connection
from prfaas.transport.protocol.messages import MAX_MESSAGE_CHARACTERS, Ending, ObjectSizes, decode_ending
from prfaas.transport.protocol.wire import FrameType, Header
from prfaas.transport.ranges import Slab
from prfaas.transport.receiver.admission import FAIR_PIECES, MAX_STRAYS, MAX_TRANSFERS, STRAYS_SECONDS
from prfaas.transport.receiver.api import Accepted, OpenRequest, ReceiveEvent, ReceiveFailed
from prfaas.transport.receiver.assembler import MAX_FRAGMENTS
from prfaas.transport.receiver.table import CALL_RATIO, CALLED_CONNECTIONS, MAX_REMEMBERED, Arrivals, ChunkOutcome
from prfaas.transport.receiver.transfer import MAX_REMEMBERED_MESSAGE_BYTES
from prfaas.transport.sender.outbound_transfer import MAX_CANCELS
from tests.support.waiting import PATIENCE_SECONDS

GAVE_UP = Ending("cancelled", "never opened")


class Site:
    """Arrivals of a site that takes everything, and connections of its peers."""

    def __init__(self, **settings: int) -> None:
        self.memory = bytearray(1 << 20)
        self.events: list[ReceiveEvent] = []
        self.arrivals = Arrivals(
            accept=lambda request, reply: reply(Accepted((), lambda index: memoryview(self.memory))),
            on_event=self.events.append,
            reconnect_seconds=PATIENCE_SECONDS,
            rival_seconds=2 * PATIENCE_SECONDS,
            **settings,
        )
        self._open = contextlib.ExitStack()

    def connection(self) -> tuple[Connection, Connection]:
        """Ours and theirs."""
        one, other = socket.socketpair()
        ours, theirs = Connection(one, state="receiving"), Connection(other, state="sending")
        for its in (ours, theirs):
            self._open.enter_context(contextlib.closing(its))
        theirs.set_read_timeout(PATIENCE_SECONDS)
        return ours, theirs

    def open(self, connection: Connection, *sizes: tuple[int, int], peer: str = "peer") -> bytes:
        transfer_id = os.urandom(16)
        request = OpenRequest(transfer_id, peer, b"", ObjectSizes(sizes), PATIENCE_SECONDS)
        self.arrivals.open(connection, request)
        return transfer_id

    def begin(self, connection: Connection, transfer_id: bytes, slab: Slab) -> Header:
        """A chunk begins to come, and is wanted; returns its header."""
        header = Header(FrameType.CHUNK, slab.num_bytes, transfer_id, slab.first, slab.offset, count=slab.num_objects)
        assert self.arrivals.begin_write(connection, "peer", header, wire_bytes=header.length) is not None
        return header

    def land(self, connection: Connection, transfer_id: bytes, slab: Slab) -> None:
        self.arrivals.end_write(connection, self.begin(connection, transfer_id, slab), "whole")

    @property
    def num_pieces(self) -> int:
        return sum(arrival.pieces.count for arrival in self.arrivals._arrivals.values())

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site(max_pieces=16 * FAIR_PIECES)
    yield made
    made.close()


def test_chunks_that_cut_what_has_come_keep_to_the_bound_however_many_come_at_once(site: Site) -> None:
    """Each transfer has one column of every second object, which a chunk that begins and ends within it makes three."""
    num_objects, cuts = 4 * FAIR_PIECES, Slab(0, 2, 10, 20)
    connections = [site.connection()[0] for _ in range(6)]
    transfers = [site.open(connection, (100, num_objects)) for connection in connections]
    for connection, transfer_id in zip(connections, transfers, strict=True):
        for first in range(0, 2 * FAIR_PIECES, 2):
            site.land(connection, transfer_id, Slab(first, 1, 0, 90))
    assert site.num_pieces == 6 * FAIR_PIECES, "of twelve that are this peer's, and each would add two"
    begun = {}
    for connection, transfer_id in zip(connections, transfers, strict=True):
        begun[connection] = site.begin(connection, transfer_id, cuts)
    assert len(begun) == 6, "there is room for any one of them"
    for (connection, header), outcome in zip(
        begun.items(), itertools.cycle(["whole", "lost", "changed"]), strict=False
    ):
        site.arrivals.end_write(connection, header, outcome)  # type: ignore[arg-type]
        assert site.num_pieces <= 12 * FAIR_PIECES


def test_a_chunk_that_would_cut_what_has_come_beyond_the_bound_is_refused(site: Site) -> None:
    connection, _ = site.connection()
    num_objects = 16 * FAIR_PIECES
    transfer_id = site.open(connection, (100, num_objects))
    for first in range(0, 10 * FAIR_PIECES, 2):
        site.land(connection, transfer_id, Slab(first, 1, 0, 90))
    with pytest.raises(RemoteProtocolError) as refused:
        site.begin(connection, transfer_id, Slab(0, 2, 10, 20))
    assert refused.value.reason == "fragments"


@pytest.mark.parametrize("outcome", ["whole", "lost", "changed"])
def test_one_transfer_is_kept_in_so_many_pieces_however_much_room_there_is(outcome: ChunkOutcome) -> None:
    num_objects, site = 2 * MAX_FRAGMENTS, Site()
    (begun, _), (other, _) = site.connection(), site.connection()
    transfer_id, scattered = site.open(begun, (100, num_objects)), iter(range(0, num_objects, 2))
    for first in itertools.islice(scattered, MAX_FRAGMENTS // 3 - 2):
        site.land(other, transfer_id, Slab(first, 1, 0, 90))
    header = site.begin(begun, transfer_id, Slab(num_objects - 1, 1, 10, 20))  # cuts all that have come in three
    for first in itertools.islice(scattered, 10):
        site.land(other, transfer_id, Slab(first, 1, 0, 90))
    with pytest.raises(RemoteProtocolError, match="separate pieces"):
        site.begin(other, transfer_id, Slab(num_objects - 2, 1, 10, 20))
    site.arrivals.end_write(begun, header, outcome)
    assert site.num_pieces <= 1, "all else comes again"
    site.close()


def test_so_many_transfers_arrive_at_once_and_one_peer_leaves_room_for_others(site: Site) -> None:
    ours, theirs = site.connection()

    def refusal(peer: str) -> str:
        site.open(ours, (100, 1), peer=peer)
        header = theirs.read_header()
        payload = theirs.read_payload(header)
        return decode_ending(payload).message if header.type is FrameType.ERROR else ""

    refusals = [refusal("greedy") for _ in range(MAX_TRANSFERS)]
    assert refusals.count("") == MAX_TRANSFERS * 3 // 4 and "transfers are arriving" in refusals[-1]
    refusals = [refusal("honest") for _ in range(MAX_TRANSFERS)]
    assert refusals.count("") == MAX_TRANSFERS // 4 == len(site.arrivals._arrivals) - MAX_TRANSFERS * 3 // 4


def test_how_transfers_ended_takes_so_much_memory_at_most(site: Site) -> None:
    ours, theirs = site.connection()
    tracemalloc.start()
    for _ in range(2 * MAX_REMEMBERED):
        site.arrivals.cancelled(ours, "peer", os.urandom(16), Ending("cancelled", "x" * MAX_MESSAGE_CHARACTERS))
        theirs.read_payload(theirs.read_header())
        site.events.clear()
    assert tracemalloc.get_traced_memory()[0] < MAX_REMEMBERED * (MAX_REMEMBERED_MESSAGE_BYTES + 400)
    tracemalloc.stop()


def test_a_peer_may_cancel_so_many_transfers_that_were_never_opened_and_others_still_may(site: Site) -> None:
    ours, theirs = site.connection()

    def refusal(peer: str) -> str:
        try:
            site.arrivals.cancelled(ours, peer, os.urandom(16), GAVE_UP)
        except RemoteProtocolError as error:
            return error.reason
        assert theirs.has_input(), "it is answered"
        theirs.read_payload(theirs.read_header())
        return ""

    refusals = [refusal("floods") for _ in range(MAX_STRAYS)]
    assert not any(refusals[:MAX_CANCELS]), "as many as any sender keeps"
    assert refusals[-1] == "cancels"
    assert not any(refusal("honest") for _ in range(MAX_CANCELS))
    heard = [event.peer_name for event in site.events if isinstance(event, ReceiveFailed)]
    assert (heard.count("floods"), heard.count("honest")) == (refusals.count(""), MAX_CANCELS)
    now = time.monotonic()
    for seconds in (0.0, STRAYS_SECONDS):
        site.arrivals.expire(now + seconds)
    assert not refusal("floods")


@pytest.mark.parametrize("fate", ["never opened", "alone", "given up", "complete"])
def test_a_cancel_is_answered_on_the_connection_over_which_it_came(site: Site, fate: str) -> None:
    (opener, _), (ours, theirs) = site.connection(), site.connection()
    transfer_id = os.urandom(16) if fate == "never opened" else site.open(opener, (100, 1))
    if fate == "alone":
        site.arrivals.forget(opener, "peer")
    elif fate == "given up":
        site.arrivals.cancel(transfer_id, "cancelled", "not wanted here")
    elif fate == "complete":
        site.land(opener, transfer_id, Slab(0, 1, 0, 100))
    site.arrivals.cancelled(ours, "peer", transfer_id, GAVE_UP)
    assert theirs.has_input()
    answer = theirs.read_header()
    assert answer.transfer_id == transfer_id
    assert answer.type is (FrameType.DONE if fate == "complete" else FrameType.ERROR)


def test_for_a_transfer_that_lost_its_connections_a_few_others_are_asked_and_others_each_time(site: Site) -> None:
    num_rounds = 3  # until its time is up
    opener, _ = site.connection()
    transfers = [site.open(opener, (100, 1)) for _ in range(5)]
    others = [site.connection() for _ in range(num_rounds * CALLED_CONNECTIONS)]
    for ours, _ in others:
        site.arrivals.joined(ours, "peer")
    site.arrivals.forget(opener, "peer")
    alone_since = site.arrivals._arrivals[transfers[0]].alone_since
    assert alone_since is not None
    asked: Counter[tuple[Connection, bytes]] = Counter()
    for number in range(num_rounds):
        site.arrivals.expire(alone_since + (number + 1) * CALL_RATIO * PATIENCE_SECONDS)
        for _, theirs in others:
            while theirs.has_input():
                header = theirs.read_header()
                assert header.type is FrameType.REOPEN
                asked[theirs, header.transfer_id] += 1
        assert asked.total() == (number + 1) * CALLED_CONNECTIONS * len(transfers)
    assert asked == {(theirs, transfer): 1 for _, theirs in others for transfer in transfers}


def test_of_two_that_wait_for_the_same_bytes_the_second_ends_the_first(site: Site) -> None:
    (first, first_peer), *others = (site.connection() for _ in range(3))
    transfer_id, slab = site.open(first, (100, 1)), Slab(0, 1, 0, 100)
    header = site.begin(first, transfer_id, slab)
    turns: Queue[tuple[Connection, Connection]] = Queue()

    def write(ours: Connection, theirs: Connection) -> None:
        site.begin(ours, transfer_id, slab)
        turns.put((ours, theirs))

    threads = [threading.Thread(target=write, args=other, daemon=True) for other in others]
    for thread in threads:
        thread.start()
    _hears_the_end(first_peer)
    site.arrivals.end_write(first, header, "lost")
    second, second_peer = turns.get(timeout=PATIENCE_SECONDS)
    _hears_the_end(second_peer)
    site.arrivals.end_write(second, header, "lost")
    third, _ = turns.get(timeout=PATIENCE_SECONDS)
    site.arrivals.end_write(third, header, "whole")
    for thread in threads:
        thread.join(PATIENCE_SECONDS)


def _hears_the_end(peer: Connection) -> None:
    with contextlib.suppress(ConnectionResetError):
        while True:
            peer.read_payload(peer.read_header())
