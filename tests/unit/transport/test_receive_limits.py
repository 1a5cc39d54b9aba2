"""Limits over what peers send to this end: who is told what, over connections of this machine."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Hashable, Iterator

import pytest

from prfaas.transport.congestion.rate_budget import LinkUsage, RateBudget
from prfaas.transport.net.connection import Connection
from prfaas.transport.net.handshake import CAPABILITIES
from prfaas.transport.protocol.wire import HEADER_BYTES, ConnectionState, FrameType, Header
from prfaas.transport.receiver.limits import BUSY_SECONDS, CHANGE_RATIO, ReceiveLimits
from tests.support.waiting import PATIENCE_SECONDS

LIMIT = 8e6
STEP = 0.1  # seconds between two looks


class Late(Connection):
    """Before it writes, another thread does something else, for which it waits a moment."""

    meanwhile: threading.Thread | None = None

    def write_at_once(self, frame: bytes) -> bool:
        thread, self.meanwhile = self.meanwhile, None
        if thread is not None:
            thread.start()
            thread.join(0.2)
        return super().write_at_once(frame)


class CountingBudget(RateBudget):
    """Counts the shares that are reckoned, each of which takes the longer the more members there are."""

    num_shares = 0

    def share(self, link: Hashable, use: LinkUsage, *, now: float) -> float:
        self.num_shares += 1
        return super().share(link, use, now=now)


class Ends:
    """A receiving end whose peers' names begin with "t" share a limit, and what its peers hear."""

    def __init__(self) -> None:
        self.budget = budget = CountingBudget(LIMIT)
        self.limits = ReceiveLimits(lambda peer: (budget,) if peer.startswith("t") else ())
        self.now = 0.0
        self._sockets: list[socket.socket] = []
        self._connections: list[Connection] = []

    def join(
        self, peer: str, capabilities: tuple[str, ...] = CAPABILITIES, *, make: Callable[..., Connection] = Connection
    ) -> tuple[Connection, socket.socket]:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._sockets.append(theirs)
        self._connections.append(make(ours, state=ConnectionState.RECEIVING))
        self.limits.connected(self._connections[-1], peer, capabilities, now=self.now)
        return self._connections[-1], theirs

    def go_on(self, seconds: float, **bytes_per_second: float) -> None:
        """So much comes from each peer."""
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            for peer, rate in bytes_per_second.items():
                self.limits.received(peer, int(rate * STEP))
            self.limits.tick(self.now)

    def close(self) -> None:
        for connection, theirs in zip(self._connections, self._sockets, strict=True):
            connection.close()
            theirs.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def _told(theirs: socket.socket) -> list[int]:
    """What a peer has heard on a connection that it may send a second."""
    said = b""
    try:
        while True:
            said += theirs.recv(1 << 16)
    except BlockingIOError:
        headers = [Header.decode(said[at : at + HEADER_BYTES]) for at in range(0, len(said), HEADER_BYTES)]
    assert {header.type for header in headers} <= {FrameType.RATE}
    return [header.offset for header in headers]


def test_a_peer_hears_its_share_with_each_connection_and_when_it_changes(ends: Ends) -> None:
    first = [ends.join("tokyo-1")[1] for _ in range(2)]
    _, second = ends.join("tokyo-2")
    assert [_told(its) for its in (*first, second)] == [[LIMIT]] * 3, "nobody sends"
    ends.go_on(1.0, **{"tokyo-1": LIMIT})
    assert [_told(its) for its in (*first, second)] == [[], [], [LIMIT / 2]]
    ends.go_on(1.0, **{"tokyo-1": LIMIT, "tokyo-2": LIMIT / 2})
    assert [_told(its)[-1] for its in first] == [LIMIT / 2] * 2 and _told(second) == []
    ends.go_on(2 * BUSY_SECONDS, **{"tokyo-1": LIMIT / 2})
    assert [_told(its)[-1] for its in first] == [LIMIT] * 2 and _told(second) == []


def test_what_a_slow_peer_does_not_use_is_for_the_others(ends: Ends) -> None:
    (_, slow), (_, fast) = ends.join("tokyo-1"), ends.join("tokyo-2")
    ends.go_on(5.0, **{"tokyo-1": LIMIT / 8, "tokyo-2": LIMIT / 2})
    assert _told(slow)[-1] == LIMIT / 2, "which it may have at once"
    assert math.isclose(_told(fast)[-1], LIMIT * (1 - 1 / 8 / 0.8), rel_tol=2 * CHANGE_RATIO)


def test_a_peer_that_is_gone_leaves_its_share_to_the_others(ends: Ends) -> None:
    (_, first), (connection, _) = ends.join("tokyo-1"), ends.join("tokyo-2")
    both = {"tokyo-1": LIMIT / 2, "tokyo-2": LIMIT / 2}
    ends.go_on(1.0, **both)
    assert _told(first)[-1] == LIMIT / 2
    ends.limits.disconnected(connection, "tokyo-2")
    ends.go_on(STEP, **both)
    assert _told(first) == [LIMIT]


def test_of_a_peer_that_joins_no_share_but_its_own_is_reckoned(ends: Ends) -> None:
    for number in range(20):
        ends.join(f"tokyo-{number}")
    assert ends.budget.num_shares == 20


def test_of_two_threads_that_tell_at_once_the_later_is_heard_last(ends: Ends) -> None:
    connection, theirs = ends.join("tokyo-1", make=Late)
    for number in range(2, 5):
        ends.join(f"tokyo-{number}")
    two, three, four = ({f"tokyo-{number}": LIMIT / 4 for number in range(1, 1 + count)} for count in (2, 3, 4))
    ends.go_on(1.0, **two)
    ends.go_on(STEP, **three)
    assert isinstance(connection, Late)
    thread = connection.meanwhile = threading.Thread(target=ends.go_on, args=(2 * STEP,), kwargs=four)
    ends.go_on(STEP, **three)
    thread.join(PATIENCE_SECONDS)
    assert _told(theirs)[-2:] == [LIMIT // 3, LIMIT // 4]


@pytest.mark.parametrize(("peer", "capabilities"), [("tokyo-1", ("lz4",)), ("osaka-1", CAPABILITIES)])
def test_who_does_not_know_of_limits_or_has_none_is_told_nothing(
    ends: Ends, peer: str, capabilities: tuple[str, ...]
) -> None:
    connection, theirs = ends.join(peer, capabilities)
    ends.go_on(1.0, **{peer: 2 * LIMIT})
    assert _told(theirs) == []
    ends.limits.disconnected(connection, peer)
